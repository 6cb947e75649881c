"""95 % confidence intervals of averages over classes, by the jackknife.

The variance is that of the metric without each of 50 parts of the images, which have whole groups.
One minus the metric is a sum of errors to which few images contribute most, so it has a gamma
interval (Fay & Feuer 1997), which is exact for Poisson counts and holds without a single error.

The intervals say how far a metric varies with the choice of test images, not with the training
seed.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import gammaincinv, stdtrit

from vit.evaluation.clusters import TAIL, Interval
from vit.prediction.probabilities import Bools, Floats, Ints

# Parts of the images, of whole groups, that are left out in turn for the variance of a metric.
_NUM_PARTS = 50


def leave_out_parts(clusters: Ints) -> Bools:
    """Return masks of the images that are kept where parts are left out in turn, [k, n]. A part has
    whole groups, chosen at random; a single group has no parts."""
    numbers = np.unique(clusters, return_inverse=True)[1]
    num_clusters = int(numbers.max()) + 1
    num_parts = min(num_clusters, _NUM_PARTS)
    part_of = np.random.default_rng(0).permutation(num_clusters) % num_parts
    is_kept = np.arange(num_parts)[:, None] != part_of[numbers]
    return np.asarray(is_kept[: num_parts if num_clusters > 1 else 0])


def find_step(clusters: Ints, support: Ints | None = None) -> float:
    """Return how much one more error counts in a mean over classes: that of a group that is wrong;
    of a rare label, one more image weighs more.

    Args:
        clusters: Number of each image's group, [n].
        support: Number of images of each label, [C]; None for classes.
    """
    count = len(clusters)
    if support is None:
        return float((np.bincount(clusters) ** 2).sum()) / count**2
    counts = np.minimum(support, count - support)
    counts = counts[counts > 0]
    if not len(counts):
        return 1.0
    return max(float((1 / counts).mean() / len(counts)), 1 / count)


def bound_rate(values: Sequence[float], step: float) -> Interval:
    """Compute the interval of a metric from 0 to 1, whose errors add up.

    Args:
        values: The metric, then without each part of the images; NaN where it isn't defined.
        step: Change of the metric by one more error.
    """
    value, left_out = float(values[0]), np.array(values[1:])
    if np.isnan(value):
        return 0.0, 1.0
    # without any success, the jackknife knows nothing about the errors
    if value == 0:
        return 0.0, min(_bound_total(0.0, left_out, step)[1], 1.0)
    low, high = _bound_total(1 - value, 1 - left_out, step)
    return max(1 - high, 0.0), 1 - low


def _bound_total(total: float, left_out: Floats, step: float) -> Interval:
    """Compute the gamma interval of a sum of errors (Fay & Feuer 1997, equations 3 and 4). See
    `bound_rate`."""
    known = left_out[~np.isnan(left_out)]
    # a single image or group doesn't tell its variance: it counts as two that differ by the total
    count = max(len(known), 2)
    variance = total**2
    if len(known) > 1:
        variance = (count - 1) / count * float(((known - known.mean()) ** 2).sum())
    # the variance of few parts is itself uncertain
    variance *= float(stdtrit(count - 1, 1 - TAIL) / stdtrit(1e6, 1 - TAIL)) ** 2
    low = 0.0
    if total > 0 and variance > 0:
        low = float(gammaincinv(total**2 / variance, TAIL)) * variance / total
    mean, spread = total + step, variance + step**2
    high = float(gammaincinv(mean**2 / spread, 1 - TAIL)) * spread / mean
    return min(low, total), max(high, total)
