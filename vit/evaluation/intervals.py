"""Confidence intervals of metrics by the bootstrap (Efron & Tibshirani 1993, chapter 13)."""

from collections.abc import Sequence

import numpy as np

from vit.evaluation.metrics import Floats, Scores, compute_metrics

RESAMPLES = 1000


def draw_weights(count: int, generator: np.random.Generator) -> Floats:
    """How often each of `count` images comes up in `count` draws with replacement."""
    return np.bincount(generator.integers(count, size=count), minlength=count).astype(np.float64)


def take_percentiles(replicates: Sequence[float] | Floats) -> tuple[float, float]:
    """The interval that holds the middle 95 % of bootstrap replicates."""
    low, high = np.quantile(replicates, ((1 - 0.95) / 2, (1 + 0.95) / 2))
    return float(low), float(high)


def compute_intervals(scores: Scores, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of every metric, over draws of the images with replacement.

    They say how far a metric varies with the choice of test images, not with the training seed.
    """
    generator = np.random.default_rng(seed)
    replicates = [compute_metrics(scores, draw_weights(len(scores), generator)) for _ in range(resamples)]
    return {name: take_percentiles([each[name] for each in replicates]) for name in replicates[0]}
