"""Tests of a difference between two models, and its 95 % interval."""

import numpy as np
from scipy.special import bdtr, ndtri, stdtr, stdtrit

from vit.prediction.probabilities import Floats

# A difference is significant if chance alone makes one as large in fewer tests than this.
SIGNIFICANCE = 0.05
_TAIL = SIGNIFICANCE / 2
_NORMAL = float(ndtri(1 - _TAIL))


def compute_mcnemar(only_a: int, only_b: int) -> float:
    """Compute McNemar's exact test (1947) that both models err equally often.

    Args:
        only_a: Number of images that only A predicts correctly.
        only_b: Number of images that only B predicts correctly.

    Returns:
        The two-sided p-value.
    """
    # under the hypothesis, either model is correct on each of these images with probability 0.5
    return min(2 * float(bdtr(min(only_a, only_b), only_a + only_b, 0.5)), 1.0)


def compute_paired_interval(only_a: int, only_b: int, count: int) -> tuple[float, float]:
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


def compare_seeds(correct_a: Floats, correct_b: Floats) -> tuple[float, tuple[float, float]]:
    """Compute Welch's t-test (1947) that two recipes are equally accurate, over seeds and images.

    The variance of the difference is the sum of the variance between seeds of each recipe and the
    variance between images of the mean over seeds. The interaction of seed and image is already in
    the first part. A recipe with one seed is assumed to vary like the other recipe.

    Args:
        correct_a: True where a seed of A is correct on an image, [seeds, n]. A or B has at least
            two seeds.
        correct_b: The same for B, on the same images.

    Returns:
        The two-sided p-value, and the 95 % interval of the accuracy of B minus that of A.
    """
    count = correct_a.shape[1]
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
        image_variance = float(changes.var(ddof=1)) / count - seed_and_image
        terms.append((max(image_variance, 0.0), count - 1))
    total = sum(variance for variance, _ in terms)
    difference = float(changes.mean())
    if total == 0:
        # the seeds agree on each image, so this is the comparison of two single models
        only_a = int((changes < 0).sum())
        only_b = int((changes > 0).sum())
        p_value = compute_mcnemar(only_a, only_b)
        return p_value, compute_paired_interval(only_a, only_b, count)
    # degrees of freedom by Satterthwaite
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in terms)
    error = np.sqrt(total)
    half = float(stdtrit(freedom, 1 - _TAIL)) * error
    p_value = 2 * float(stdtr(freedom, -abs(difference) / error))
    # with a few seeds that differ much, the t distribution exceeds the range of a difference
    return p_value, (max(difference - half, -1.0), min(difference + half, 1.0))
