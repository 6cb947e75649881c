"""95 % confidence intervals of the metrics.

They say how far a metric varies with the choice of test images, not with the training seed.
research/intervals.py measures their coverage, the fraction of test sets whose interval holds the
true value.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv, gammaincinv, stdtrit

from vit.evaluation.metrics import NUM_BINS, Scores, compute_metrics, find_bins
from vit.prediction.probabilities import Bools, Floats, Ints

# probability that the true value lies below a 95 % interval, and that it lies above
_TAIL = 0.025
# bisection steps, from a range of a few times the calibration error
_ECE_STEPS = 24


def compute_intervals(
    scores: Scores, groups: Sequence[str] | None = None
) -> dict[str, tuple[float, float]]:
    """Compute the 95 % confidence interval of every metric. Each interval includes its metric.

    A bootstrap fails if there are few errors: it can't draw errors that are not in the test set,
    and without any error all resamples are equal. Accuracies here are exact binomial intervals
    (Clopper & Pearson 1934). Losses and macro errors are sums to which a few images contribute
    most, so they have gamma intervals (Fay & Feuer 1997), which are exact for Poisson counts.
    `_bound_ece` bounds the calibration error.

    Args:
        scores: Scores of the test images.
        groups: Group of each image. Images of one group, such as a burst, are not independent, and
            all intervals except that of the calibration error are wider for it. None: each image is
            independent.

    Returns:
        Lower and upper end by the name of the metric.
    """
    metrics = compute_metrics(scores)
    intervals = {"ece": _bound_ece(scores)}
    clusters = np.arange(len(scores))
    if groups is not None:
        clusters = np.unique(np.array(groups), return_inverse=True)[1]
    # contribution of one more group, in units of one more image
    group_size = len(scores) / len(np.unique(clusters))

    for name, rank in (("top1", 1), ("top5", 5)):
        intervals[name] = compute_clustered_interval(scores.rank < rank, clusters)

    # contribution of a wrong image, which is at most as likely as the model says
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


def compute_clustered_interval(correct: Bools, clusters: Ints) -> tuple[float, float]:
    """Compute the 95 % interval of an accuracy whose images come in clusters, 0 to 1.

    It is Clopper and Pearson's interval for the number of independent images that would give the
    accuracy the same variance (Korn and Graybill 1998, "Confidence intervals for proportions with
    small expected number of positive counts estimated from survey data").

    Args:
        correct: True for each image that is predicted correctly, [n].
        clusters: Number of each image's cluster, [n].
    """
    count = len(correct)
    accuracy = float(correct.mean())
    sizes = np.bincount(clusters)
    sizes = sizes[sizes > 0]
    num_clusters = len(sizes)
    if num_clusters == 1 < count:
        return 0.0, 1.0
    variance = _compute_variance(correct.astype(np.float64) - accuracy, clusters)
    # if all images are correct, or none, a cluster counts as one image
    effective = float(num_clusters)
    if num_clusters < count and variance > 0:
        effective = min(accuracy * (1 - accuracy) / variance, count)
    # the variance of a few clusters is uncertain
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
    """Compute the variance of a mean over images that come in clusters, from the deviations of the
    images: the variance of the ratio of the clusters' sums."""
    num_clusters = len(np.unique(clusters))
    sums = np.bincount(clusters, deviations)
    factor = num_clusters / max(num_clusters - 1, 1)
    return float(factor * (sums**2).sum() / len(deviations) ** 2)


def _bound_sum(total: float, *, variance: float, step: float) -> tuple[float, float]:
    """Compute the gamma interval of a sum over images (Fay & Feuer 1997, equations 3 and 4).

    Args:
        total: The sum, at least 0.
        variance: Variance of the sum.
        step: Contribution of one more image.
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
    """Compute the interval of 1 minus a macro average.

    A wrong image adds 1/n to the error of a class, where n counts the images with that label (for
    recall), that prediction (for precision), or both together (for F1). Divided by the number of
    classes, this is its contribution to the macro error.

    Args:
        scores: Scores of the images.
        error: 1 minus the macro average.
        columns: Classes by which the images are counted, [n] each.
        clusters: Number of each image's cluster, [n].
    """
    num_classes = scores.num_classes
    occurs = np.bincount(scores.labels, minlength=num_classes) > 0
    occurs |= np.bincount(scores.predicted, minlength=num_classes) > 0
    counts = np.bincount(np.concatenate(columns), minlength=num_classes)
    # contribution of each image to the macro error if it is wrong, [n]
    weights = np.sum([1 / counts[column] for column in columns], axis=0) / occurs.sum()

    wrong = ~scores.correct
    deviations = np.bincount(clusters, weights * (wrong - wrong.mean()))
    variance = float((deviations**2).sum())
    # a class without labels or predictions counts as 0, but its true value may be up to 1
    for column in columns:
        num_unknown = np.sum(occurs & (np.bincount(column, minlength=num_classes) == 0))
        variance += float(num_unknown) / occurs.sum() ** 2
    group_size = len(clusters) / len(np.unique(clusters))
    step = group_size * float((weights**2).sum() / weights.sum())
    return _bound_sum(error, variance=variance, step=step)


def _bound_ece(scores: Scores) -> tuple[float, float]:
    """Compute the interval of the calibration error, by inverting a test.

    Noise raises the calibration error, so that even a calibrated model's is never 0. Therefore the
    gaps of the bins are scaled by a common factor, and binomial noise is added. The interval holds
    the calibration errors under which the measured one is not among the most extreme 5 % of draws.
    """
    count = len(scores)
    bins = find_bins(scores.confidence)
    sizes = np.bincount(bins, minlength=NUM_BINS)
    correct = np.bincount(bins, scores.correct, minlength=NUM_BINS)
    gaps = np.bincount(bins, scores.confidence - scores.correct, minlength=NUM_BINS) / count
    measured = float(np.abs(gaps).sum())

    # Laplace's estimate has noise even for a bin without an error
    accuracy = (correct + 1) / (sizes + 2)
    deviations = np.sqrt(sizes * accuracy * (1 - accuracy)) / count
    noise = np.random.default_rng(0).standard_normal((1000, NUM_BINS)) * deviations

    def quantile(factor: float, level: float) -> float:
        return float(np.quantile(np.abs(factor * gaps + noise).sum(axis=1), level))

    def scale_to(level: float) -> float:
        """Find the calibration error for which this quantile of the draws is the measured one."""
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
    # if the measured error is below what noise alone gives, noise may hide all of it
    high = quantile(0, 1 - _TAIL)
    if quantile(0, _TAIL) < measured:
        high = scale_to(_TAIL)
    return low, high
