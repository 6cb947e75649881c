"""P-values of differences."""

from collections.abc import Sequence

import numpy as np
from scipy.special import betainc

# A difference is significant if chance alone makes one as large in fewer tests than this.
SIGNIFICANCE = 0.05


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979): if no tested difference is real, one of them
    is below 0.05 in at most 5 % of all comparisons."""
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.array(p_values)[order] * factors)
    return [min(float(value), 1.0) for value in corrected]


def compute_mcnemar(only_a: float, only_b: float) -> float:
    """Compute McNemar's exact test (1947) that both models err equally often.

    Args:
        only_a: Number of images that only A predicts correctly.
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
