"""95 % confidence intervals of the metrics.

They say how far a metric varies with the choice of test images, not with the training seed.
research/intervals.py measures their coverage, the fraction of test sets whose interval holds the
true value.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import gammaincinv

from vit.evaluation.clusters import (
    TAIL,
    Interval,
    compute_clustered_interval,
    compute_design_effect,
    number_clusters,
)
from vit.evaluation.metrics import NUM_BINS, Scores, compute_metrics, find_bins
from vit.prediction.probabilities import Ints

# bisection steps, from a range of a few times the calibration error
_ECE_STEPS = 24


def compute_intervals(scores: Scores, groups: Sequence[str] | None = None) -> dict[str, Interval]:
    """Compute the 95 % confidence interval of every metric. Each interval includes its metric.

    A bootstrap fails if there are few errors: it can't draw errors that are not in the test set,
    and without any error all resamples are equal. Accuracies here are exact binomial intervals
    (Clopper & Pearson 1934). Losses and macro errors are sums to which a few images contribute
    most, so they have gamma intervals (Fay & Feuer 1997), which are exact for Poisson counts.
    `_bound_ece` bounds the calibration error.

    Args:
        scores: Scores of the test images.
        groups: Group of each image. Images of one group, such as a burst, are not independent, and
            all intervals are wider for it. None: each image is independent.

    Returns:
        Lower and upper end by the name of the metric.
    """
    metrics = compute_metrics(scores)
    count = len(scores)
    clusters = number_clusters(groups, count)
    intervals = {"ece": _bound_ece(scores, clusters)}
    # contribution of one more group, in units of one more image
    group_size = _compute_group_size(clusters)
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
        deviations = losses - losses.mean()
        # the unbiased variance of the mean
        variance = count / max(count - 1, 1) * float((deviations**2).sum()) / count**2
        intervals[name] = bound_sum(
            metrics[name],
            variance=variance * compute_design_effect(deviations, clusters, scores.correct),
            step=group_size * max(float(losses.max()), typical) / count,
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


def bound_sum(total: float, *, variance: float, step: float) -> Interval:
    """Compute the gamma interval of a sum over images (Fay & Feuer 1997, equations 3 and 4).

    Args:
        total: The sum, at least 0.
        variance: Variance of the sum.
        step: Contribution of one more image.
    """
    low = 0.0
    if total > 0 and variance > 0:
        low = float(gammaincinv(total**2 / variance, TAIL)) * variance / total
    mean = total + step
    spread = variance + step**2
    return low, float(gammaincinv(mean**2 / spread, 1 - TAIL)) * spread / mean


def _bound_macro_error(
    scores: Scores, error: float, columns: list[Ints], clusters: Ints
) -> Interval:
    """Compute the interval of 1 minus a macro average.

    A wrong image adds 1/n to the error of a class, where n counts the images with that label (for
    recall), that prediction (for precision), or both together (for F1). Divided by the number of
    classes, this is its contribution to the macro error.

    Args:
        scores: Scores of the images.
        error: 1 minus the macro average.
        columns: Classes by which the images are counted, [n] each.
        clusters: Number of each image's group, [n].
    """
    num_classes = scores.num_classes
    occurs = np.bincount(scores.labels, minlength=num_classes) > 0
    counts = np.bincount(np.concatenate(columns), minlength=num_classes)
    # contribution of each image to the macro error if it is wrong, [n]; 0 for a class without
    # images, which is not in the average
    shares = occurs / np.maximum(counts, 1)
    weights = np.sum([shares[column] for column in columns], axis=0) / occurs.sum()

    wrong = ~scores.correct
    deviations = weights * (wrong - wrong.mean())
    variance = float((deviations**2).sum())
    variance *= compute_design_effect(deviations, clusters, scores.correct, weights)
    # a class without predictions counts as 0, but its true precision may be up to 1
    for column in columns:
        num_unknown = np.sum(occurs & (np.bincount(column, minlength=num_classes) == 0))
        variance += float(num_unknown) / occurs.sum() ** 2
    step = _compute_group_size(clusters) * float((weights**2).sum() / (weights.sum() or 1))
    return bound_sum(error, variance=variance, step=step)


def _compute_group_size(clusters: Ints) -> float:
    """Compute the mean size of the group that an image is in, 1 without groups."""
    return float((np.bincount(clusters) ** 2).sum()) / len(clusters)


def _bound_ece(scores: Scores, clusters: Ints) -> Interval:
    """Compute the interval of the calibration error, by inverting a test.

    Noise raises the calibration error, so that even a calibrated model's is never 0. Therefore the
    gaps of the bins are scaled by a common factor, and binomial noise is added. The interval holds
    the calibration errors under which the measured one is not among the most extreme 5 % of draws.

    Args:
        scores: Scores of the images.
        clusters: Number of each image's group, [n].
    """
    count = len(scores)
    bins = find_bins(scores.confidence)
    sizes = np.bincount(bins, minlength=NUM_BINS)
    correct = np.bincount(bins, scores.correct, minlength=NUM_BINS)
    image_gaps = scores.confidence - scores.correct
    gaps = np.bincount(bins, image_gaps, minlength=NUM_BINS) / count
    measured = float(np.abs(gaps).sum())

    # Laplace's estimate has noise even for a bin without an error
    accuracy = (correct + 1) / (sizes + 2)
    deviations = np.sqrt(sizes * accuracy * (1 - accuracy)) / count
    deviations *= np.sqrt(
        compute_design_effect(image_gaps - image_gaps.mean(), clusters, scores.correct)
    )
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
    if quantile(0, 1 - TAIL) < measured:
        low = scale_to(1 - TAIL)
    # if the measured error is below what noise alone gives, noise may hide all of it
    high = quantile(0, 1 - TAIL)
    if quantile(0, TAIL) < measured:
        high = scale_to(TAIL)
    return low, high
