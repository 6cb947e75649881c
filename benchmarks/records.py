"""Print the README's table of recipes from the rows of `time_to_accuracy.py`, and draw their learning curves.

    python benchmarks/records.py            # the table
    python benchmarks/records.py --write    # into README.md, between its two marks; and the picture

A recipe without a row is listed as not measured.
"""

import argparse
import json
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
CURVES = ROOT / ".github" / "images" / "learning-curves.png"
BEGIN, END = "<!-- written by make records -->", "<!-- end of what make records writes -->"
RECIPE = "cifar10-cpu"  # whose curves are drawn
MINUTES = (1, 3, 5, 10, 20)


def load_rows(kind: str) -> dict[str, dict[str, Any]]:
    """File name → row, of `record-*` or `ladder-*`."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}-*.json"))}


def choose_recipe(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of RECIPE, for any length of training."""
    return {name: row for name, row in rows.items() if name.startswith(f"record-{RECIPE}")}


def format_share(figure: dict[str, Any] | None) -> str:
    """'80.1 ± 0.3 %'."""
    if figure is None:
        return "–"
    spread = figure["standard_deviation"]
    return f"{100 * figure['mean']:.1f}" + (f" ± {100 * spread:.1f} %" if spread is not None else " %")


def describe_plainness(config: dict[str, Any]) -> str:
    """What the model has beside encoder blocks with full attention."""
    model = config["model"]
    stems = {
        "patch": "patchify",
        "conv": "conv stem",
        "conv_pool": "pooled conv stem",
        "conv_pool_residual": "pooled conv stem with a residual convolution",
    }
    parts = [stems[model["stem"]]]
    parts += [f"{model['reg_tokens']} registers"] if model["reg_tokens"] else []
    return ", ".join(parts)


def build_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| recipe | stem | test top-1 | with mirrored image | seconds from process start, cold / warm | seeds | "
        "machine | row |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = set()
    for name, row in rows.items():
        measured.add(row["recipe"])
        ours = row["ours"]
        cold = [run["seconds"] for run in row["runs"] if run["cold"]]
        warm = [run["seconds"] for run in row["runs"] if not run["cold"]]
        times = " / ".join(f"{sum(of) / len(of):.0f}" if of else "–" for of in (cold, warm))
        changes = " ".join(item for item in row["overrides"] if item != "data.name=folder")
        mirrors = row["config"]["augment"]["flip"] != "none"  # else a mirrored image is no image of its class
        lines.append(
            f"| `{row['recipe'].removeprefix('configs/')}`{' `' + changes + '`' if changes else ''} | "
            f"{describe_plainness(row['config'])} | {format_share(ours['test_top1'])} | "
            f"{format_share(ours.get('test_top1_mirrored') if mirrors else None)} | {times} | {ours['seeds']} | "
            f"{row['machine']['device']} | [row](benchmarks/results/{name}.json) |"
        )
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        recipe = path.relative_to(ROOT).as_posix()
        if recipe not in measured:
            lines.append(f"| `{recipe.removeprefix('configs/')}` | | not measured | | | | | |")
    return lines


def build_rival_lines(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, row in rows.items():
        timed = row["time_to"]
        if row["rival"] is None or timed["ratio"] is None:
            continue
        bound = "" if timed["rival_reached_it"] else "more than "
        last = row["rival_runs"][0]
        lines.append(
            f"`{row['recipe'].removeprefix('configs/')}` reaches {timed['top1']:.0%} on the validation split after "
            f"{timed['ours_seconds']:.0f} s; timm's model of the same width and depth in a plain loop takes "
            f"{bound}{timed['rival_seconds']:.0f} s ({bound}{timed['ratio']:.1f} ×; it ends at "
            f"{format_share(row['rival']['test_top1'])} on the test images after {last['seconds']:.0f} s). "
            f"[Row](benchmarks/results/{name}.json)."
        )
    return lines


def build_cost_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Validation accuracy at some minutes since process start: the mean over seeds of the last figure so far."""

    def at(curves: list[list[dict[str, float]]], minutes: int) -> str:
        figures = [[point["top1"] for point in curve if point["seconds"] <= 60 * minutes] for curve in curves]
        if not all(figures):
            return "–"
        ended = all(curve[-1]["seconds"] <= 60 * minutes for curve in curves)
        return f"{100 * sum(of[-1] for of in figures) / len(figures):.1f}{' (ended)' if ended else ''}"

    if not rows:
        return []
    lines = [
        f"| validation top-1, %, after | {' | '.join(f'{minutes} min' for minutes in MINUTES)} |",
        f"|---|{'---|' * len(MINUTES)}",
    ]
    for row in rows.values():
        changes = " ".join(item for item in row["overrides"] if not item.startswith("data."))
        name = f"`{row['recipe'].removeprefix('configs/')}`{' `' + changes + '`' if changes else ''}"
        arms = {name: row["runs"], "timm's model, plain loop": row["rival_runs"]}
        for arm, runs in arms.items():
            if runs:
                figures = " | ".join(at([run["curve"] for run in runs], minutes) for minutes in MINUTES)
                lines.append(f"| {arm} | {figures} |")
    return lines


def build_ladder(ladders: dict[str, dict[str, Any]]) -> list[str]:
    """The rungs of each ladder up to the recipe, and the levers that were left out."""
    lines: list[str] = []
    for name, ladder in ladders.items():
        recipe = ladder["recipe"].removeprefix("configs/")
        lines += [
            f"| [ladder of `{recipe}`](benchmarks/results/{name}.json) | test top-1 | seconds | seeds |",
            "|---|---|---|---|",
        ]
        for number, (rung, of) in enumerate(ladder["rungs"].items()):
            label = rung if number == 0 or rung.startswith("+") else f"instead: {rung}"
            figures = of["ours"]
            seconds = [run["seconds"] for run in of["runs"] if not run["cold"]] or [
                run["seconds"] for run in of["runs"]
            ]
            lines.append(
                f"| {label} | {format_share(figures['test_top1'])} | {sum(seconds) / len(seconds):.0f} | "
                f"{figures['seeds']} |"
            )
    return lines


def draw_curves(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Validation accuracy against minutes since process start: ours by seed, and the rival's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.0), dpi=150, layout="constrained")
    ours = cycle(["#0072b2", "#56b4e9", "#009e73"])  # Okabe and Ito's, told apart by the colour-blind
    shown: set[str] = set()
    for row in rows.values():
        name, colour = f"vit train {row['recipe']}", next(ours)
        arms = [(name, colour, run["curve"]) for run in row["runs"]]
        arms += [("timm's model, plain loop", "#d55e00", run["curve"]) for run in row["rival_runs"]]
        for label, colour, curve in arms:
            axes.plot(
                [point["seconds"] / 60 for point in curve],
                [100 * point["top1"] for point in curve],
                color=colour,
                marker=".",
                linewidth=1.2,
                label=None if label in shown else label,
            )
            shown.add(label)
    axes.set_xlabel("minutes since process start, start-up included")
    axes.set_ylabel("validation top-1, %")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
    plt.close(figure)


def render() -> str:
    """What stands between the README's two marks."""
    rows = load_rows("record")
    blocks = [
        "\n".join(build_table(rows)),
        *build_rival_lines(rows),
        "\n".join(build_cost_table(choose_recipe(rows))),
        "\n".join(build_ladder(load_rows("ladder"))),
    ]
    return "\n\n".join(block for block in blocks if block)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into README.md")
    options = parser.parse_args()
    text = render()
    print(text)
    if options.write:
        readme = README.read_text()
        before, rest = readme.split(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
        rows = choose_recipe(load_rows("record"))
        if rows:
            draw_curves(rows, CURVES)


if __name__ == "__main__":
    main()
