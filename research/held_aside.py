"""Thresholds of prediction sets from scores of epochs that the images did not choose, and from
scores of the model that is kept: which keep their promise?

    python research/held_aside.py --output benchmarks/results     # 5 minutes on one core

`vit train` takes the probability of each validation image at the epoch that the other half of them
would have chosen, and a new image is predicted by the epoch that all of them chose. Here a small
model of the digits is trained for some epochs. Validation images are drawn many times from those
that it was not trained on; each draw chooses an epoch and finds its thresholds in both ways, and
the coverage of the kept model is measured on all other images.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import describe_conditions, write_result
from sklearn.datasets import load_digits
from torch import nn

import vit
from vit.evaluation.metrics import Scores, score_logits
from vit.prediction.conformal import LEVELS, find_threshold
from vit.training.plan import NO_VALIDATION, SelectBy
from vit.training.validation import HeldAside, measure

NAME = "held_aside"
NUM_TRAINING = 500
COUNTS = (20, 50, 200)
SELECT_BY: tuple[SelectBy, ...] = ("top1", "loss")
RECIPE = [
    "data.image_size=8", "model.patch_size=2", "model.embed_dim=48", "model.depth=3",
    "model.num_heads=3", "optimizer.name=muon", "optimizer.lr=6e-3", "optimizer.muon_lr=0.02",
    "schedule.warmup_epochs=0.5", "train.batch_size=64", "train.device=cpu",
    "train.precision=float32",
]  # fmt: skip


class Record(vit.Observer):
    """Logits of all other images after each epoch."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels
        self.logits: list[np.ndarray] = []
        self.preprocess: Any = None

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        with torch.no_grad():
            images = self.preprocess.normalize(torch.from_numpy(self.pixels))
            self.logits.append(model(images).numpy())


def train(seed: int, epochs: int) -> list[Scores]:
    """Scores of the images that are not for training, after each epoch."""
    digits = load_digits()
    pixels = (digits.images[..., None].repeat(3, axis=-1) * 255 / 16).round().astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(pixels))
    training, others = order[:NUM_TRAINING], order[NUM_TRAINING:]
    record = Record(pixels[others])
    overrides = [*RECIPE, f"train.epochs={epochs}", f"train.seed={seed}"]
    overrides += ["data.validation_fraction=0.1"]
    with tempfile.TemporaryDirectory() as folder:
        # its preprocessing, which the observer needs
        first = vit.train(
            {}, output=Path(folder) / "first", dataset=(pixels[training], digits.target[training]),
            overrides=[*overrides[:-3], "train.epochs=1", *overrides[-2:]],
        )  # fmt: skip
        record.preprocess = first.bundle.preprocess
        vit.train(
            {}, output=Path(folder) / "run", dataset=(pixels[training], digits.target[training]),
            overrides=overrides, callbacks=[record],
        )  # fmt: skip
    labels = digits.target[others].astype(np.int64)
    return [score_logits(logits, labels) for logits in record.logits]


def draw(
    epochs: list[Scores], count: int, select_by: SelectBy, rng: np.random.Generator
) -> dict[tuple[str, float], float]:
    """Coverage of the kept model by way and level, for one draw of validation images."""
    chosen = np.zeros(len(epochs[0]), dtype=bool)
    chosen[rng.permutation(len(chosen))[:count]] = True
    digests = rng.integers(2**62, size=count, dtype=np.uint64)
    held_aside = HeldAside(select_by)
    best, kept = NO_VALIDATION, epochs[0]
    for scores in epochs:
        validation_scores = scores.subset(chosen)
        held_aside.update(validation_scores, np.zeros((count, 10), np.float32), digests)
        validation = measure(validation_scores)
        if validation.rank(select_by) > best.rank(select_by):
            best, kept = validation, scores
    new = kept.label_probability[~chosen]
    ways = {"held aside": held_aside.probabilities, "kept": kept.label_probability[chosen]}
    covered = {}
    for name, probabilities in ways.items():
        for level in LEVELS:
            threshold = find_threshold(probabilities, coverage=level)
            if threshold is not None:
                covered[name, level] = float((new >= threshold).mean())
    return covered


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=300, help="of each seed and setting")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, Any] = {
        "machine": describe_conditions("cpu"), **vars(options), "output": None, "rows": [],
    }  # fmt: skip
    runs = [train(seed, options.epochs) for seed in range(options.seeds)]
    for select_by in SELECT_BY:
        for count in COUNTS:
            rng = np.random.default_rng(0)
            draws = [
                draw(epochs, count, select_by, rng)
                for epochs in runs
                for _ in range(options.draws)
            ]
            for level in LEVELS:
                row: dict[str, Any] = {
                    "select_by": select_by,
                    "images": count,
                    "level": level,
                    # of an exact threshold
                    "expected": float(np.ceil(round((count + 1) * level, 9)) / (count + 1)),
                }
                for name in ("held aside", "kept"):
                    values = np.array([each[name, level] for each in draws])
                    row[name] = float(values.mean())
                    row[f"{name} error"] = float(values.std(ddof=1) / np.sqrt(len(values)))
                result["rows"].append(row)
                print(row, flush=True)
    result["top1"] = [[float(scores.correct.mean()) for scores in epochs] for epochs in runs]
    result["seconds"] = round(time.perf_counter() - start)
    if options.output:
        write_result(options.output, NAME, result)


if __name__ == "__main__":
    main()
