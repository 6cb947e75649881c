"""Measure what `vit train FOLDER` reaches without a recipe, with and without pretrained weights.

    python benchmarks/own_photos.py IMAGENETTE --weights WEIGHTS --seeds 3 --output benchmarks/results

IMAGENETTE holds train/<class>/* and val/<class>/*. Each seed draws its own photos of train/; accuracy is measured on
photos of val/ that are the same for all. Each run starts with an empty cache; seconds are those of the command.
"""

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conditions import describe_conditions, write_result
from scipy.stats import binomtest

import vit

NAME = "own-photos"
SETS = {"4 × 200": (4, 200, 5.0), "10 × 30": (10, 30, 2.0), "10 × 5": (10, 5, 1.0)}
SCRATCH = "from scratch"
WAYS = {SCRATCH: (), "pretrained": ("--init", "WEIGHTS")}
NUM_UNSEEN = 60  # of each class


def link_photos(source: Path, target: Path, *, seed: int, classes: int, count: int) -> None:
    """Link randomly drawn photos of the first classes into class folders."""
    for folder in sorted(path for path in source.iterdir() if path.is_dir())[:classes]:
        (target / folder.name).mkdir(parents=True)
        photos = sorted(folder.iterdir())
        for photo in random.Random(f"{seed} {folder.name}").sample(photos, min(count, len(photos))):
            (target / folder.name / photo.name).symlink_to(photo.resolve())


def train(photos: Path, unseen: Path, *, words: list[str], seed: int) -> dict[str, Any]:
    """Run the command, and return its seconds and its model's accuracy on the unseen photos."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "vit", "train", str(photos), *words]
        environment = os.environ | {"VIT_CACHE": f"{folder}/cache"}
        start = time.perf_counter()
        command += [f"train.seed={seed}", "--output", str(run)]
        subprocess.run(command, env=environment, check=True)
        seconds = time.perf_counter() - start
        predictions = vit.predict(run, unseen).predictions
    correct = [found.predicted == Path(found.path).parent.name for found in predictions]
    return {"seconds": round(seconds, 1), "top1": statistics.mean(correct), "images": len(correct)}


def run_set(name: str, imagenette: Path, *, words: list[str], seed: int) -> dict[str, Any]:
    """Draw the photos of a set, train on them and measure."""
    classes, count, minutes = SETS[name]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, unseen = imagenette / "train", imagenette / "val"
        link_photos(source, folder / "photos", seed=seed, classes=classes, count=count)
        link_photos(unseen, folder / "unseen", seed=0, classes=classes, count=NUM_UNSEEN)
        words = [*words, "--minutes", f"{minutes:g}"]
        return train(folder / "photos", folder / "unseen", words=words, seed=seed)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over the seeds, and the 95 % interval of the mean accuracy on these photos."""
    top1, images = statistics.mean(run["top1"] for run in runs), runs[0]["images"]
    interval = binomtest(round(top1 * images), images).proportion_ci()
    return {
        "seconds": statistics.mean(run["seconds"] for run in runs),
        "top1": top1,
        "interval": [interval.low, interval.high],
        "images": images,
        "seeds": len(runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("imagenette", type=Path)
    parser.add_argument("--weights", help="what --init takes; without them, only from scratch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {}
    result: dict[str, Any] = {"machine": describe_conditions("cpu"), "runs": runs}
    for seed in range(options.seeds):
        for name, way in itertools.product(options.sets, WAYS if options.weights else [SCRATCH]):
            words = [options.weights if word == "WEIGHTS" else word for word in WAYS[way]]
            found = run_set(name, options.imagenette, words=words, seed=seed)
            runs.setdefault(f"{name}, {way}", []).append({"seed": seed, **found})
            result["results"] = {title: summarise(seeds) for title, seeds in runs.items()}
            # after each run: the next one may be cut off
            print(name, way, found, write_result(options.output, NAME, result), flush=True)


if __name__ == "__main__":
    main()
