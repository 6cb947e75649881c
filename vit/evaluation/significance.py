"""Whether two models differ by more than chance: tests, and 95 % intervals of the difference."""

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
        only_a: images that only A predicts correctly.
        only_b: images that only B does.

    Returns:
        The two-sided p-value.
    """
    # binomial: each of these images is as likely A's as B's
    return min(2 * float(bdtr(min(only_a, only_b), only_a + only_b, 0.5)), 1.0)


def compute_paired_interval(only_a: int, only_b: int, count: int) -> tuple[float, float]:
    """95 % interval of the accuracy of B minus that of A (Bonett & Price 2012, equation 3).

    It agrees with McNemar's exact test: where that finds no difference, 0 is in the interval.

    Args:
        only_a, only_b: as of `compute_mcnemar`.
        count: images.
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
    """Welch's t-test (1947) that two recipes are equally accurate, over training seeds and images.

    The variance of the difference is that of each recipe's seeds, and that of the images on which
    the means over seeds differ. What differs by both, seed and image, is in the first already. A
    recipe of one seed is taken to vary as the other one.

    Args:
        correct_a: whether each seed of A is correct on each image, [seeds, n]; of A or B two or
            more.
        correct_b: of B on the same images.

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
        # how much of a seed's variance is in the difference
        share = 1 / len(correct)
        if has_single_seed:
            share += 1
        noise = float(correct.var(axis=0, ddof=1).mean()) / count
        # few seeds may agree by luck more than their errors on single images allow
        variance = max(float(correct.mean(axis=1).var(ddof=1)), noise)
        terms.append((share * variance, len(correct) - 1))
        seed_and_image += share * noise

    # a single image doesn't tell how images vary
    if count > 1:
        image_variance = float(changes.var(ddof=1)) / count - seed_and_image
        terms.append((max(image_variance, 0.0), count - 1))
    total = sum(variance for variance, _ in terms)
    difference = float(changes.mean())
    if total == 0:
        # the seeds agree on each image, and all images changed alike: as of single models
        only_a = int((changes < 0).sum())
        only_b = int((changes > 0).sum())
        p_value = compute_mcnemar(only_a, only_b)
        return p_value, compute_paired_interval(only_a, only_b, count)
    # Satterthwaite's
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in terms)
    error = np.sqrt(total)
    half = float(stdtrit(freedom, 1 - _TAIL)) * error
    p_value = 2 * float(stdtr(freedom, -abs(difference) / error))
    # of few seeds that differ much, the t distribution reaches beyond what accuracies can differ
    return p_value, (max(difference - half, -1.0), min(difference + half, 1.0))
