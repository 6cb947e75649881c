"""A measurement as files: means with their intervals, a table, the per-image numbers and a plot."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vit.explanation.faithfulness.benchmark import BASELINES, FRACTIONS_OF_BLOCKS, LEAVE_ONE_OUT, Measurement
from vit.explanation.faithfulness.map_metrics import REMOVED, estimate, estimate_ratio, find_best, to_markdown, win_rate
from vit.explanation.methods.table import METHODS
from vit.runtime.files import write_arrays, write_atomically, write_text
from vit.runtime.output_dir import prepare_output

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Metric:
    """How a metric is read, and its column in the table; None for none."""

    higher_is_better: bool
    heading: str | None = None

    @property
    def column(self) -> str:
        return f"{self.heading} {'↑' if self.higher_is_better else '↓'}"


METRICS = {
    "srg": Metric(True, "SRG"),
    "srg_mean": Metric(True, "SRG, mean fill"),
    "srg_logit": Metric(True, "SRG of the logit"),
    "srg_logit_mean": Metric(True, "SRG of the logit, mean fill"),
    "srg_blur": Metric(True),
    "srg_logit_blur": Metric(True),
    "deletion": Metric(False, "deletion"),
    "insertion": Metric(True, "insertion"),
    "saco": Metric(True, "SaCo"),
    "leave_one_out_correlation": Metric(True, "ρ leave-one-out"),
    "deletion_mean": Metric(False),
    "insertion_mean": Metric(True),
    "deletion_blur": Metric(False),
    "insertion_blur": Metric(True),
    "grid_pointing": Metric(True, "pointing"),
    "randomised_correlation": Metric(False, "ρ randomised"),
    "sensitivity": Metric(False, "sensitivity"),
}


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
    def names(self) -> list[str]:
        """Methods and baselines, the highest symmetric relevance gain with tokens dropped first."""
        gains = self.summary["metrics"]["srg"]["methods"]
        return sorted(gains, key=lambda name: -gains[name]["mean"])

    @property
    def table(self) -> str:
        """Methods and baselines in markdown; bold are gains that may be the best."""
        metrics, milliseconds = self.summary["metrics"], self.summary["milliseconds_per_image"]
        columns = {name: kind.column for name, kind in METRICS.items() if kind.heading and name in metrics}
        rows = []
        for name in self.names:
            cells = []
            for metric in columns:
                cell = format_estimate(found) if (found := metrics[metric]["methods"].get(name)) else ""
                if ratio := (found or {}).get("of_leave_one_out"):
                    cell += f", {100 * ratio['mean']:.0f} %"
                cells.append(f"**{cell}**" if name in metrics[metric].get("best", ()) else cell)
            wins = [metrics["deletion"]["methods"][name]["wins"].get(baseline) for baseline in ("random", "centre")]
            cells += ["" if fraction is None else f"{100 * fraction:.0f} %" for fraction in wins]
            kind = "baseline" if name in BASELINES else "yes" if METHODS[name].class_specific else "no"
            rows.append([name, kind, *cells, f"{milliseconds[name]:.1f}" if name in milliseconds else ""])
        return to_markdown(["map", "of a class", *columns.values(), "beats random", "beats centre", "ms"], rows)

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write faithfulness.json, .md, .npz (the numbers of every image) and .png into `directory`. Raises
        FileExistsError where it holds files, unless `overwrite` is given and an earlier result is there."""
        output, found = prepare_output(Path(directory), overwrite=overwrite), self.measurement
        content = {"schema_version": SCHEMA_VERSION, **self.conditions, **self.summary, "image_ids": self.ids}
        write_text(output / "faithfulness.json", json.dumps(content, indent=1) + "\n")
        write_text(output / "faithfulness.md", self.table + "\n")
        arrays = {f"{metric}.{name}": v for metric, of in found.values.items() for name, v in of.items()}
        arrays |= {f"curve.{kind}.{name}": v for name, of in found.curves.items() for kind, v in of.items()}
        write_arrays(output / "faithfulness.npz", arrays)
        write_atomically(output / "faithfulness.png", lambda path: draw_plot(path, found, self.summary))


def summarise(measurement: Measurement) -> dict[str, Any]:
    """Means with 95 % intervals, win rates against the baselines, and whether the metrics tell leave-one-out occlusion
    from a random map; for symmetric relevance gains, the methods that may be the best."""
    metrics: dict[str, Any] = {}
    for metric, kind in METRICS.items():
        if values := measurement.values.get(metric):
            up, baselines = kind.higher_is_better, [baseline for baseline in BASELINES if baseline in values]
            methods = {name: asdict(found) for name, found in estimate(values).items()}
            for name, of_method in methods.items():
                wins = {other: win_rate(values[name], values[other], higher_is_better=up) for other in baselines}
                of_method["wins"] = {other: rate for other, rate in wins.items() if other != name}
            count = len(next(iter(values.values())))
            metrics[metric] = {"better": "higher" if up else "lower", "images": count, "methods": methods}
            if metric.startswith("srg"):
                metrics[metric]["best"] = find_best({n: v for n, v in values.items() if n not in BASELINES})
                for name, of_method in methods.items():
                    ratio = estimate_ratio(values[name], values[LEAVE_ONE_OUT])
                    of_method["of_leave_one_out"] = ratio and asdict(ratio)
    blocks = list(FRACTIONS_OF_BLOCKS)
    return {
        "metrics": metrics,
        "best_method": choose_best(metrics),
        "checks": check_metrics(metrics),
        "milliseconds_per_image": measurement.milliseconds,
        "cascading_randomisation": {"fraction_of_blocks": blocks, "correlation": measurement.cascade},
        "notes": measurement.notes,
    }


def choose_best(metrics: Mapping[str, Any]) -> str:
    """One of the methods that may be the best with tokens dropped: one that may also be with patches filled with the
    mean, where there is one; of these the one with the highest symmetric relevance gain with tokens dropped."""
    best: list[str] = metrics["srg"]["best"]
    return next((name for name in best if name in metrics["srg_mean"]["best"]), best[0])


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, bool]:
    """Leave-one-out must beat random on each metric with disjoint intervals, and a random map's SaCo be about 0."""
    checks = {}
    for metric in ("deletion", "insertion", "saco", "grid_pointing"):
        if metric in metrics:
            better, worse = metrics[metric]["methods"][LEAVE_ONE_OUT], metrics[metric]["methods"]["random"]
            if not METRICS[metric].higher_is_better:
                better, worse = worse, better  # the numbers that must be the higher ones come first
            checks[f"{LEAVE_ONE_OUT} beats random: {metric}"] = better["low"] > worse["high"]
    random = metrics["saco"]["methods"]["random"]
    checks["random SaCo is about 0"] = random["low"] <= 0 <= random["high"]
    return checks


def format_estimate(found: Mapping[str, Any]) -> str:
    """A mean with its interval."""
    return f"{found['mean']:.3f} ({found['low']:.3f}–{found['high']:.3f})"


def draw_plot(path: Path, measurement: Measurement, summary: Mapping[str, Any]) -> None:
    """Left to right: each method's symmetric relevance gains and SaCo with intervals; the mean deletion curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = summary["metrics"]
    gains = metrics["srg"]["methods"]
    names = sorted(gains, key=lambda name: gains[name]["mean"])
    figure = Figure(figsize=(15, 1.5 + 0.32 * len(names)), layout="constrained")
    panels = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.4])
    for panel, metric in zip(panels, ("srg", "srg_mean", "saco"), strict=False):
        for row, name in enumerate(names):
            found = metrics[metric]["methods"][name]
            colour = "#777777" if name in BASELINES else "#0b62c4"
            panel.plot([found["low"], found["high"]], [row, row], color=colour, linewidth=2)
            panel.plot(found["mean"], row, "o", color=colour, markersize=5)
        panel.axvline(metrics[metric]["methods"]["random"]["mean"], color="#bbbbbb", linestyle=":")
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.set_title(f"{METRICS[metric].column}  (95 % interval)", fontsize=10)
    for number, name in enumerate(reversed(names)):
        curve, style = measurement.curves[name]["deletion"].mean(axis=0), ("-", "--", "-.", ":")[number // 10 % 4]
        panels[3].plot(REMOVED, curve, style, label=name, linewidth=1.4)
    panels[3].set(xlabel="fraction of the patches removed", ylabel="probability of the class")
    panels[3].legend(fontsize=7, ncols=2)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
