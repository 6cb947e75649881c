"""95 % confidence intervals of averages over classes, by the jackknife.

The variance is that of the metric without each of 50 parts of the images, which have whole groups.
One minus the metric is a sum of errors to which few images contribute most, so it has a gamma
interval (Fay & Feuer 1997), which is exact for Poisson counts and holds without a single error.

The intervals say how far a metric varies with the choice of test images, not with the training
seed.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, stdtrit

from vit.evaluation.clusters import TAIL, Interval
from vit.prediction.probabilities import Floats, Ints

# Parts of the images, of whole groups, that are left out in turn for the variance of a metric.
_NUM_PARTS = 50


def leave_out_parts(clusters: Ints) -> NDArray[np.float64]:
    """Return weights that leave out parts of the images in turn, [k, n]. A part has whole groups,
    chosen at random; a single group has no parts."""
    numbers = np.unique(clusters, return_inverse=True)[1].reshape(-1)
    num_clusters = int(numbers.max()) + 1
    if num_clusters == 1:
        return np.zeros((0, len(clusters)))
    num_parts = min(num_clusters, _NUM_PARTS)
    part_of = np.random.default_rng(0).permutation(num_clusters) % num_parts
    is_kept = np.arange(num_parts)[:, None] != part_of[numbers][None]
    return np.asarray(is_kept.astype(np.float64))


def compute_group_size(clusters: Ints) -> float:
    """Compute the mean size of the group that an image is in, 1 without groups."""
    return float((np.bincount(clusters) ** 2).sum()) / len(clusters)


def find_largest_error(support: Ints, count: int) -> float:
    """Return how much one more error counts in a mean over the classes at most.

    Args:
        support: Number of images of each class or label, [C].
        count: Number of images.
    """
    counts = np.minimum(support, count - support)
    counts = counts[counts > 0]
    if not len(counts):
        return 1.0
    return float((1 / counts).mean() / len(counts))


def bound_rate(value: float, left_out: Floats, step: float) -> Interval:
    """Compute the interval of a metric from 0 to 1, whose errors add up.

    Args:
        value: The metric; NaN: nothing is known.
        left_out: The metric without each part of the images; NaN where it isn't defined.
        step: Change of the metric by one more error.
    """
    if np.isnan(value):
        return 0.0, 1.0
    # without any success, the jackknife knows nothing about the errors
    if value == 0:
        return 0.0, min(_bound_total(0.0, left_out, step)[1], 1.0)
    low, high = _bound_total(1 - value, 1 - left_out, step)
    return max(1 - high, 0.0), 1 - low


def _bound_total(value: float, left_out: Floats, step: float) -> Interval:
    """Compute the interval of a sum of errors. See `bound_rate`."""
    known = left_out[~np.isnan(left_out)]
    # a single image or group doesn't tell its variance: it counts as two that differ by the value
    count = max(len(known), 2)
    variance = value**2
    if len(known) > 1:
        variance = (count - 1) / count * float(((known - known.mean()) ** 2).sum())
    # the variance of few parts is itself uncertain
    factor = float(stdtrit(count - 1, 1 - TAIL) / stdtrit(1e6, 1 - TAIL))
    low, high = bound_sum(value, variance=variance * factor**2, step=step)
    return min(low, value), max(high, value)


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
