"""Training in float16 with a loss scale beside bfloat16 and float32: CIFAR-10, two epochs on a CPU.

    python research/float16_training.py ROOT --seeds 3 --output benchmarks/results

ROOT holds CIFAR-10 as train/<class>/* and test/<class>/*, of which each class's first 60 and 40 images
are taken. The recipe is cifar10/cpu with a narrow model of three blocks and batches of 20. Runs of one seed
see the same batches with the same augmentation from the same weights.
"""

import argparse
import csv
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result

import vit

RECIPE = "cifar10/cpu"
NUM_IMAGES = {"train": 60, "test": 40}  # of a class
OVERRIDES = [
    "data.name=folder",
    "data.allow_outside=true",
    "data.validation_fraction=0",
    "model.embed_dim=64",
    "model.depth=3",
    "model.num_heads=1",
    "schedule.warmup_epochs=0.2",
    "train.batch_size=20",
    "train.compile=false",
    "train.device=cpu",
    "train.epochs=2",
]
PRECISIONS = ("float32", "bfloat16", "float16")


def write_table(root: Path, table: Path) -> None:
    """The images as a CSV file."""
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "split"])
        for split, count in NUM_IMAGES.items():
            for folder in sorted((root / split).iterdir()):
                images = sorted(folder.iterdir())[:count]
                rows.writerows([path, folder.name, split] for path in images)


def measure(table: Path, precision: str, *, seed: int, directory: Path) -> dict[str, Any]:
    """A run's losses by epoch, and its evaluation on the test images in float32."""
    more = [f"data.root={table}", f"train.precision={precision}", f"train.seed={seed}"]
    output = directory / f"{precision}-{seed}"
    run = vit.train(RECIPE, output=output, overrides=[*OVERRIDES, *more])
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    options: Any = {"num_examples": 0, "precision": "float32", "device": "cpu"}
    evaluation = vit.evaluate(run.bundle, **options).evaluation
    return {
        "seed": seed,
        "train_losses": [round(line["train_loss"], 4) for line in lines],
        "skipped_steps": lines[-1]["skipped_steps"],
        "test_loss": round(evaluation.loss, 4),
        "test_top1": evaluation.top1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {precision: [] for precision in PRECISIONS}
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "photos.csv"
        write_table(arguments.root.absolute(), table)
        for seed in range(arguments.seeds):
            for precision in PRECISIONS:
                run = measure(table, precision, seed=seed, directory=Path(folder))
                runs[precision].append(run)
                print(precision, run, flush=True)
    means = {
        precision: {
            name: [
                statistics.mean(run[name] for run in found),
                statistics.stdev(run[name] for run in found),
            ]
            for name in ("test_loss", "test_top1")
        }
        for precision, found in runs.items()
    }
    result = {
        "machine": describe_conditions("cpu"),
        "recipe": RECIPE,
        "overrides": OVERRIDES,
        "images_a_class": NUM_IMAGES,
        "mean_and_sd": means,
        "runs": runs,
    }
    print(means)
    print(write_result(arguments.output, "float16-cifar10", result))


if __name__ == "__main__":
    main()
