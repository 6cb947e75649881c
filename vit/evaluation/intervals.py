"""How sure a metric is, and a difference: 95 % intervals by the bootstrap, and McNemar's test."""

import numpy as np

from vit.evaluation.metrics import Floats, Scores, compute_metrics
from vit.runtime.bootstrap import compute_percentiles, draw_weights

RESAMPLES = 1000
# no means over images: resampling shifts them
_BIASED = ("macro_f1", "macro_precision", "macro_recall", "ece")
# discordant images; above, the chi-square form agrees to three digits
_MAX_EXACT = 1000


def compute_intervals(
    scores: Scores, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of every metric; each holds its metric.

    They say how far a metric varies with the choice of test images, not with the training seed.
    Repeated images raise the calibration error, so much that its replicates may all lie above it,
    and lower macro averages of rare classes: these replicates are moved by their bias, the mean of
    the replicates minus the metric (Efron & Tibshirani 1993, chapter 10).

    Args:
        scores: of the test images.
        resamples: draws of the images with replacement.
        seed: of the draws.

    Returns:
        The lower and the upper end by the metric's name.
    """
    generator = np.random.default_rng(seed)
    replicates = [
        compute_metrics(scores, draw_weights(len(scores), generator)) for _ in range(resamples)
    ]
    intervals = {}
    for name, value in compute_metrics(scores).items():
        values = np.array([replicate[name] for replicate in replicates])
        if name in _BIASED:
            values = np.clip(values + (value - values.mean()), 0, 1)
        low, high = compute_percentiles(values)
        # of few images the draws may be all alike
        intervals[name] = (min(float(low), value), max(float(high), value))
    return intervals


def compute_difference_interval(
    correct_a: Floats, correct_b: Floats, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of top-1 of B minus A, from a paired bootstrap: images are drawn for
    both together, seeds for each.

    Args:
        correct_a: whether each seed of A is correct on each image, [seeds, n].
        correct_b: of B on the same images.
        resamples: draws with replacement.
        seed: of the draws.

    Returns:
        The lower and the upper end.
    """
    generator = np.random.default_rng(seed)
    num_images = correct_a.shape[1]
    differences = np.empty(resamples)
    for index in range(resamples):
        seeds_a = draw_weights(len(correct_a), generator) / len(correct_a)
        seeds_b = draw_weights(len(correct_b), generator) / len(correct_b)
        change = seeds_b @ correct_b - seeds_a @ correct_a
        differences[index] = change @ draw_weights(num_images, generator) / num_images
    low, high = compute_percentiles(differences)
    return float(low), float(high)


def compute_mcnemar(only_a: int, only_b: int) -> float:
    """Compute McNemar's test (1947) that both models err equally often.

    Exact binomial up to 1,000 discordant images, chi-square with Edwards' continuity correction
    above.

    Args:
        only_a: images that only A predicts correctly.
        only_b: images that only B does.

    Returns:
        The two-sided p-value.
    """
    # takes a second, which other commands don't need
    from scipy.stats import binomtest, chi2

    discordant = only_a + only_b
    if discordant == 0:
        return 1.0
    if discordant <= _MAX_EXACT:
        return float(binomtest(only_a, discordant).pvalue)
    return float(chi2.sf(max(abs(only_a - only_b) - 1, 0) ** 2 / discordant, df=1))
