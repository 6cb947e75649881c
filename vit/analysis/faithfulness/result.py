"""The result of the benchmark and its files: a table, a plot and the numbers of every image."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from vit.analysis.faithfulness.benchmark import (
    BASELINES,
    LEAVE_ONE_OUT,
    PAINTED,
    Measurement,
)
from vit.analysis.faithfulness.map_metrics import (
    estimate,
    find_best,
    find_lower,
    to_markdown,
)
from vit.explanation.methods.registry import METHODS
from vit.runtime.files import FileContent, Result, save_arrays

SCHEMA_VERSION = 4
# symmetric relevance gains: with tokens dropped, and with patches painted over
GAINS = ("srg", *PAINTED.values())
# column of each metric; an arrow says which values are better
COLUMNS = {
    "srg": "SRG ↑",
    "srg_mean": "SRG, mean fill ↑",
    "srg_blur": "SRG, blur ↑",
    "deletion": "deletion ↓",
    "insertion": "insertion ↑",
    "leave_one_out_correlation": "ρ leave-one-out ↑",
    "randomised_correlation": "ρ randomised ↓",
}


@dataclass(frozen=True)
class FaithfulnessResult(Result):
    """The numbers of the benchmark and their conditions.

    Attributes:
        measurement: The numbers of every image.
        conditions: Model, data, split, number of images, seed, device and versions.
        ids: The images.
    """

    measurement: Measurement
    conditions: Mapping[str, Any]
    ids: list[str]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Means with 95 % intervals by metric and map, the methods that are statistically tied for
        best in each gain."""
        metrics: dict[str, dict[str, Any]] = {}
        for metric in COLUMNS:
            values = self.measurement.values[metric]
            metrics[metric] = {
                "images": len(values[LEAVE_ONE_OUT]),
                "methods": {name: asdict(mean) for name, mean in estimate(values).items()},
            }
            if metric in GAINS:
                candidates = {name: gain for name, gain in values.items() if name not in BASELINES}
                metrics[metric]["best"] = find_best(candidates)
                metrics[metric]["below_centre"] = find_lower(candidates, values["centre"])
        return {
            "metrics": metrics,
            "milliseconds_per_image": self.measurement.milliseconds,
            "notes": self.measurement.notes,
        }

    @property
    def names(self) -> list[str]:
        """Methods and baselines by falling symmetric relevance gain with tokens dropped."""
        gains = self.summary["metrics"]["srg"]["methods"]
        return sorted(gains, key=lambda name: -gains[name]["mean"])

    @property
    def table(self) -> str:
        """Methods and baselines in Markdown. Bold: gains that are tied for best, and those of the
        centre that beat a method."""
        rows = [self._format_row(name) for name in self.names]
        return to_markdown(["map", "of a class", *COLUMNS.values(), "ms"], rows)

    def _format_row(self, name: str) -> list[str]:
        kind = "baseline"
        if name not in BASELINES:
            kind = ("no", "yes")[METHODS[name].class_specific]
        row = [name, kind]

        for metric in self.summary["metrics"].values():
            cell = ""
            if name in metric["methods"]:
                cell = format_estimate(metric["methods"][name])
            beats = name == "centre" and metric.get("below_centre")
            if name in metric.get("best", ()) or beats:
                cell = f"**{cell}**"
            row.append(cell)

        # leave-one-out is the only baseline that takes time
        row.append(format_time(self.measurement.milliseconds, name))
        return row

    def build_files(self) -> dict[str, FileContent]:
        content = {
            "schema_version": SCHEMA_VERSION,
            **self.conditions,
            **self.summary,
            "image_ids": self.ids,
        }
        arrays = {
            f"{metric}.{name}": values
            for metric, values_by_map in self.measurement.values.items()
            for name, values in values_by_map.items()
        }
        return {
            "faithfulness.json": json.dumps(content, indent=1) + "\n",
            "faithfulness.md": self.table + "\n",
            "faithfulness.npz": partial(save_arrays, arrays=arrays),
            "faithfulness.png": partial(draw_plot, metrics=self.summary["metrics"]),
        }


def format_time(milliseconds: Mapping[str, float], name: str) -> str:
    """Format the time of a map; empty for one that takes none."""
    if name not in milliseconds:
        return ""
    return f"{milliseconds[name]:.1f}"


def format_estimate(mean: Mapping[str, Any]) -> str:
    """Format a mean with its interval."""
    return f"{mean['mean']:.3f} ({mean['low']:.3f}–{mean['high']:.3f})"


def draw_plot(path: Path, metrics: Mapping[str, Any]) -> None:
    """Draw the symmetric relevance gains of each map with their intervals. A dotted line marks the
    gain of random maps."""
    # half a second, which other commands don't need
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gains = metrics["srg"]["methods"]
    names = sorted(gains, key=lambda name: gains[name]["mean"])
    figure = Figure(figsize=(12, 1.5 + 0.32 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(GAINS))
    for panel, metric in zip(panels, GAINS, strict=True):
        means = metrics[metric]["methods"]
        for row, name in enumerate(names):
            mean = means[name]
            colour = "#777777" if name in BASELINES else "#0b62c4"
            panel.plot([mean["low"], mean["high"]], [row, row], color=colour, linewidth=2)
            panel.plot(mean["mean"], row, "o", color=colour, markersize=5)
        panel.axvline(means["random"]["mean"], color="#bbbbbb", linestyle=":")
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.set_title(f"{COLUMNS[metric]}  (95 % interval)", fontsize=10)
    FigureCanvasAgg(figure)
    # without the version of matplotlib equal numbers give equal bytes
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
