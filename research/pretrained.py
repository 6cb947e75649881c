"""What pretrained weights bring with few photos, at equal minutes: a linear probe, fine-tuning after
it, fine-tuning without it, and training from scratch.

    python research/pretrained.py --weights WEIGHTS --weights-name "ViT-S/14 of …" --photos IMAGENETTE \\
        --small-images CIFAR10 --seeds 3 --time-limit 75 --output benchmarks/results

The photos are class folders below train/ and val/ (or test/). Each set of training images is drawn
from train/ with the seed, as links in a folder of its own; 240 images of its classes below val/ are
the unseen ones, the same for every seed, and no run sees them.

A cell is `vit train SET --minutes M` as users run it, from an empty cache (so that the pass through
the weights counts in every column), whose model is then measured on the unseen images. Low-rank
adapters after the probe were measured by low_rank.py, which commit 576200b still has. The most telling
cells are the first: those of seed 0, then the other seeds of the probe and of fine-tuning after it. The
result is written after every cell; --continue leaves out those
that it has, so that the whole can be stopped anywhere.

Before them, with 200 of the photos: the pass of `compute_features` from the files, in turn with forward
passes alone over a tensor in memory, in the same precision.
"""

import argparse
import json
import math
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import describe_conditions, load_result, write_result

from vit.bundle import load_bundle
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.evaluation.images import load_images
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.metrics import compute_metrics, score_logits
from vit.model.timm_weights import load_pretrained
from vit.prediction.features import compute_features
from vit.prediction.predictor import BatchPredictor, choose_batch_size
from vit.runtime.device import autocast, choose_precision

NAME = "pretrained"
# of Imagenette: tench, chain saw, French horn, parachute
FOUR_CLASSES = ("n01440764", "n03000684", "n03394916", "n03888257")

Cell = dict[str, Any]


@dataclass(frozen=True)
class ImageSet:
    """Training images that are drawn from a folder.

    Args:
        counts: images of the first, the second, … class, over and over.
        minutes: of every way.
        classes: None: all.
        is_small: of the small images, not of the photos.
    """

    counts: tuple[int, ...]
    minutes: float = 2.0
    classes: tuple[str, ...] | None = None
    is_small: bool = False


SETS = {
    "4 x 200": ImageSet((200,), minutes=5.0, classes=FOUR_CLASSES),
    "10 x 30": ImageSet((30,)),
    "10 x 5": ImageSet((5,), minutes=1.0),
    "20:1, 5 x 100 and 5 x 5": ImageSet((100, 5)),
    "CIFAR-10, 10 x 50": ImageSet((50,), is_small=True),
}
# what is compared: options and overrides beside the images and the minutes
VIT_WAYS: Mapping[str, Sequence[str]] = {
    "probe alone": ("--init", "WEIGHTS", "model.freeze=backbone"),
    "probe, then fine-tuning": ("--init", "WEIGHTS"),
    "fine-tuning alone": ("--init", "WEIGHTS", "model.probe=false"),
    "scratch": (),
}
# columns of the table
WAYS = (*list(VIT_WAYS)[:3], "probe, then LoRA", "scratch")
# of further seeds these are the first
TELLING_WAYS = ("probe alone", "probe, then fine-tuning")
# to evaluate all would take longer than to train
MAX_UNSEEN = 240
# lines of the plan that say what was chosen
PLAN_ROWS = ("length", "more photos", "probe", "run", "splits")
FEATURE_ROUNDS = 3
# in the plan's line of the probe
PROBE_PATTERN = re.compile(
    r"(?:top-1 in cross-validation (?P<cross_validated_top1>[\d.]+)%)?"
    r" \(.*features (?P<feature_seconds>[\d.]+) s, regressions (?P<fit_seconds>[\d.]+) s"
)


def draw_images(image_set: ImageSet, source: Path, folder: Path, *, seed: int) -> None:
    """Link a set's training images, drawn with `seed`, and the unseen ones of its classes."""
    unseen = next(source / name for name in ("val", "test") if (source / name).is_dir())
    classes = image_set.classes or sorted(path.name for path in (source / "train").iterdir())
    num_unseen = MAX_UNSEEN // len(classes)
    for number, name in enumerate(classes):
        files = sorted((source / "train" / name).iterdir())
        count = image_set.counts[number % len(image_set.counts)]
        if len(files) < count:
            raise SystemExit(f"{source}/train/{name} has {len(files)} images, fewer than {count}")
        drawn = random.Random(f"{seed} {name}").sample(files, count)
        link_files(drawn, folder / "train" / name)
        # evenly spaced: the names may be in an order of their contents
        files = sorted((unseen / name).iterdir())
        files = files[:: max(1, len(files) // num_unseen)][:num_unseen]
        link_files(files, folder / "val" / name)


def link_files(files: Sequence[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in files:
        (folder / file.name).symlink_to(file.resolve())


def run_cell(
    way: str, data: Path, options: argparse.Namespace, *, minutes: float, seed: int
) -> Cell:
    """One run of `vit train`, and its accuracy on the unseen images."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        # lines of the plan are not wrapped
        environment = os.environ | {"VIT_CACHE": str(directory / "cache"), "COLUMNS": "2000"}
        vit = [sys.executable, "-m", "vit"]
        run = directory / "run"
        arguments = [text.replace("WEIGHTS", str(options.weights)) for text in VIT_WAYS[way]]
        command = [*vit, "train", str(data), *arguments, f"train.seed={seed}"]
        command += options.overrides
        command += ["--minutes", f"{minutes:g}", "--output", str(run)]

        load = os.getloadavg()[0]
        processor_seconds = count_processor_seconds()
        start = time.perf_counter()
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - start
        processor_seconds = count_processor_seconds() - processor_seconds
        log = process.stdout + process.stderr
        if process.returncode:
            raise SystemExit(f"{way} failed: {log}")

        measured = measure_unseen(run, data, cache_dir=directory / "cache")
        metrics = run / "metrics.jsonl"
        epochs = []
        if metrics.exists():
            epochs = [json.loads(line) for line in metrics.read_text().splitlines()]
    plan = read_plan(log)
    return {
        "minutes": minutes,
        "load": round(load, 1),
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor_seconds, 1),
        **measured,
        "validation_top1": [epoch["val_top1"] for epoch in epochs],
        "epoch_seconds": [round(epoch["elapsed_seconds"], 1) for epoch in epochs],
        "probe": read_probe(plan),
        "plan": plan,
    }


def measure_unseen(run: Path, data: Path, *, cache_dir: Path) -> dict[str, Any]:
    """What `vit evaluate` would say of the unseen images, without its pages and timings."""
    bundle = load_bundle(run)
    images = load_images(
        bundle, open_dataset("folder", root=str(data), cache_dir=cache_dir), "test"
    )
    logits = BatchPredictor.from_bundle(bundle).predict(images.read, count=len(images))
    scores = score_logits(logits, images.labels)
    return {
        "top1": float(scores.correct.mean()),
        "interval": compute_intervals(scores)["top1"],
        "macro_f1": compute_metrics(scores)["macro_f1"],
        "unseen_images": len(images),
    }


def measure_feature_pass(weights: Path, photos: Path, *, count: int = 200) -> dict[str, Any]:
    """Images a second of the feature pass from files and of the bare forward pass, medians of rounds
    in turn; of the first photos in memory by their names."""
    model, values = load_pretrained(str(weights), num_classes=len(FOUR_CLASSES))
    preprocess = Preprocess.from_dict(values)
    device = torch.device("cpu")
    precision = choose_precision("auto", device)
    batch_size = choose_batch_size(device)
    predictor = BatchPredictor(
        model.eval(), preprocess, len(FOUR_CLASSES), batch_size, device, precision
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in FOUR_CLASSES:
            files = sorted((photos / "train" / name).iterdir())[: count // len(FOUR_CLASSES)]
            link_files(files, folder / "photos" / name)
        dataset = open_dataset("folder", root=str(folder / "photos")).split("all")
        # they come into the page cache, too
        pixels = [preprocess.to_uint8(dataset.image(index)) for index in range(len(dataset))]
        images = preprocess.normalize(torch.from_numpy(np.stack(pixels)))

        @torch.inference_mode()
        def run_bare() -> None:
            with autocast(device, precision):
                for batch in images.split(batch_size):
                    model(batch)

        def run_features() -> None:
            with tempfile.TemporaryDirectory() as cache:
                compute_features(predictor, dataset, cache_dir=Path(cache))

        ways = {"bare": run_bare, "features": run_features}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        # the first round warms up
        for number in range(1 + FEATURE_ROUNDS):
            for name, run in ways.items():
                start = time.perf_counter()
                run()
                if number:
                    rates[name].append(len(dataset) / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "images": len(dataset),
        "precision": precision,
        "images_per_second": {name: round(rate, 1) for name, rate in medians.items()},
        "ratio": round(medians["features"] / medians["bare"], 3),
        "rounds": rates,
    }


def count_processor_seconds() -> float:
    """Of all processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_plan(log: str) -> dict[str, str]:
    """The rows of `PLAN_ROWS` in what `vit train` printed, and what it said of the probe."""
    rows = {}
    for line in log.splitlines():
        name, *text = re.split(r"\s{2,}", line.strip(), maxsplit=1)
        if name in PLAN_ROWS and text:
            rows[name] = " ".join(text[0].split())
        elif line.startswith("the probe's top-1"):
            rows["validation of the probe"] = line.strip()
    return rows


def read_probe(plan: Mapping[str, str]) -> dict[str, float]:
    """Accuracies of the probe, 0 to 1, and the seconds of the pass through the weights and of the
    regressions."""
    probe: dict[str, float] = {}
    if found := PROBE_PATTERN.search(plan.get("probe", "")):
        probe = {name: float(text) for name, text in found.groupdict().items() if text}
    if "cross_validated_top1" in probe:
        probe["cross_validated_top1"] /= 100
    if found := re.search(r"images is ([\d.]+)%", plan.get("validation of the probe", "")):
        probe["validation_top1"] = float(found[1]) / 100
    return probe


def summarise(cells: Mapping[str, Cell]) -> dict[str, dict[str, dict[str, Any]]]:
    """Set → way → mean and standard deviation of top-1, macro F1 and seconds over the seeds; and by
    how much each way is better than the probe alone, seed by seed."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for key in cells:
        set_name, way, _ = key.split(" | ")
        start = f"{set_name} | {way} |"
        keys = [name for name in cells if name.startswith(start)]
        values: dict[str, Any] = {"seeds": len(keys)}
        for name in ("top1", "macro_f1", "seconds"):
            numbers = [cells[key][name] for key in keys]
            spread = statistics.stdev(numbers) if len(numbers) > 1 else None
            values[name] = {"mean": statistics.mean(numbers), "standard_deviation": spread}
        if way != "probe alone":
            probes = {key: cells.get(key.replace(f"| {way} |", "| probe alone |")) for key in keys}
            values["over_probe"] = [
                cells[key]["top1"] - probe["top1"] for key, probe in probes.items() if probe
            ]
        summary.setdefault(set_name, {})[way] = values
    return summary


def build_table(result: Mapping[str, Any]) -> str:
    """Top-1 on the unseen images, a row a set; then what the probe alone takes."""
    lines = [
        f"| training images | minutes | {' | '.join(WAYS)} |",
        f"|---|---|{'---|' * len(WAYS)}",
    ]
    cells = result["cells"]
    for set_name, ways in result["summary"].items():
        # those of all its cells
        minutes = next(
            cell["minutes"] for key, cell in cells.items() if key.startswith(f"{set_name} |")
        )
        texts = []
        for way in WAYS:
            text = "–"
            if way in ways:
                top1 = ways[way]["top1"]
                spread = top1["standard_deviation"]
                text = f"{100 * top1['mean']:.1f}"
                text += "" if spread is None else f" ± {100 * spread:.1f}"
                text += f" % ({ways[way]['seconds']['mean']:.0f} s, n={ways[way]['seeds']})"
            texts.append(text)
        lines.append(f"| {set_name} | {minutes:g} | {' | '.join(texts)} |")
    num_unseen = {cell["unseen_images"] for cell in cells.values()}
    machine = result["machine"]
    lines += [
        "",
        f"{result['weights']}; {machine['device']}, commit {machine['commit']};"
        f" {min(num_unseen)} unseen images. {_describe_feature_pass(result)}",
        "",
        *_build_probe_lines(cells),
    ]
    return "\n".join(lines)


def _describe_feature_pass(result: Mapping[str, Any]) -> str:
    measured = result.get("feature_pass")
    if measured is None:
        return ""
    rates = measured["images_per_second"]
    return (
        f"The pass for features takes {rates['features']:.0f} images a second from files,"
        f" {measured['ratio']:.0%} of forward passes alone ({rates['bare']:.0f};"
        f" {measured['images']} images, {measured['precision']})."
    )


def _build_probe_lines(cells: Mapping[str, Cell]) -> list[str]:
    lines = [
        "| probe alone, seed | unseen images | cross-validated | validation"
        " | pass through the weights, s | regressions, s | all from start to end, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, cell in cells.items():
        set_name, way, seed = key.split(" | ")
        if way != "probe alone":
            continue
        probe = cell["probe"]
        accuracies = [
            f"{100 * value:.1f} %" if value is not None else "–"
            for value in (
                cell["top1"],
                probe.get("cross_validated_top1"),
                probe.get("validation_top1"),
            )
        ]
        seconds = [
            f"{value:.0f}" if value is not None else "–"
            for value in (probe.get("feature_seconds"), probe.get("fit_seconds"), cell["seconds"])
        ]
        lines.append(f"| {set_name}, {seed} | {' | '.join([*accuracies, *seconds])} |")
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="as of vit train --init")
    parser.add_argument("--weights-name", required=True, help="in the result")
    parser.add_argument("--photos", type=Path, help="Imagenette, as class folders")
    parser.add_argument("--small-images", type=Path, help="CIFAR-10, as class folders")
    parser.add_argument("--minutes", type=float, help="of every cell; by default each set's own")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--ways", nargs="+", choices=VIT_WAYS, default=list(VIT_WAYS))
    parser.add_argument("--continue", dest="continues", action="store_true")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="minutes of the whole")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument("overrides", nargs="*", help="key.path=value, of every run")
    return parser.parse_intermixed_args()


def order_cells(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Set, way and seed of every cell, the most telling first."""
    cells = [
        (set_name, way, seed)
        for seed in range(options.seeds)
        for set_name in options.sets
        for way in options.ways
    ]
    return sorted(cells, key=lambda cell: (cell[2] > 0, cell[1] not in TELLING_WAYS))


def main() -> None:
    options = parse_arguments()
    started_at = time.perf_counter()
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
        result |= {
            key: earlier[key] for key in ("cells", "summary", "feature_pass") if key in earlier
        }
    if "feature_pass" not in result and options.photos is not None:
        result["feature_pass"] = measure_feature_pass(options.weights, options.photos)
        print(_describe_feature_pass(result), flush=True)

    for set_name, way, seed in order_cells(options):
        key = f"{set_name} | {way} | {seed}"
        image_set = SETS[set_name]
        source = options.small_images if image_set.is_small else options.photos
        if key in result["cells"] or source is None:
            continue
        minutes = options.minutes or image_set.minutes
        minutes_left = options.time_limit - (time.perf_counter() - started_at) / 60
        # the probe alone doesn't take its minutes
        if minutes_left < (1 if way == "probe alone" else minutes):
            print(f"left out, for want of time: {key}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "photos"
            draw_images(image_set, source, data, seed=seed)
            cell = run_cell(way, data, options, minutes=minutes, seed=seed)
        result["cells"][key] = cell | {"commit": describe_conditions("cpu")["commit"]}
        result["summary"] = summarise(result["cells"])
        path = write_result(options.output, NAME, result)
        print(f"{key}: {cell['top1']:.1%} ({cell['seconds']:.0f} s) {path}", flush=True)
    print(build_table(result))


if __name__ == "__main__":
    main()
