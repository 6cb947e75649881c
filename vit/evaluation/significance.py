"""Tests of a difference between two models, and its 95 % interval."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import bdtr, bdtri, betainc, ndtri, stdtr, stdtrit

from vit.evaluation.clusters import Interval, compute_design_effect
from vit.prediction.probabilities import Floats, Ints

# A difference is significant if chance alone makes one as large in fewer tests than this.
SIGNIFICANCE = 0.05
# Probability with which a test finds the smallest difference that it is said to find.
POWER = 0.8
# The two-sided p-value, the 95 % interval of the accuracy of B minus that of A, and the smallest
# difference that is found in 80 % of such comparisons.
Outcome = tuple[float, Interval, float]
_TAIL = SIGNIFICANCE / 2
_NORMAL = float(ndtri(1 - _TAIL))


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979): if no tested difference is real, one of them
    is below 0.05 in at most 5 % of all comparisons."""
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.array(p_values)[order] * factors)
    return [min(float(value), 1.0) for value in corrected]


def count_changes(changes: Floats, clusters: Ints) -> tuple[float, float, float]:
    """Count the images that only one of two models predicts correctly, and all images.

    Images that come in groups count as fewer: the counts are divided by the design effect (Rao &
    Scott 1992, "A simple method for the analysis of clustered binary data").

    Args:
        changes: 1 where only B is correct, -1 where only A is, else 0, [n].
        clusters: Number of each image's group, [n].

    Returns:
        Images that only A predicts correctly, those that only B does, and all images.
    """
    effect = compute_design_effect(changes - changes.mean(), clusters, changes != 0)
    counts = (np.sum(changes < 0), np.sum(changes > 0), len(changes))
    only_a, only_b, count = (float(number) / effect for number in counts)
    return only_a, only_b, count


def compute_mcnemar(only_a: float, only_b: float) -> float:
    """Compute McNemar's exact test (1947) that both models err equally often.

    Args:
        only_a: Number of images that only A predicts correctly. See `count_changes`.
        only_b: Number of images that only B predicts correctly.

    Returns:
        The two-sided p-value.
    """
    smaller = min(only_a, only_b)
    larger = max(only_a, only_b)
    if larger == 0:
        return 1.0
    # Under the hypothesis, either model is correct on each of these images with probability 0.5.
    # The incomplete beta function is the binomial distribution, also between whole numbers.
    return min(2 * float(betainc(larger, smaller + 1, 0.5)), 1.0)


def find_detectable(num_changed: float, count: float, significance: float) -> float:
    """Find the smallest difference between two accuracies that McNemar's test finds.

    It would be significant in 80 % of the test sets of this size, if the models disagree on as many
    images as here, or on as few as the test can decide by.

    Args:
        num_changed: Number of images that only one model predicts correctly.
        count: Number of images.
        significance: Largest p-value that is significant.
    """
    # with fewer images, not even a difference on all of them is significant
    fewest = math.floor(math.log2(2 / significance)) + 1
    changed = max(math.floor(num_changed), fewest)
    is_significant = 2 * bdtr(np.arange(changed // 2 + 1), changed, 0.5) < significance
    critical = int(np.sum(is_significant)) - 1
    share = float(bdtri(critical, changed, POWER))
    return min((1 - 2 * share) * changed / count, 1.0)


def compute_paired_interval(only_a: float, only_b: float, count: float) -> Interval:
    """Compute the 95 % interval of the accuracy of B minus that of A (Bonett & Price 2012, equation
    3).

    It agrees with McNemar's exact test: if that finds no difference, the interval includes 0.

    Args:
        only_a: See `compute_mcnemar`.
        only_b: See `compute_mcnemar`.
        count: Number of images.
    """
    share_a = (only_a + 1) / (count + 2)
    share_b = (only_b + 1) / (count + 2)
    difference = share_b - share_a
    half = _NORMAL * np.sqrt((share_a + share_b - difference**2) / (count + 2))
    low = max(float(difference - half), -1.0)
    high = min(float(difference + half), 1.0)
    if compute_mcnemar(only_a, only_b) >= SIGNIFICANCE:
        return min(low, 0.0), max(high, 0.0)
    return low, high


def compare_models(
    changes: Floats, clusters: Ints, *, significance: float = SIGNIFICANCE
) -> Outcome:
    """Compare two models by McNemar's exact test.

    Args:
        changes: See `count_changes`.
        clusters: See `count_changes`.
        significance: See `compare_seeds`.
    """
    only_a, only_b, count = count_changes(changes, clusters)
    return (
        compute_mcnemar(only_a, only_b),
        compute_paired_interval(only_a, only_b, count),
        find_detectable(only_a + only_b, count, significance),
    )


def compare_seeds(
    correct_a: Floats,
    correct_b: Floats,
    clusters: Ints | None = None,
    *,
    significance: float = SIGNIFICANCE,
) -> tuple[float, Interval, float]:
    """Compute Welch's t-test (1947) that two recipes are equally accurate, over seeds and images.

    The variance of the difference is the sum of the variance between seeds of each recipe and the
    variance between images of the mean over seeds. The interaction of seed and image is already in
    the first part. A recipe with one seed is assumed to vary like the other recipe.

    Args:
        correct_a: True where a seed of A is correct on an image, [seeds, n]. A or B has at least
            two seeds.
        correct_b: The same for B, on the same images.
        clusters: Number of each image's group, [n]. None: each image is its own group.
        significance: Largest p-value that counts as significant for the smallest difference.
    """
    count = correct_a.shape[1]
    if clusters is None:
        clusters = np.arange(count)
    changes = correct_b.mean(axis=0) - correct_a.mean(axis=0)
    # (variance of the recipe's mean, its degrees of freedom)
    terms: list[tuple[float, int]] = []
    has_single_seed = 1 in (len(correct_a), len(correct_b))
    seed_and_image = 0.0
    for correct in (correct_a, correct_b):
        if len(correct) == 1:
            continue
        # factor of a seed's variance in the difference
        share = 1 / len(correct)
        if has_single_seed:
            share += 1
        noise = float(correct.var(axis=0, ddof=1).mean()) / count
        # few seeds may by luck agree more than their errors on single images allow
        variance = max(float(correct.mean(axis=1).var(ddof=1)), noise)
        terms.append((share * variance, len(correct) - 1))
        seed_and_image += share * noise

    # the variance between images is unknown with a single image
    if count > 1:
        image_variance = float(changes.var(ddof=1)) / count
        effect = compute_design_effect(changes - changes.mean(), clusters, changes != 0)
        image_variance = effect * image_variance - seed_and_image
        terms.append((max(image_variance, 0.0), count - 1))
    if not any(variance for variance, _ in terms):
        # the seeds agree on each image, so this is the comparison of two single models
        return compare_models(changes, clusters, significance=significance)
    return compare_by_t(float(changes.mean()), terms, significance)


def compare_by_t(
    difference: float, terms: Sequence[tuple[float, int]], significance: float
) -> Outcome:
    """Test a difference by Student's t, with the degrees of freedom of Satterthwaite.

    Args:
        difference: The difference.
        terms: Parts of its variance, each with its degrees of freedom.
        significance: See `compare_seeds`.
    """
    total = sum(variance for variance, _ in terms)
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in terms)
    error = math.sqrt(total)
    half = float(stdtrit(freedom, 1 - _TAIL)) * error
    p_value = 2 * float(stdtr(freedom, -abs(difference) / error))
    # with a few seeds that differ much, the t distribution exceeds the range of a difference
    interval = (max(difference - half, -1.0), min(difference + half, 1.0))
    # the quantiles of the test and of its power, as if the standard error were known
    reach = float(stdtrit(freedom, 1 - significance / 2) + stdtrit(freedom, POWER))
    return p_value, interval, min(reach * error, 1.0)
