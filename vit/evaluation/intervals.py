"""How sure a metric is, and a difference: 95 % intervals, and McNemar's test.

They say how far a metric varies with the choice of test images, not with the training seed.
Coverage, the fraction of test sets whose interval holds the true value, is measured by
benchmarks/intervals.py.
"""

import numpy as np
from scipy.special import gammaincinv

from vit.evaluation.metrics import (
    NUM_BINS,
    Floats,
    Ints,
    Scores,
    compute_metrics,
    compute_proportion_interval,
    find_bins,
)
from vit.runtime.bootstrap import compute_percentiles, draw_weights

RESAMPLES = 1000
_TAIL = (1 - 0.95) / 2
# halvings, of a range of some times the calibration error
_ECE_STEPS = 24
# discordant images; above, the chi-square form agrees to three digits
_MAX_EXACT = 1000


def compute_intervals(scores: Scores) -> dict[str, tuple[float, float]]:
    """95 % confidence intervals of every metric; each holds its metric.

    A bootstrap fails where errors are few: an image that is not among those drawn can't be drawn
    again, and of a test set without an error all resamples are alike. Here accuracies are exact
    binomial (Clopper & Pearson 1934). Losses, and what macro averages lack of 1, are sums of what
    single images add, most of it by few: gamma intervals (Fay & Feuer 1997), which are the exact
    ones of Poisson counts. The calibration error is bounded by `_bound_ece`.

    Args:
        scores: of the test images.

    Returns:
        The lower and the upper end by the metric's name.
    """
    metrics = compute_metrics(scores)
    intervals = {"ece": _bound_ece(scores)}

    hits = np.array([np.sum(scores.rank < rank) for rank in (1, 5)])
    counts = np.full(2, len(scores))
    ends = zip(*compute_proportion_interval(hits, counts), strict=True)
    intervals.update(zip(("top1", "top5"), ends, strict=True))

    # what an image adds that the model gets wrong, at most as likely as the model thinks
    error_probability = np.maximum(1 - scores.confidence, 1e-12)
    for name, losses, error_losses in (
        ("loss", scores.loss, -np.log(error_probability)),
        ("nll", scores.nll, -np.log(error_probability)),
        ("brier", scores.brier, 2 * scores.confidence**2),
    ):
        typical = float(np.average(error_losses, weights=error_probability))
        intervals[name] = _bound_sum(
            metrics[name],
            variance=float(losses.var()) / max(len(losses) - 1, 1),
            step=max(float(losses.max()), typical) / len(losses),
        )

    for name, columns in (
        ("macro_f1", [scores.labels, scores.predicted]),
        ("macro_precision", [scores.predicted]),
        ("macro_recall", [scores.labels]),
    ):
        low, high = _bound_macro_error(scores, 1 - metrics[name], columns)
        intervals[name] = (1 - high, 1 - low)

    largest = {"loss": np.inf, "nll": np.inf, "brier": 2.0}
    return {
        name: (
            max(min(intervals[name][0], value), 0.0),
            min(max(intervals[name][1], value), largest.get(name, 1.0)),
        )
        for name, value in metrics.items()
    }


def _bound_sum(total: float, *, variance: float, step: float) -> tuple[float, float]:
    """The gamma interval of a sum of what images add (Fay & Feuer 1997, equations 3 and 4).

    Args:
        total: the sum, at least 0.
        variance: of the sum.
        step: what one more image could add.
    """
    low = 0.0
    if total > 0 and variance > 0:
        low = float(gammaincinv(total**2 / variance, _TAIL)) * variance / total
    mean = total + step
    spread = variance + step**2
    return low, float(gammaincinv(mean**2 / spread, 1 - _TAIL)) * spread / mean


def _bound_macro_error(scores: Scores, error: float, columns: list[Ints]) -> tuple[float, float]:
    """The interval of what a macro average lacks of 1.

    A wrong image adds 1/n to the error of a class that n images have as label (of recall), as
    prediction (of precision), or as both together (of F1), and that divided by the number of
    classes to the macro average.

    Args:
        scores: of the images.
        error: 1 minus the macro average.
        columns: the classes by which the images are counted, [n] each.
    """
    num_classes = scores.num_classes
    occurs = np.bincount(scores.labels, minlength=num_classes) > 0
    occurs |= np.bincount(scores.predicted, minlength=num_classes) > 0
    counts = np.bincount(np.concatenate(columns), minlength=num_classes)
    # what each image adds to the macro average's error if it is wrong, [n]
    weights = np.sum([1 / counts[column] for column in columns], axis=0) / occurs.sum()

    wrong = ~scores.correct
    variance = float((weights**2 * (wrong - wrong.mean()) ** 2).sum())
    # a class that no image has as its label, or as its prediction, may as well have a value of 1
    for column in columns:
        num_unknown = np.sum(occurs & (np.bincount(column, minlength=num_classes) == 0))
        variance += float(num_unknown) / occurs.sum() ** 2
    return _bound_sum(error, variance=variance, step=float((weights**2).sum() / weights.sum()))


def _bound_ece(scores: Scores) -> tuple[float, float]:
    """The interval of the calibration error, by inverting a test.

    Noise raises the calibration error: a calibrated model's is never 0. So the gaps of the bins are
    scaled by a common factor, with binomial noise added, and the interval has the errors from which
    the measured one deviates no more than 95 % of draws do.
    """
    count = len(scores)
    bins = find_bins(scores.confidence)
    sizes = np.bincount(bins, minlength=NUM_BINS)
    correct = np.bincount(bins, scores.correct, minlength=NUM_BINS)
    gaps = np.bincount(bins, scores.confidence - scores.correct, minlength=NUM_BINS) / count
    measured = float(np.abs(gaps).sum())

    # Laplace's estimate: of a bin without an error too
    accuracy = (correct + 1) / (sizes + 2)
    deviations = np.sqrt(sizes * accuracy * (1 - accuracy)) / count
    noise = np.random.default_rng(0).standard_normal((1000, NUM_BINS)) * deviations

    def quantile(factor: float, level: float) -> float:
        return float(np.quantile(np.abs(factor * gaps + noise).sum(axis=1), level))

    def scale_to(level: float) -> float:
        """The calibration error at which this quantile of the draws is the measured one."""
        low = 0.0
        high = 1 + 10 * float(deviations.sum()) / max(measured, 1e-12)
        for _ in range(_ECE_STEPS):
            middle = (low + high) / 2
            if quantile(middle, level) < measured:
                low = middle
            else:
                high = middle
        return high * measured

    low = 0.0
    if quantile(0, 1 - _TAIL) < measured:
        low = scale_to(1 - _TAIL)
    # less than what noise alone would make: all of it may be hidden in noise
    high = quantile(0, 1 - _TAIL)
    if quantile(0, _TAIL) < measured:
        high = scale_to(_TAIL)
    return low, high


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
