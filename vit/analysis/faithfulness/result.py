"""The result of `vit.measure_faithfulness`: a table, and the numbers of every image."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from vit.analysis.faithfulness.gains import PerImage
from vit.analysis.faithfulness.map_metrics import estimate, find_best, to_markdown
from vit.explanation.checks.token_ablation import Fill
from vit.explanation.methods.registry import METHODS
from vit.runtime.files import FileContent, Result

# Symmetric relevance gains, and how patches are removed: their tokens dropped, or filled with the
# image's mean colour.
GAINS: dict[str, Fill] = {"srg": "auto", "srg_mean": "mean"}


@dataclass(frozen=True)
class FaithfulnessResult(Result):
    """Symmetric relevance gains of methods and baselines, and their conditions.

    Attributes:
        values: Gain of every image, by metric ("srg" with tokens dropped, "srg_mean" with the mean
            fill) and map.
        milliseconds: Time for the map of one image by method, the forward pass included.
        conditions: Model, data, split, number of images, seed, device and versions.
        notes: Sentences about how the gains were measured.
        ids: The images.
    """

    values: Mapping[str, Mapping[str, PerImage]]
    milliseconds: Mapping[str, float]
    conditions: Mapping[str, Any]
    notes: list[str]
    ids: list[str]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Means with 95 % intervals by metric and map, and the methods that are statistically tied
        for best in each gain."""
        return {
            "metrics": {
                metric: {
                    "maps": {name: asdict(mean) for name, mean in estimate(gains).items()},
                    "best": find_best({name: gains[name] for name in self.milliseconds}),
                }
                for metric, gains in self.values.items()
            },
            "milliseconds": dict(self.milliseconds),
            "notes": self.notes,
        }

    @property
    def names(self) -> list[str]:
        """Methods and baselines by falling gain with tokens dropped."""
        return sorted(self.values["srg"], key=lambda name: -self.values["srg"][name].mean())

    @property
    def table(self) -> str:
        """Methods and baselines in Markdown. Gains that are tied for best are bold."""
        rows = []
        for name in self.names:
            is_method = name in self.milliseconds
            kind = "baseline"
            if is_method:
                kind = "yes" if METHODS[name].class_specific else "no"
            cells = [
                f"**{cell}**" if is_best else cell for cell, is_best in self.format_gains(name)
            ]
            time = f"{self.milliseconds[name]:.1f}" if is_method else ""
            rows.append([name, kind, *cells, time])
        return to_markdown(["map", "of a class", "SRG", "SRG, mean fill", "ms"], rows)

    def format_gains(self, name: str) -> list[tuple[str, bool]]:
        """Return each gain of a map with its interval, and whether it is tied for best."""
        return [
            (format_estimate(metric["maps"][name]), name in metric["best"])
            for metric in self.summary["metrics"].values()
        ]

    def build_files(self) -> dict[str, FileContent]:
        content = {
            "schema_version": 5,
            **self.conditions,
            "image_ids": self.ids,
            **self.summary,
            "values": {
                metric: {name: values.tolist() for name, values in gains.items()}
                for metric, gains in self.values.items()
            },
        }
        return {
            "faithfulness.json": json.dumps(content, indent=1) + "\n",
            "faithfulness.md": self.table + "\n",
        }


def format_estimate(mean: Mapping[str, Any]) -> str:
    """Format a mean with its interval."""
    return f"{mean['mean']:.3f} ({mean['low']:.3f}–{mean['high']:.3f})"
