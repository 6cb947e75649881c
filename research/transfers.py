"""Copies to and from the device and waits for it, of a training step and of a batch, by line; now
and at older commits.

    git clone . /tmp/older && git -C /tmp/older checkout 87603b9
    python research/transfers.py --older /tmp/older --output benchmarks/results

The commands run on the pretend device of tests/pretend_device.py, with more steps or batches and
with fewer: the difference, divided, is what one takes.
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
NAME = "transfers"
KINDS = {"copies in": "host→device", "copies out": "device→host", "waits": "wait"}
IN_MEMORY = ["augment.crop_padding=1", "data.pipeline=resident"]
DECODED = ["data.pipeline=workers", "data.workers=0", "train.batch_size=4", "data.name=folder"]


@contextmanager
def pretend_device() -> Iterator[Counter[str]]:
    """The device of this repository's tests for the `vit` that is first on the path, as its
    commands' `auto`."""
    spec = importlib.util.spec_from_file_location(
        "pretend_device", ROOT / "tests" / "pretend_device.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import torch

    try:
        home: Any = importlib.import_module("vit.runtime.device")
    except ModuleNotFoundError:  # its place at first
        home = importlib.import_module("vit.device")
    choose = home.choose_device
    home.choose_device = lambda name: choose(name) if name == "cpu" else torch.device("npu", 0)
    with module.pretend_device() as counter:
        yield counter


def run(*arguments: object) -> None:
    """`vit ARGUMENTS`, in silence. Raises RuntimeError with what it said where it fails."""
    from vit.cli.main import main

    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            if end.code:
                raise RuntimeError(said.getvalue().strip().splitlines()[-1]) from end


def count_each(
    counter: Counter[str],
    command: Callable[[int], Sequence[object]],
    fewer: int,
    more: int,
    divisor: int,
) -> dict[str, Any]:
    """What one step or batch takes: the difference between `command(more)` and `command(fewer)`,
    divided."""
    found = []
    for number in (fewer, more):
        counter.clear()
        try:
            run(*command(number))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        found.append(Counter(counter))
    return add_up({line: (found[1][line] - found[0][line]) / divisor for line in found[1]})


def add_up(lines: dict[str, float]) -> dict[str, Any]:
    totals = {
        kind: sum(n for line, n in lines.items() if line.startswith(start))
        for kind, start in KINDS.items()
    }
    return totals | {"lines": {line: number for line, number in sorted(lines.items()) if number}}


def count_batch(counter: Counter[str], command: Sequence[object]) -> dict[str, Any]:
    """What the third batch of an evaluation takes: the command also measures its speed, in a number
    of batches that depends on the time."""
    try:
        module: Any = importlib.import_module("vit.prediction.predictor")
    except ModuleNotFoundError:
        module = importlib.import_module("vit.evaluate.predict")
    predict, seen = module.BatchPredictor.predict, list[Counter[str]]()

    def predict_and_count(
        predictor: Any, read: Any, *, count: int, on_progress: Any = lambda done: None
    ) -> Any:
        def note(done: int) -> None:
            seen.append(Counter(counter))
            on_progress(done)

        return predict(predictor, read, count=count, on_progress=note)

    module.BatchPredictor.predict = predict_and_count
    run(*command)
    return add_up(dict(seen[2] - seen[1]))


def write_photos(root: Path) -> Path:
    random = np.random.default_rng(0)
    for number in range(90):
        folder = root / "photos" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(
            folder / f"{number}.png"
        )
    return root / "photos"


def count_all(config: Path) -> dict[str, Any]:
    """Of the `vit` on the path, whose recipe of the digits is `config`."""
    with tempfile.TemporaryDirectory() as name, pretend_device() as counter:
        root = Path(name)
        photos = write_photos(root)

        def train(folder: str, steps: int, overrides: Sequence[str]) -> list[object]:
            options = ["train.ema_decay=0.99", "train.epochs=1"]
            options += [f"train.max_steps={steps}", "schedule.warmup_epochs=0", *overrides]
            return ["train", config, *options, "--output", root / f"{folder}-{steps}"]

        trained = root / "resident-14"

        evaluate = ["evaluate", trained, "--batch-size", 60, "--output", root / "evaluation"]

        def explain(method: str, count: int) -> list[object]:
            options = ["--num-images", count, "--batch-size", 2, "--format", "png"]
            return [
                "attention",
                trained,
                *options,
                "--method",
                method,
                "--output",
                root / f"{method}-{count}",
            ]

        def measure(count: int) -> list[object]:
            options = ["--num-images", count, "--methods", "rollout,gae", "--batch-size", 8]
            return ["faithfulness", trained, *options, "--output", root / f"faithfulness-{count}"]

        found = {
            "training step, images in memory": (lambda n: train("resident", n, IN_MEMORY), 4, 14, 10),
            "training step, images decoded as it goes": (
                lambda n: train("workers", n, [*DECODED, f"data.root={photos}"]), 4, 14, 10,
            ),
            "explanation batch: rollout": (lambda n: explain("rollout", n), 4, 8, 2),
            "explanation batch: rollout, gae, legrad": (lambda n: explain("rollout,gae,legrad", n), 4, 8, 2),
            "`vit faithfulness`, 8 more images": (measure, 8, 16, 1),
        }  # fmt: skip
        counts = {case: count_each(counter, *arguments) for case, arguments in found.items()}
        return counts | {"evaluation batch": count_batch(counter, evaluate)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--older", type=Path, nargs="*", default=[], help="checkouts of older commits, oldest first"
    )
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    parser.add_argument(
        "--count", action="store_true", help=argparse.SUPPRESS
    )  # of the vit on the path
    options = parser.parse_args()
    if options.count:
        (code,) = options.older
        print(json.dumps(count_all(code / "configs" / "digits.yaml")))
        return
    from conditions import describe_conditions, write_result
    from study_tables import build_transfers_table

    versions = []
    for code in (*options.older, ROOT):
        commit = subprocess.run(
            ["git", "-C", code, "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
        command = [sys.executable, __file__, "--count", "--older", code]
        counted = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(code)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        versions.append(
            {"commit": commit.stdout.strip(), "cases": json.loads(counted.stdout.splitlines()[-1])}
        )
    result = {"machine": describe_conditions("cpu") | {"device": "pretend"}, "versions": versions}
    print(build_transfers_table(result))
    if options.output:
        print(f"\n{write_result(options.output, NAME, result)}")


if __name__ == "__main__":
    main()
