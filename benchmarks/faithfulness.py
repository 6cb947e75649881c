"""How faithful are the maps to several models, with patches removed in two ways?

    python benchmarks/faithfulness.py runs/digits runs/cifar10=/data/cifar10 --output benchmarks/results

Each model is a training directory or a model file, then = and its data where that is not what it
was trained on. Prints a table for each operator: symmetric relevance gain with its 95 %
interval, and in percent of leave-one-out's; in bold the methods that may be the best of the model.
Each model is written when it is measured; what the file holds of others stays.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from conditions import describe_conditions, find_result, write_result

import vit
from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.analysis.faithfulness.result import format_estimate

NAME = "faithfulness-models"
GAINS = {
    "srg": "probability, tokens dropped",
    "srg_mean": "probability, patches filled with the mean",
    "srg_blur": "probability, patches blurred",
    # in results of earlier versions
    "srg_logit": "logit, tokens dropped",
    "srg_logit_mean": "logit, patches filled with the mean",
}


def measure(model: str, *, images: int) -> tuple[str, dict[str, Any]]:
    """The model's name, and what was measured of it."""
    path, _, data = model.partition("=")
    started = time.perf_counter()
    result = vit.measure_faithfulness(path, data=data or None, num_images=images)
    seconds = time.perf_counter() - started
    print(result.table, *result.measurement.notes, f"{seconds:.0f} s\n", sep="\n", flush=True)
    name = Path(path).parent.name if Path(path).is_file() else Path(path).name
    for metric in ("srg", "srg_mean", "srg_blur"):
        means = result.summary["metrics"][metric]["methods"]
        reference = means["leave-one-out"]
        for mean in means.values():
            # of a reference that may be zero, a ratio says nothing
            has_ratio = reference["low"] > 0
            ratio = {"mean": mean["mean"] / reference["mean"]} if has_ratio else None
            mean["of_leave_one_out"] = ratio
    return name, {
        **result.conditions,
        **result.summary,
        "model": name,
        "seconds": round(seconds, 1),
    }


def build_tables(models: dict[str, Any]) -> str:
    """A table for each score and operator: maps by models."""
    tables = []
    for metric, title in GAINS.items():
        found = {
            model: summary["metrics"][metric]
            for model, summary in models.items()
            if metric in summary["metrics"]
        }
        if not found:
            continue
        names = {name: 0.0 for of_model in found.values() for name in of_model["methods"]}
        for of_model in found.values():
            ratios = {name: of["of_leave_one_out"] for name, of in of_model["methods"].items()}
            names |= {
                name: names[name] + (ratio["mean"] if ratio else 0)
                for name, ratio in ratios.items()
            }
        rows = [
            [name, *(format_cell(of_model, name) for of_model in found.values())] for name in names
        ]
        rows.sort(key=lambda row: -names[row[0]])
        tables.append(to_markdown([title, *found], rows))
    return "\n\n".join(tables)


def format_cell(of_model: dict[str, Any], name: str) -> str:
    """A map's gain for one model."""
    if not (found := of_model["methods"].get(name)):
        return "–"
    ratio = found["of_leave_one_out"]
    cell = format_estimate(found) + (f", {100 * ratio['mean']:.0f} %" if ratio else "")
    return f"**{cell}**" if name in of_model["best"] else cell


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "models", nargs="+", help="training directory or model file; =DATA names other data"
    )
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    machine, models = describe_conditions("cpu"), dict[str, Any]()
    for model in options.models:
        name, found = measure(model, images=options.images)
        models[name] = {**found, "machine": machine}
        if options.output:
            path = find_result(options.output, NAME, machine)
            before = json.loads(path.read_text())["models"] if path.exists() else {}
            write_result(options.output, NAME, {"machine": machine, "models": before | models})
    print(build_tables(models))


if __name__ == "__main__":
    main()
