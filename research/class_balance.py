"""What balanced classes are worth: macro F1 on CIFAR-10's test images after training on classes of
20:1.

    python research/class_balance.py ROOT --seeds 3 --output benchmarks/results

ROOT holds CIFAR-10 as train/<class>/* and test/<class>/*. Of class number i the first 2,000 ·
20^(-i/9) training images are used (2,000 of the first class, 100 of the last), and all test images,
which are balanced. The recipe is cifar10/cpu with smaller batches and 20 epochs; the model is
chosen by macro F1 on the validation images, which are as imbalanced as the training images.
"""

import argparse
import csv
import statistics
import tempfile
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result
from study_tables import build_class_balance_table

import vit

LARGEST, RATIO = 2000, 20
RECIPE = "cifar10/cpu"
OVERRIDES = [
    "train.batch_size=128",
    "train.epochs=20",
    "train.select_by=macro_f1",
    "data.name=folder",
]
CHOICES = ("none", "weights", "sampler")
METRICS = ("macro_f1", "top1", "macro_precision")


def write_table(root: Path, table: Path) -> dict[str, int]:
    """The images as a CSV file; how many training images a class has."""
    classes = sorted(entry.name for entry in (root / "train").iterdir())
    counts = {
        name: round(LARGEST * RATIO ** (-i / (len(classes) - 1))) for i, name in enumerate(classes)
    }
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "split"])
        for split in ("train", "test"):
            for name in classes:
                images = sorted((root / split / name).iterdir())
                rows.writerows(
                    [path, name, split]
                    for path in images[: counts[name] if split == "train" else None]
                )
    return counts


def measure(table: Path, choice: str, *, seed: int, directory: Path) -> dict[str, Any]:
    """One run and its evaluation on the test images."""
    more = [f"data.root={table}", f"train.class_balance={choice}", f"train.seed={seed}"]
    run = vit.train(RECIPE, output=directory / f"{choice}-{seed}", overrides=[*OVERRIDES, *more])
    evaluation = vit.evaluate(run.bundle, num_examples=0).evaluation
    recall = {entry.name: round(entry.recall, 4) for entry in evaluation.per_class}
    return {
        "seed": seed,
        "seconds": round(run.seconds, 1),
        **{m: getattr(evaluation, m) for m in METRICS},
        "recall": recall,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    machine = describe_conditions("cpu")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "photos.csv"
        images = write_table(arguments.root.absolute(), table)
        runs = {
            choice: [
                measure(table, choice, seed=seed, directory=Path(folder))
                for seed in range(arguments.seeds)
            ]
            for choice in CHOICES
        }
    means = {
        choice: {m: statistics.mean(run[m] for run in found) for m in METRICS}
        for choice, found in runs.items()
    }
    result = {
        "recipe": RECIPE,
        "overrides": OVERRIDES,
        "images": images,
        "mean": means,
        "runs": runs,
    }
    print(build_class_balance_table(result))
    print(write_result(arguments.output, "class-balance-cifar10", {"machine": machine, **result}))


if __name__ == "__main__":
    main()
