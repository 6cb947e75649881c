"""What pretrained weights bring with few photos, at equal minutes: a linear probe, fine-tuning after
it, fine-tuning without it, and training from scratch.

    python benchmarks/pretrained.py --weights WEIGHTS --weights-name "ViT-S/14 of …" --photos IMAGENETTE \\
        --small-images CIFAR10 --minutes 4 --seeds 3 --output benchmarks/results

The photos are class folders below train/ and val/ (or test/). Each set of training images is drawn
from train/ with the seed, as links in a folder of its own; 60 images of each class below val/ are the
unseen ones, the same for every seed, and no run sees them.

A cell is `vit train SET --minutes M` as users run it, from an empty cache (so that the pass through
the weights counts in every column), then `vit evaluate` on the unseen images. The result is written
after every cell; --continue leaves out those that it has.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conditions import describe_conditions, load_result, write_result

NAME = "pretrained"
# of Imagenette: tench, chain saw, French horn, parachute
FOUR_CLASSES = ("n01440764", "n03000684", "n03394916", "n03888257")

Cell = dict[str, Any]


@dataclass(frozen=True)
class ImageSet:
    """Training images that are drawn from a folder.

    Args:
        counts: images of the first, the second, … class, over and over.
        classes: None: all.
        is_small: of the small images, not of the photos.
    """

    counts: tuple[int, ...]
    classes: tuple[str, ...] | None = None
    is_small: bool = False


SETS = {
    "4 x 200": ImageSet((200,), FOUR_CLASSES),
    "10 x 30": ImageSet((30,)),
    "10 x 5": ImageSet((5,)),
    "20:1, 5 x 100 and 5 x 5": ImageSet((100, 5)),
    "CIFAR-10, 10 x 50": ImageSet((50,), is_small=True),
}
# what is compared: options and overrides beside the images and the minutes
WAYS: Mapping[str, Sequence[str]] = {
    "probe alone": ("--init", "WEIGHTS", "model.freeze=backbone"),
    "probe, then fine-tuning": ("--init", "WEIGHTS"),
    "fine-tuning alone": ("--init", "WEIGHTS", "model.probe=false"),
    "scratch": (),
}
# of each class; to evaluate all would take longer than to train
MAX_UNSEEN = 60
# lines of the plan that say what was chosen
PLAN_ROWS = ("length", "probe", "run", "splits")


def draw_images(image_set: ImageSet, source: Path, folder: Path, *, seed: int) -> None:
    """Link a set's training images, drawn with `seed`, and the unseen ones of its classes."""
    unseen = next(source / name for name in ("val", "test") if (source / name).is_dir())
    classes = image_set.classes or sorted(path.name for path in (source / "train").iterdir())
    for number, name in enumerate(classes):
        files = sorted((source / "train" / name).iterdir())
        count = image_set.counts[number % len(image_set.counts)]
        if len(files) < count:
            raise SystemExit(f"{source}/train/{name} has {len(files)} images, fewer than {count}")
        drawn = random.Random(f"{seed} {name}").sample(files, count)
        link_files(drawn, folder / "train" / name)
        # evenly spaced: the names may be in an order of their contents
        files = sorted((unseen / name).iterdir())
        files = files[:: max(1, len(files) // MAX_UNSEEN)][:MAX_UNSEEN]
        link_files(files, folder / "val" / name)


def link_files(files: Sequence[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file.name).symlink_to(file.resolve())


def run_cell(way: str, data: Path, options: argparse.Namespace, *, seed: int) -> Cell:
    """One run of `vit train` and one of `vit evaluate`."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        environment = os.environ | {"VIT_CACHE": str(directory / "cache"), "COLUMNS": "300"}
        arguments = [argument.replace("WEIGHTS", str(options.weights)) for argument in WAYS[way]]
        arguments += ["--minutes", f"{options.minutes:g}", f"train.seed={seed}", *options.overrides]
        vit = [sys.executable, "-m", "vit"]
        run = directory / "run"

        start = time.perf_counter()
        command = [*vit, "train", str(data), *arguments, "--output", str(run)]
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - start
        log = process.stdout + process.stderr
        if process.returncode:
            raise SystemExit(f"vit train failed: {log}")

        evaluation = directory / "evaluation"
        command = [*vit, "evaluate", str(run), "--split", "test", "--pictures", "0"]
        command += ["--output", str(evaluation)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        measured = json.loads((evaluation / "evaluation.json").read_text())
        metrics = run / "metrics.jsonl"
        epochs = []
        if metrics.exists():
            epochs = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "seconds": round(seconds, 1),
        "top1": measured["top1"],
        "interval": measured["intervals"]["top1"],
        "macro_f1": measured["macro_f1"],
        "validation_top1": [epoch["val_top1"] for epoch in epochs],
        "epoch_seconds": [round(epoch["elapsed_seconds"], 1) for epoch in epochs],
        "plan": read_plan(log),
    }


def read_plan(log: str) -> dict[str, str]:
    """The rows of `PLAN_ROWS` in what `vit train` printed, and what it said of the probe."""
    rows = {}
    for line in log.splitlines():
        name, _, text = line.strip().partition(" ")
        if name in PLAN_ROWS and text.startswith(" "):
            rows[name] = " ".join(text.split())
        elif line.startswith("the probe's top-1"):
            rows["validation of the probe"] = line.strip()
    return rows


def summarise(cells: Mapping[str, Cell]) -> dict[str, dict[str, dict[str, Any]]]:
    """Set → way → mean and standard deviation of top-1, macro F1 and seconds over the seeds; and by
    how much fine-tuning after the probe is better than the probe alone, seed by seed."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for key in cells:
        set_name, way, _ = key.split(" | ")
        seeds = [cell for name, cell in cells.items() if name.startswith(f"{set_name} | {way} |")]
        values: dict[str, Any] = {"seeds": len(seeds)}
        for name in ("top1", "macro_f1", "seconds"):
            numbers = [cell[name] for cell in seeds]
            spread = statistics.stdev(numbers) if len(numbers) > 1 else None
            values[name] = {"mean": statistics.mean(numbers), "standard_deviation": spread}
        summary.setdefault(set_name, {})[way] = values
    for set_name, ways in summary.items():
        differences = []
        for key, cell in cells.items():
            other = cells.get(key.replace("| probe alone |", "| probe, then fine-tuning |"))
            if key.startswith(f"{set_name} | probe alone |") and other is not None:
                differences.append(other["top1"] - cell["top1"])
        if differences:
            ways["probe, then fine-tuning"]["over_probe"] = differences
    return summary


def build_table(result: Mapping[str, Any]) -> str:
    """Top-1 on the unseen images, a row a set."""
    lines = [f"| training images | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for set_name, ways in result["summary"].items():
        texts = []
        for way in WAYS:
            text = "–"
            if way in ways:
                top1 = ways[way]["top1"]
                spread = top1["standard_deviation"]
                text = f"{100 * top1['mean']:.1f}"
                text += "" if spread is None else f" ± {100 * spread:.1f}"
                text += f" % ({ways[way]['seconds']['mean']:.0f} s)"
            texts.append(text)
        lines.append(f"| {set_name} | {' | '.join(texts)} |")
    seeds = {values["seeds"] for ways in result["summary"].values() for values in ways.values()}
    conditions = (
        f"{result['weights']}, {result['minutes']:g} minutes, {result['machine']['device']}"
    )
    lines += ["", f"{conditions}, {max(seeds, default=0)} seeds."]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="as of vit train --init")
    parser.add_argument("--weights-name", required=True, help="in the result")
    parser.add_argument("--photos", type=Path, help="Imagenette, as class folders")
    parser.add_argument("--small-images", type=Path, help="CIFAR-10, as class folders")
    parser.add_argument("--minutes", type=float, default=4.0, help="of every cell")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--continue", dest="continues", action="store_true")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument("overrides", nargs="*", help="key.path=value, of every run")
    return parser.parse_intermixed_args()


def main() -> None:
    options = parse_arguments()
    machine = describe_conditions("cpu")
    result: dict[str, Any] = {
        "machine": machine,
        "weights": options.weights_name,
        "minutes": options.minutes,
        "overrides": options.overrides,
        "cells": {},
    }
    earlier = load_result(options.output, NAME, machine) if options.continues else None
    if earlier is not None:
        for key in ("weights", "minutes", "overrides"):
            if earlier[key] != result[key]:
                raise SystemExit(f"{key} of the result to continue: {earlier[key]}")
        result["cells"] = earlier["cells"]

    # seed by seed, so that a result that is stopped early has every column
    for seed in range(options.seeds):
        for set_name in options.sets:
            image_set = SETS[set_name]
            source = options.small_images if image_set.is_small else options.photos
            missing = [
                way
                for way in options.ways
                if f"{set_name} | {way} | {seed}" not in result["cells"] and source is not None
            ]
            if not missing:
                continue
            with tempfile.TemporaryDirectory() as folder:
                data = Path(folder) / "photos"
                draw_images(image_set, source, data, seed=seed)
                for way in missing:
                    cell = run_cell(way, data, options, seed=seed)
                    conditions = describe_conditions("cpu")
                    cell |= {"commit": conditions["commit"], "load": conditions["load"]}
                    result["cells"][f"{set_name} | {way} | {seed}"] = cell
                    result["summary"] = summarise(result["cells"])
                    path = write_result(options.output, NAME, result)
                    print(
                        f"{set_name}, {way}, seed {seed}: {cell['top1']:.1%}"
                        f" ({cell['seconds']:.0f} s) {path}",
                        flush=True,
                    )
    print(build_table(result))


if __name__ == "__main__":
    main()
