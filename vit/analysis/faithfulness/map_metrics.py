"""Statistics of a faithfulness metric over images.

Every metric is a number per image, so that maps are compared on the same images (paired bootstrap;
Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13: the percentile interval).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vit.analysis.faithfulness.gains import PerImage

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean over images with its 95 % interval."""

    mean: float
    low: float
    high: float


def estimate(values: Mapping[str, PerImage]) -> dict[str, Estimate]:
    """Compute the mean of each map's values with a percentile bootstrap interval. All maps use the
    same resamples of the images."""
    table = np.stack([column.astype(np.float64) for column in values.values()], axis=1)
    generator = np.random.default_rng(0)
    count = len(table)
    # how often each image was drawn in each resample
    counts = [
        np.bincount(generator.integers(count, size=count), minlength=count)
        for _ in range(RESAMPLES)
    ]
    means = np.stack(counts) / count @ table
    low, high = np.quantile(means, [(1 - 0.95) / 2, (1 + 0.95) / 2], axis=0)
    rows = zip(table.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: Estimate(*row) for name, row in zip(values, rows, strict=True)}


def find_best(values: Mapping[str, PerImage]) -> list[str]:
    """Find the methods that are statistically tied for best, highest mean first.

    The 95 % interval of their paired difference to the highest mean includes 0. It is not corrected
    for the number of methods.
    """
    # the paired difference to the highest: intervals of means overlap too easily
    ordered = sorted(values, key=lambda name: -values[name].mean())
    estimates = estimate({name: values[name] - values[ordered[0]] for name in ordered})
    return [name for name in ordered if estimates[name].high >= 0]


def to_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table whose columns line up."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for row in (headings, ["-" * width for width in widths], *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
