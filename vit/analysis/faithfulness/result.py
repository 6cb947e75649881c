"""A measurement as files: means with their intervals, a table, the per-image numbers and a plot."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
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
from vit.runtime.files import prepare_output, write_arrays, write_atomically, write_text

SCHEMA_VERSION = 4
# symmetric relevance gain with tokens dropped, and with patches painted over
GAINS = ("srg", *PAINTED.values())


# metrics and their columns; an arrow says which values are better
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
class FaithfulnessResult:
    """The benchmark's numbers and their conditions."""

    measurement: Measurement
    # model, data, split, number of images, seed, device, versions
    conditions: Mapping[str, Any]
    # of the images
    ids: list[str]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Means with 95 % intervals by metric and map, the methods that may be the best by each
        gain, and the one of them that is chosen."""
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
            "best_method": choose_best(metrics),
            "milliseconds_per_image": self.measurement.milliseconds,
            "notes": self.measurement.notes,
        }

    @property
    def names(self) -> list[str]:
        """Methods and baselines, the highest symmetric relevance gain with tokens dropped first."""
        gains = self.summary["metrics"]["srg"]["methods"]
        return sorted(gains, key=lambda name: -gains[name]["mean"])

    @property
    def table(self) -> str:
        """Methods and baselines in Markdown; bold are gains that may be the best, and those of the
        centre where they beat a method."""
        rows = [self._format_row(name) for name in self.names]
        return to_markdown(["map", "of a class", *COLUMNS.values(), "ms"], rows)

    def _format_row(self, name: str) -> list[str]:
        kind = "baseline"
        if name not in BASELINES:
            kind = "yes" if METHODS[name].class_specific else "no"
        row = [name, kind]

        for metric in self.summary["metrics"].values():
            cell = ""
            if name in metric["methods"]:
                cell = format_estimate(metric["methods"][name])
            beats = name == "centre" and metric.get("below_centre")
            if name in metric.get("best", ()) or beats:
                cell = f"**{cell}**"
            row.append(cell)

        # baselines take none to speak of, but leave-one-out
        milliseconds = self.measurement.milliseconds.get(name)
        row.append(f"{milliseconds:.1f}" if milliseconds else "")
        return row

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write faithfulness.json, .md, .npz (the numbers of every image) and .png.

        Args:
            directory: a new or empty directory.
            overwrite: replace an earlier result in it.

        Raises:
            FileExistsError: it holds files, and `overwrite` is not set or they are not a result.
        """
        output = prepare_output(directory, overwrite=overwrite)
        content = {
            "schema_version": SCHEMA_VERSION,
            **self.conditions,
            **self.summary,
            "image_ids": self.ids,
        }
        write_text(output / "faithfulness.json", json.dumps(content, indent=1) + "\n")
        write_text(output / "faithfulness.md", self.table + "\n")
        arrays = {
            f"{metric}.{name}": values
            for metric, values_by_map in self.measurement.values.items()
            for name, values in values_by_map.items()
        }
        write_arrays(output / "faithfulness.npz", arrays)
        write_atomically(
            output / "faithfulness.png", lambda path: draw_plot(path, self.summary["metrics"])
        )


def choose_best(metrics: Mapping[str, Any]) -> str:
    """Of the methods that may be the best with tokens dropped and with the mean fill, or with tokens
    dropped if there is none, the one with the highest symmetric relevance gain with tokens
    dropped."""
    # the highest gain first
    best_dropped: list[str] = metrics["srg"]["best"]
    best_with_both = [name for name in best_dropped if name in metrics["srg_mean"]["best"]]
    return (best_with_both or best_dropped)[0]


def format_estimate(mean: Mapping[str, Any]) -> str:
    """A mean with its interval."""
    return f"{mean['mean']:.3f} ({mean['low']:.3f}–{mean['high']:.3f})"


def draw_plot(path: Path, metrics: Mapping[str, Any]) -> None:
    """Draw the symmetric relevance gains of each map with their intervals; a dotted line is at
    the random map's."""
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
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
