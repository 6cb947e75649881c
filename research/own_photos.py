"""`vit train PHOTOS` without a recipe: accuracy on held-out images and seconds, beside simple
references.

    python research/own_photos.py --imagenette IMAGENETTE --cifar10 CIFAR10 --output benchmarks/results

IMAGENETTE holds train/<wnid>/* and val/<wnid>/*, CIFAR10 train/<class>/* and test/<class>/*. Photos
are copied into plain class folders, the first ones of each class in sorted order. Seconds are of
the command, from process start to end, with an empty cache.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from conditions import describe_conditions, write_result
from study_tables import build_own_photos_table

import vit
from vit.config import load_config
from vit.data.open import open_dataset

NAME = "own-photos"
PHOTO_SETS = {
    "4 classes × 200 photos of Imagenette": (4, 200),
    "10 classes × 30 photos of Imagenette": (10, 30),
}
CIFAR10 = "CIFAR-10 (JPEG copy), 50,000 images"


def copy_photos(source: Path, target: Path, *, classes: int, count: int) -> Path:
    """`count` photos of each of the first `classes` classes, or all where there are fewer."""
    for folder in sorted(entry for entry in source.iterdir() if entry.is_dir())[:classes]:
        (target / folder.name).mkdir(parents=True)
        for photo in sorted(folder.iterdir())[:count]:
            shutil.copy(photo, target / folder.name)
    return target


def train(arguments: Sequence[str | Path], output: Path) -> dict[str, Any]:
    """One run of the command with an empty cache, and the accuracy of its model on the test
    split."""
    command = [sys.executable, "-m", "vit", "train", *map(str, arguments), "--output", str(output)]
    started = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        env=os.environ | {"VIT_CACHE": str(output.parent / f"{output.name}-cache")},
    )
    seconds = time.perf_counter() - started
    return {
        "seconds": round(seconds, 1),
        **evaluate(output),
        "config": (output / "config.yaml").read_text(),
    }


def evaluate(run: Path, **images: Any) -> dict[str, Any]:
    """Top-1 and its 95 % interval."""
    found = vit.evaluate(run, num_examples=0, **images).evaluation
    return {
        "top1": found.top1,
        "interval": list(found.intervals["top1"]),
        "images": found.num_images,
    }


def measure_nearest_mean(root: Path) -> float:
    """Test top-1 of the nearest class mean of pixels, at 64 × 64 px, on the split that `vit train`
    makes."""
    dataset, pixels, labels = open_dataset("folder", root=root), {}, {}
    for split in ("train", "test"):
        source = dataset.split(split)
        photos = (
            source.image(index).convert("RGB").resize((64, 64)) for index in range(len(source))
        )
        pixels[split], labels[split] = (
            np.stack([np.asarray(p, np.float32).ravel() for p in photos]),
            source.labels,
        )
    means = np.stack(
        [
            pixels["train"][labels["train"] == label].mean(axis=0)
            for label in np.unique(labels["train"])
        ]
    )
    distances = ((pixels["test"][:, None] - means) ** 2).sum(axis=2)
    return float((distances.argmin(axis=1) == labels["test"]).mean())


def measure(imagenette: Path | None, cifar10: Path | None, folder: Path) -> dict[str, Any]:
    """By data: the run without a recipe, and what it is compared with."""
    results: dict[str, Any] = {}
    for number, (name, (classes, count)) in enumerate(PHOTO_SETS.items() if imagenette else ()):
        assert imagenette
        photos = copy_photos(
            imagenette / "train", folder / f"photos-{number}", classes=classes, count=count
        )
        unseen = copy_photos(
            imagenette / "val", folder / f"unseen-{number}", classes=classes, count=10_000
        )
        results[name] = train([photos], folder / f"run-{number}")
        results[name]["val folder"] = evaluate(folder / f"run-{number}", data=unseen)
        results[name]["references"] = {
            "nearest class mean of pixels": {"top1": measure_nearest_mean(photos)}
        }
    if cifar10:
        results[CIFAR10] = train([cifar10], folder / "cifar10")
        epochs = load_config(
            folder / "cifar10" / "config.yaml"
        ).train.epochs  # the minutes hold on this machine
        recipe = [
            "cifar10/cpu",
            "data.name=folder",
            f"data.root={cifar10}",
            f"train.epochs={epochs}",
        ]
        name = f"recipe cifar10/cpu, {epochs} epochs"
        results[CIFAR10]["references"] = {name: train(recipe, folder / "cifar10-recipe")}
    return results


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--imagenette", type=Path)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    machine = describe_conditions("cpu")
    with TemporaryDirectory() as folder:
        result = {
            "machine": machine,
            "results": measure(options.imagenette, options.cifar10, Path(folder)),
        }
    print(build_own_photos_table(result))
    print(write_result(options.output, NAME, result))


if __name__ == "__main__":
    main()
