"""The bootstrap over images: how far a number varies with the choice of test images.

Efron & Tibshirani (1993), "An Introduction to the Bootstrap", chapter 13: the percentile interval.
A resample is a weight for each image, how often it was drawn, so that a weighted mean is its
replicate of a mean.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def draw_weights(count: int, generator: np.random.Generator) -> Floats:
    """Resample `count` images with replacement.

    Args:
        count: number of images, which is also the number of draws.
        generator: gives the random numbers.

    Returns:
        How often each image was drawn, [count]; they sum to `count`.
    """
    drawn = generator.integers(count, size=count)
    return np.bincount(drawn, minlength=count).astype(np.float64)


def compute_percentiles(replicates: Floats) -> tuple[Floats, Floats]:
    """The ends of the interval that holds the middle 95 % of the replicates.

    Args:
        replicates: [resamples] of one number or [resamples, k] of k numbers.

    Returns:
        The lower and the upper end, each a scalar array or [k].
    """
    low, high = np.quantile(replicates, [(1 - 0.95) / 2, (1 + 0.95) / 2], axis=0)
    return low, high
