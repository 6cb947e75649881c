"""95 % confidence intervals of proportions and of averages over classes.

They say how far a metric varies with the choice of test images, not with the training seed. Images
that come in groups, such as bursts, count as fewer images than they are.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import betaincinv, gammaincinv, stdtrit

from vit.prediction.probabilities import Bools, Floats, Ints

# lower and upper end of a 95 % interval
Interval = tuple[float, float]
# probability that the true value lies below a 95 % interval, and that it lies above
_TAIL = 0.025
# Weight, in groups, of the assumption that the images of a group are all alike. Without it 95 %
# intervals of 6 to 30 groups cover 86 to 97 %, with it 95 to 100 %.
_PRIOR_GROUPS = 0.5
# parts of the images that are left out in turn for the variance of an average
_NUM_PARTS = 50


def number_clusters(groups: Sequence[str] | None, count: int) -> Ints:
    """Number the groups of `count` images. None: each image is its own group."""
    if groups is None:
        return np.arange(count)
    return np.unique(np.array(groups, dtype=str), return_inverse=True)[1]


def compute_proportion_interval(successes: float, count: float) -> Interval:
    """Compute the exact interval of a proportion (Clopper & Pearson 1934); 0…1 without a sample.
    Successes that are divided by a design effect aren't whole."""
    failures = count - successes
    low = float(betaincinv(successes, failures + 1, _TAIL)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - _TAIL)) if failures > 0 else 1.0
    return low, high


def compute_clustered_interval(correct: Bools, clusters: Ints) -> Interval:
    """Compute the interval of the fraction of correct images, [n], that come in groups with these
    numbers, [n].

    It is Clopper and Pearson's interval for the number of independent images that would give the
    fraction the same variance (Korn & Graybill 1998, "Confidence intervals for proportions with
    small expected number of positive counts estimated from survey data").
    """
    count = len(correct)
    # nothing follows from no image, nor from a single group of several
    if count == 0 or (count > 1 and (clusters == clusters[0]).all()):
        return 0.0, 1.0
    effect = compute_design_effect(correct, clusters)
    return compute_proportion_interval(int(correct.sum()) / effect, count / effect)


def compute_design_effect(outcomes: Bools, clusters: Ints) -> float:
    """Compute the factor by which groups widen the variance of a proportion; 1 without groups. See
    `compute_clustered_interval`.

    Kish's design effect is 1 + ρ (Σm²/n − 1) for groups of m images with a correlation ρ. From few
    groups it is often far too small, so it is drawn towards its value at ρ = 1, as if half a group
    had shown that one, and widened by Student's t with their degrees of freedom (Korn & Graybill).
    """
    count = len(outcomes)
    deviations = outcomes - outcomes.mean()
    _, clusters, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    num_clusters = len(sizes)
    if num_clusters == count:
        return 1.0
    # the largest effect, if all images of a group are alike
    largest = float((sizes**2).sum() / count)
    effect = largest
    independent = float((deviations**2).sum())
    if independent > 0 and num_clusters > 1:
        sums = np.bincount(clusters, deviations)
        factor = num_clusters / (num_clusters - 1)
        measured = max(factor * float((sums**2).sum()) / independent, 1.0)
        # a group is informative if it has the rarer outcome
        num_informative = min(
            np.count_nonzero(np.bincount(clusters, chosen)) for chosen in (outcomes, ~outcomes)
        )
        share = num_informative / (num_informative + _PRIOR_GROUPS)
        effect = max(measured, share * measured + (1 - share) * largest)
    return effect * _widen_by_t(num_clusters) / _widen_by_t(count)


def leave_out_parts(clusters: Ints) -> Bools:
    """Return masks of the images that are kept where each of 50 parts is left out, [k, n]. A part
    has whole groups, chosen at random; a single group has no parts."""
    numbers = np.unique(clusters, return_inverse=True)[1]
    num_clusters = int(numbers.max()) + 1
    num_parts = min(num_clusters, _NUM_PARTS)
    part_of = np.random.default_rng(0).permutation(num_clusters) % num_parts
    is_kept = np.arange(num_parts)[:, None] != part_of[numbers]
    # nothing is left without a single group
    return np.asarray(is_kept[is_kept.any(axis=1)])


def find_step(clusters: Ints, support: Ints | None = None) -> float:
    """Return how much one more error counts in a mean over classes: that of a group that is wrong.
    Of labels with these numbers of images, [C], one more image of a rare one weighs more."""
    count = len(clusters)
    if support is None:
        return float((np.bincount(clusters) ** 2).sum()) / count**2
    counts = np.minimum(support, count - support)
    counts = counts[counts > 0]
    if not len(counts):
        return 1.0
    return max(float((1 / counts).mean() / len(counts)), 1 / count)


def bound_rate(values: Sequence[float], step: float, *, lowest: float = 0.0) -> Interval:
    """Compute the interval of a metric from `lowest` to 1 by the jackknife, from its value and those
    without each part of the images, NaN where it isn't defined, and its change by one more error.

    One minus the metric is a sum of errors to which few images contribute most, so it has a gamma
    interval (Fay & Feuer 1997), which is exact for Poisson counts and holds without a single error.
    """
    value, left_out = float(values[0]), np.array(values[1:])
    if np.isnan(value):
        return lowest, 1.0
    # without any success, the jackknife knows nothing about the errors
    if value == lowest:
        return lowest, min(lowest + _bound_total(0.0, left_out - lowest, step)[1], 1.0)
    low, high = _bound_total(1 - value, 1 - left_out, step)
    return max(1 - high, lowest), 1 - low


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
    variance *= _widen_by_t(count)
    low = 0.0
    if total > 0 and variance > 0:
        low = float(gammaincinv(total**2 / variance, _TAIL)) * variance / total
    mean, spread = total + step, variance + step**2
    high = float(gammaincinv(mean**2 / spread, 1 - _TAIL)) * spread / mean
    return min(low, total), max(high, total)


def _widen_by_t(count: int) -> float:
    """Return the factor of a variance that is estimated from `count` values: Student's t beside
    that of a million values, squared."""
    ratio = stdtrit(max(count - 1, 1), 1 - _TAIL) / stdtrit(1e6, 1 - _TAIL)
    return float(ratio) ** 2
