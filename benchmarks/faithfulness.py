"""Measure the faithfulness of the maps of several models, with patches removed in two ways.

    python benchmarks/faithfulness.py runs/digits runs/cifar10=/data/cifar10 --output benchmarks/results

Each model is a run or a model file, then = and its data if that is not what it was trained on. Each model is written
when it is measured; what the file holds of others stays.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from conditions import describe_conditions, find_result, write_result

import vit

NAME = "faithfulness-models"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="a run or a model file; =DATA names other data")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    machine = describe_conditions("cpu")
    path = find_result(options.output, NAME, machine)
    for model in options.models:
        place, _, data = model.partition("=")
        started = time.perf_counter()
        found = vit.measure_faithfulness(place, data=data or None, num_images=options.images)
        name = Path(place).parent.name if Path(place).is_file() else Path(place).name
        measured: dict[str, Any] = {**found.conditions, **found.summary, "machine": machine}
        measured["seconds"] = round(time.perf_counter() - started, 1)
        print(name, *found.rows, sep="\n", flush=True)
        before = json.loads(path.read_text())["models"] if path.exists() else {}
        write_result(
            options.output, NAME, {"machine": machine, "models": before | {name: measured}}
        )


if __name__ == "__main__":
    main()
