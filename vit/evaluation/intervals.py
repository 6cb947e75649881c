"""Confidence intervals of metrics by the bootstrap (Efron & Tibshirani 1993, chapter 13)."""

from collections.abc import Sequence

import numpy as np

from vit.evaluation.metrics import Floats, Scores, compute_metrics

RESAMPLES = 1000
_BIASED = ("macro_f1", "macro_precision", "macro_recall", "ece")  # no means over images: resampling shifts them


def draw_weights(count: int, generator: np.random.Generator) -> Floats:
    """How often each of `count` images comes up in `count` draws with replacement."""
    return np.bincount(generator.integers(count, size=count), minlength=count).astype(np.float64)


def take_percentiles(replicates: Sequence[float] | Floats) -> tuple[float, float]:
    """The interval that holds the middle 95 % of bootstrap replicates."""
    low, high = np.quantile(replicates, ((1 - 0.95) / 2, (1 + 0.95) / 2))
    return float(low), float(high)


def compute_intervals(scores: Scores, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of every metric, over draws of the images with replacement; each holds its metric.

    They say how far a metric varies with the choice of test images, not with the training seed. Repeated images raise
    the calibration error, so much that its replicates may all lie above it, and lower macro averages of rare classes:
    these replicates are moved by their bias, the mean of the replicates minus the metric (chapter 10).
    """
    generator, metrics = np.random.default_rng(seed), compute_metrics(scores)
    replicates = [compute_metrics(scores, draw_weights(len(scores), generator)) for _ in range(resamples)]
    intervals = {}
    for name, value in metrics.items():
        of_metric = np.array([each[name] for each in replicates])
        if name in _BIASED:
            of_metric = np.clip(of_metric + (value - of_metric.mean()), 0, 1)
        low, high = take_percentiles(of_metric)
        intervals[name] = (min(low, value), max(high, value))  # of few images the draws may be all alike
    return intervals
