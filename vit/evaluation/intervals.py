"""How sure a metric is, and a difference: 95 % intervals, and tests.

Intervals of metrics say how far a metric varies with the choice of test images, not with the training seed.
Coverage, the fraction of test sets whose interval holds the true value, is measured by
research/intervals.py.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, gammaincinv, stdtrit

from vit.evaluation.metrics import NUM_BINS, Scores, compute_metrics, find_bins
from vit.prediction.probabilities import Floats, Ints

# chance that the true value lies below a 95 % interval, and that it lies above
_TAIL = 0.025
# halvings, of a range of some times the calibration error
_ECE_STEPS = 24


def compute_intervals(
    scores: Scores, groups: Sequence[str] | None = None
) -> dict[str, tuple[float, float]]:
    """95 % confidence intervals of every metric; each holds its metric.

    A bootstrap fails where errors are few: an image that is not among those drawn can't be drawn
    again, and of a test set without an error all resamples are alike. Here accuracies are exact
    binomial (Clopper & Pearson 1934). Losses, and what macro averages lack of 1, are sums of what
    single images add, most of it by few: gamma intervals (Fay & Feuer 1997), which are the exact
    ones of Poisson counts. The calibration error is bounded by `_bound_ece`.

    Args:
        scores: of the test images.
        groups: of the same images, such as a burst's, of which one tells about the others: all but
            the calibration error's interval are wider by that. None: each image is its own.

    Returns:
        The lower and the upper end by the metric's name.
    """
    metrics = compute_metrics(scores)
    intervals = {"ece": _bound_ece(scores)}
    clusters = np.arange(len(scores))
    if groups is not None:
        clusters = np.unique(np.array(groups), return_inverse=True)[1]
    # what one more group could add, in units of one more image
    group_size = len(scores) / len(np.unique(clusters))

    for name, rank in (("top1", 1), ("top5", 5)):
        intervals[name] = compute_clustered_interval(scores.rank < rank, clusters)

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
            variance=_compute_variance(losses - losses.mean(), clusters),
            step=group_size * max(float(losses.max()), typical) / len(losses),
        )

    for name, columns in (
        ("macro_f1", [scores.labels, scores.predicted]),
        ("macro_precision", [scores.predicted]),
        ("macro_recall", [scores.labels]),
    ):
        low, high = _bound_macro_error(scores, 1 - metrics[name], columns, clusters)
        intervals[name] = (1 - high, 1 - low)

    largest = {"loss": np.inf, "nll": np.inf, "brier": 2.0}
    return {
        name: (
            max(min(intervals[name][0], value), 0.0),
            min(max(intervals[name][1], value), largest.get(name, 1.0)),
        )
        for name, value in metrics.items()
    }


def compute_clustered_interval(correct: NDArray[np.bool_], clusters: Ints) -> tuple[float, float]:
    """95 % interval of an accuracy whose images come in clusters, 0 to 1.

    Clopper and Pearson's interval of as many independent images as have the accuracy's variance
    between clusters (Korn and Graybill 1998, "Confidence intervals for proportions with small
    expected number of positive counts estimated from survey data").

    Args:
        correct: [n].
        clusters: [n], a number for each.
    """
    count = len(correct)
    accuracy = float(correct.mean())
    sizes = np.bincount(clusters)
    sizes = sizes[sizes > 0]
    num_clusters = len(sizes)
    if num_clusters == 1 < count:
        return 0.0, 1.0
    variance = _compute_variance(correct.astype(np.float64) - accuracy, clusters)
    # each image on its own; or all alike: as if the images of a cluster were one
    effective = float(num_clusters)
    if num_clusters < count and variance > 0:
        effective = min(accuracy * (1 - accuracy) / variance, count)
    # few clusters know their variance badly
    if num_clusters < count:
        ratio = stdtrit(count - 1, 1 - _TAIL) / stdtrit(num_clusters - 1, 1 - _TAIL)
        effective *= float(ratio) ** 2
    hits = accuracy * effective
    low, high = 0.0, 1.0
    if hits > 0:
        low = float(betaincinv(hits, effective - hits + 1, _TAIL))
    if hits < effective:
        high = float(betaincinv(hits + 1, effective - hits, 1 - _TAIL))
    return low, high


def _compute_variance(deviations: Floats, clusters: Ints) -> float:
    """Of a mean over images that come in clusters, from their deviations from it: that of the ratio of
    the clusters' sums."""
    num_clusters = len(np.unique(clusters))
    sums = np.bincount(clusters, deviations)
    factor = num_clusters / max(num_clusters - 1, 1)
    return float(factor * (sums**2).sum() / len(deviations) ** 2)


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


def _bound_macro_error(
    scores: Scores, error: float, columns: list[Ints], clusters: Ints
) -> tuple[float, float]:
    """The interval of what a macro average lacks of 1.

    A wrong image adds 1/n to the error of a class that n images have as label (of recall), as
    prediction (of precision), or as both together (of F1), and that divided by the number of
    classes to the macro average.

    Args:
        scores: of the images.
        error: 1 minus the macro average.
        columns: the classes by which the images are counted, [n] each.
        clusters: a number of each image's group, [n].
    """
    num_classes = scores.num_classes
    occurs = np.bincount(scores.labels, minlength=num_classes) > 0
    occurs |= np.bincount(scores.predicted, minlength=num_classes) > 0
    counts = np.bincount(np.concatenate(columns), minlength=num_classes)
    # what each image adds to the macro average's error if it is wrong, [n]
    weights = np.sum([1 / counts[column] for column in columns], axis=0) / occurs.sum()

    wrong = ~scores.correct
    deviations = np.bincount(clusters, weights * (wrong - wrong.mean()))
    variance = float((deviations**2).sum())
    # a class that no image has as its label, or as its prediction, may as well have a value of 1
    for column in columns:
        num_unknown = np.sum(occurs & (np.bincount(column, minlength=num_classes) == 0))
        variance += float(num_unknown) / occurs.sum() ** 2
    group_size = len(clusters) / len(np.unique(clusters))
    step = group_size * float((weights**2).sum() / weights.sum())
    return _bound_sum(error, variance=variance, step=step)


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
