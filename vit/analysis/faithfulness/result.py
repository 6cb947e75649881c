"""The result of `vit.measure_faithfulness`: a table, and the numbers of every image."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vit.analysis.faithfulness.gains import BASELINES, PerImage
from vit.explanation.patch_removal import Fill
from vit.runtime.files import FileContent, Result

# Symmetric relevance gains, and how patches are removed: their tokens dropped, or filled with the
# image's mean colour.
GAINS: dict[str, Fill] = {"srg": "auto", "srg_mean": "mean"}
HEADINGS = ("map", "tokens dropped", "filled with the mean")
Estimate = dict[str, float]


@dataclass(frozen=True)
class FaithfulnessResult(Result):
    """Symmetric relevance gains of methods and baselines, and their conditions.

    Attributes:
        values: Gain of every image, by metric ("srg" with tokens dropped, "srg_mean" with the mean
            fill) and map.
        conditions: Model, data, split, number of images, device and versions.
        notes: Sentences about how the gains were measured.
        ids: The images.
    """

    values: Mapping[str, Mapping[str, PerImage]]
    conditions: Mapping[str, Any]
    notes: list[str]
    ids: list[str]

    @property
    def sources(self) -> tuple[str]:
        return (self.conditions["model"],)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Means with 95 % intervals by metric and map, and the methods that are statistically tied
        for best in each gain."""
        return {
            "metrics": {
                metric: {
                    "methods": estimate(gains),
                    "best": find_best(gains),
                }
                for metric, gains in self.values.items()
            },
            "notes": self.notes,
        }

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the table by falling gain with tokens dropped: the map, and both gains with their
        intervals, "*" where a method is tied for best."""
        rows = []
        for name in _sort(self.values["srg"]):
            row = [name]
            for metric in self.summary["metrics"].values():
                gain = "{mean:.3f} ({low:.3f}–{high:.3f}) ".format(**metric["methods"][name])
                row.append(gain + ("*" if name in metric["best"] else " "))
            rows.append(row)
        return rows

    def build_files(self) -> dict[str, FileContent]:
        content = {
            "schema_version": 7,
            **self.conditions,
            "image_ids": self.ids,
            **self.summary,
            "values": {
                metric: {name: values.tolist() for name, values in gains.items()}
                for metric, gains in self.values.items()
            },
        }
        return {"faithfulness.json": json.dumps(content, indent=1) + "\n"}


def estimate(values: Mapping[str, PerImage]) -> dict[str, Estimate]:
    """Compute the mean of each map's values with a 95 % percentile bootstrap interval (Efron &
    Tibshirani 1993, chapter 13). All maps use the same resamples of the images."""
    from scipy.stats import bootstrap  # a second to import

    table = np.stack([column.astype(np.float64) for column in values.values()])
    found = bootstrap(
        (table,),
        np.mean,
        axis=1,
        n_resamples=2000,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    rows = np.stack([table.mean(axis=1), found.low, found.high], axis=1).tolist()
    return {
        name: {"mean": mean, "low": low, "high": high}
        for name, (mean, low, high) in zip(values, rows, strict=True)
    }


def find_best(values: Mapping[str, PerImage]) -> Sequence[str]:
    """Find the methods that are statistically tied for best, highest mean first: the 95 % interval
    of their paired difference to the highest mean includes 0, not corrected for their number."""
    # the paired difference to the highest: intervals of means overlap too easily
    ordered = [name for name in _sort(values) if name not in BASELINES]
    estimates = estimate({name: values[name] - values[ordered[0]] for name in ordered})
    return [name for name in ordered if estimates[name]["high"] >= 0]


def _sort(values: Mapping[str, PerImage]) -> Sequence[str]:
    return sorted(values, key=lambda name: -values[name].mean())
