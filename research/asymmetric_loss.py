"""Losses for rare labels: average precision of binary cross-entropy, of weights, and of the asymmetric loss.

    PYTHONPATH=.:benchmarks:research python research/asymmetric_loss.py --cifar CIFAR --output benchmarks/results

Mosaics of 2 × 2 images of CIFAR-10 (folders train/ and test/ with one folder a class). Of the training mosaics 2 % each
have one of two rare labels, of the test mosaics 20 %, so that they can be measured.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from conditions import describe_conditions, write_result
from PIL import Image
from sklearn.metrics import average_precision_score

import vit

RARE = (3, 5)
BALANCES = ("none", "weights", "asymmetric")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    generator = np.random.default_rng(0)
    names = sorted(folder.name for folder in (arguments.cifar / "train").iterdir())
    train = build_mosaics(arguments.cifar / "train", names, 2000, rate=0.02, generator=generator)
    test = build_mosaics(arguments.cifar / "test", names, 1000, rate=0.2, generator=generator)
    runs: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        for balance in BALANCES:
            config = {
                "data": {"image_size": 64, "validation_fraction": 0.05},
                "model": {"patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3},
                "optimizer": {"lr": 1e-3},
                "train": {
                    "epochs": 14, "batch_size": 64, "device": "cpu", "seed": seed,
                    "class_balance": balance, "select_by": "loss", "evaluate_every_epochs": 14,
                },
            }  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                run = vit.train(config, dataset=train, class_names=names, output=f"{folder}/run")
                found = vit.evaluate(run.bundle, dataset=test).scores.probabilities
            precisions = average_precision_score(test[1], found, average=None)
            runs.append(
                {
                    "class_balance": balance,
                    "seed": seed,
                    "rare": float(precisions[list(RARE)].mean()),
                    "common": float(np.delete(precisions, RARE).mean()),
                }
            )
            print(runs[-1], flush=True)
    result = {"machine": describe_conditions("cpu"), "rare_labels": [names[i] for i in RARE], "runs": runs}
    write_result(arguments.output, "asymmetric-loss", result)


def build_mosaics(
    folder: Path, names: list[str], count: int, *, rate: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Build mosaics, uint8 [count, 64, 64, 3], and which labels each has, bool [count, 10]."""
    files = [sorted((folder / name).iterdir()) for name in names]
    common = [label for label in range(len(names)) if label not in RARE]
    pixels = np.zeros((count, 64, 64, 3), np.uint8)
    labels = np.zeros((count, len(names)), bool)
    for index in range(count):
        chosen = generator.choice(common, size=generator.integers(1, 4), replace=False).tolist()
        chosen += [label for label in RARE if generator.random() < rate]
        chosen = chosen[-4:]
        quarters = chosen + generator.choice(chosen, size=4 - len(chosen)).tolist()
        generator.shuffle(quarters)
        for place, label in enumerate(quarters):
            path = files[label][generator.integers(len(files[label]))]
            row, column = 32 * (place // 2), 32 * (place % 2)
            pixels[index, row : row + 32, column : column + 32] = np.asarray(Image.open(path).convert("RGB"))
        labels[index, quarters] = True
    return pixels, labels


if __name__ == "__main__":
    main()
