"""A measurement as files: figures with their intervals, a table, the per-image numbers and a plot."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vit.explanation.faithfulness.benchmark import CASCADE, CONTROLS, HIGHER_IS_BETTER, Measurement
from vit.explanation.faithfulness.metrics import (
    TAKEN_AWAY,
    Estimate,
    disjoint,
    estimate,
    to_markdown,
    win_rate,
)
from vit.explanation.methods.table import METHODS
from vit.runtime.files import write_atomically, write_text
from vit.runtime.output_dir import prepare_output

SCHEMA_VERSION = 1
_COLUMNS = {
    "deletion": "deletion ↓",
    "insertion": "insertion ↑",
    "saco": "SaCo ↑",
    "oracle_correlation": "ρ oracle ↑",
    "grid_pointing": "pointing ↑",
    "scrambled_correlation": "ρ scrambled ↓",
    "sensitivity": "sensitivity ↓",
}


def summarise(measurement: Measurement) -> dict[str, Any]:
    """Means with 95 % intervals, win rates against the controls, and whether the harness can tell a good map
    from a random one."""
    metrics: dict[str, Any] = {}
    for metric, values in measurement.values.items():
        estimates = estimate(values)
        higher = HIGHER_IS_BETTER[metric]
        metrics[metric] = {
            "better": "higher" if higher else "lower",
            "images": len(next(iter(values.values()))),
            "methods": {
                name: {
                    **asdict(estimates[name]),
                    "wins": {
                        control: win_rate(of_images, values[control], higher_is_better=higher)
                        for control in CONTROLS
                        if control in values and control != name
                    },
                }
                for name, of_images in values.items()
            },
        }
    return {
        "metrics": metrics,
        "valid": check_validity(metrics),
        "milliseconds_per_image": measurement.milliseconds,
        "scrambled_cascade": {"share_of_blocks": list(CASCADE), "correlation": measurement.cascade},
        "notes": measurement.notes,
    }


def check_validity(metrics: Mapping[str, Any]) -> dict[str, bool]:
    """The oracle must beat random on each metric with disjoint intervals, and a random map's SaCo be about
    0."""
    checks = {}
    for metric in ("deletion", "insertion", "saco", "grid_pointing"):
        if metric in metrics:
            oracle, random = (_interval(metrics[metric]["methods"][name]) for name in ("oracle", "random"))
            ahead = (
                oracle.mean > random.mean
                if metrics[metric]["better"] == "higher"
                else oracle.mean < random.mean
            )
            checks[f"oracle beats random: {metric}"] = ahead and disjoint(oracle, random)
    random = _interval(metrics["saco"]["methods"]["random"])
    checks["random SaCo is about 0"] = random.low <= 0 <= random.high
    return checks


def _interval(method: Mapping[str, Any]) -> Estimate:
    return Estimate(method["mean"], method["low"], method["high"])


def build_table(summary: Mapping[str, Any]) -> str:
    """A markdown table, the best deletion first."""
    metrics, columns = summary["metrics"], [name for name in _COLUMNS if name in summary["metrics"]]
    deletion = metrics["deletion"]["methods"]
    rows = []
    for name in sorted(deletion, key=lambda name: deletion[name]["mean"]):
        cells = [_show(metrics[column]["methods"].get(name)) for column in columns]
        wins = [_percent(deletion[name]["wins"].get(control)) for control in ("random", "centre")]
        milliseconds = summary["milliseconds_per_image"].get(name)
        kind = "control" if name in CONTROLS else "yes" if METHODS[name].class_specific else "no"
        rows.append([name, kind, *cells, *wins, "" if milliseconds is None else f"{milliseconds:.1f}"])
    headings = [
        "map",
        "of a class",
        *(_COLUMNS[column] for column in columns),
        "beats random",
        "beats centre",
        "ms",
    ]
    return to_markdown(headings, rows)


def _show(method: Mapping[str, Any] | None) -> str:
    return "" if method is None else f"{method['mean']:.3f} ({method['low']:.3f}–{method['high']:.3f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


@dataclass(frozen=True)
class FaithfulnessResult:
    """The benchmark's numbers and their conditions."""

    measurement: Measurement
    conditions: Mapping[str, Any]  # model, data, split, number of images, seed, device, versions
    ids: list[str]  # of the images

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Means with 95 % intervals; see `summarise`."""
        return summarise(self.measurement)

    @property
    def table(self) -> str:
        """Methods and baselines in markdown, the best deletion first."""
        return build_table(self.summary)

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write faithfulness.json, .md, .npz (the numbers of every image) and .png into `directory`.

        Raises FileExistsError where it holds files, unless `overwrite` is given and an earlier result is there.
        """
        output, found = prepare_output(Path(directory), overwrite=overwrite), self.measurement
        content = {
            "schema_version": SCHEMA_VERSION,
            **self.conditions,
            **self.summary,
            "image_ids": self.ids,
        }
        write_text(output / "faithfulness.json", json.dumps(content, indent=1) + "\n")
        write_text(output / "faithfulness.md", self.table + "\n")
        arrays = {
            f"{metric}.{name}": v for metric, values in found.values.items() for name, v in values.items()
        }
        arrays |= {
            f"curve.{kind}.{name}": curve
            for name, of_kind in found.curves.items()
            for kind, curve in of_kind.items()
        }
        write_atomically(output / "faithfulness.npz", lambda path: _write_arrays(path, arrays))
        write_atomically(output / "faithfulness.png", lambda path: draw_plot(path, found, self.summary))


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def draw_plot(path: Path, measurement: Measurement, summary: Mapping[str, Any]) -> None:
    """Left to right: each method's deletion, insertion and SaCo with its interval; the mean deletion
    curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = summary["metrics"]
    deletion = metrics["deletion"]["methods"]
    names = sorted(deletion, key=lambda name: -deletion[name]["mean"])
    figure = Figure(figsize=(15, 1.5 + 0.32 * len(names)), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.4])
    for panel, metric in zip(panels, ("deletion", "insertion", "saco"), strict=False):
        for row, name in enumerate(names):
            found = metrics[metric]["methods"][name]
            colour = "#777777" if name in CONTROLS else "#0b62c4"
            panel.plot([found["low"], found["high"]], [row, row], color=colour, linewidth=2)
            panel.plot(found["mean"], row, "o", color=colour, markersize=5)
        panel.axvline(metrics[metric]["methods"]["random"]["mean"], color="#bbbbbb", linestyle=":")
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.set_title(f"{_COLUMNS[metric]}  (95 % interval)", fontsize=10)
    styles = ["-", "--", "-.", ":"]
    for number, name in enumerate(reversed(names)):
        curve = measurement.curves[name]["deletion"].mean(axis=0)
        panels[3].plot(TAKEN_AWAY, curve, styles[number // 10 % 4], label=name, linewidth=1.4)
    panels[3].set(xlabel="share of the patches taken away", ylabel="probability of the class")
    panels[3].legend(fontsize=7, ncols=2)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
