"""How much memory a step of ViT-B/16 at 224 takes, and what recomputing activations and
micro-batches save.

    python research/train_memory.py ROOT --output benchmarks/results

ROOT is an image folder with a train/ split. Every variant is a process of `vit train` that takes
two steps of 64 images with AdamW and an average of the weights; a result is the largest size its
resident memory had. The loss is high, the second step follows one at the full learning rate; the
variants have to agree on it, no more.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result
from rich.console import Console
from rich.table import Table

CLASSES, IMAGES_OF_A_CLASS, BATCH_SIZE = 4, 40, 64
LIMIT_GIB = 16
SETTINGS = {
    "batch at once": ["train.grad_accum_steps=1"],
    "16 micro-batches": ["train.grad_accum_steps=16"],
    "recomputed activations": ["train.grad_accum_steps=1", "train.grad_checkpointing=true"],
    "both": ["train.grad_accum_steps=16", "train.grad_checkpointing=true"],
}


def take_images(root: Path, folder: Path) -> None:
    """A few classes of `root`, as links."""
    for of_class in islice(sorted((root / "train").iterdir()), CLASSES):
        (folder / "train" / of_class.name).mkdir(parents=True)
        for path in islice(sorted(of_class.iterdir()), IMAGES_OF_A_CLASS):
            (folder / "train" / of_class.name / path.name).symlink_to(path.resolve())


def measure(data: Path, run: Path, settings: list[str]) -> dict[str, Any]:
    recipe = data / "recipe.yaml"
    recipe.touch()
    command = [
        sys.executable,
        "-m",
        "vit",
        "train",
        str(recipe),
        "data.name=folder",
        f"data.root={data}",
    ]
    command += [
        "data.image_size=224",
        f"data.cache_dir={data / 'cache'}",
        "model.preset=vit_base_patch16_224",
    ]
    command += ["optimizer.name=adamw", "train.ema_decay=0.999", f"train.batch_size={BATCH_SIZE}"]
    command += ["train.max_steps=2", "train.compile=false", *settings]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, "--output", str(run)], stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode:
            raise SystemExit(f"vit train failed: {said.read()}")
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {
        "peak_memory_gib": round(used.ru_maxrss / 2**20, 2),
        "images_per_second": round(logged["images_per_second"], 2),
        "train_loss": logged["train_loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, help="an image folder with a train/ split")
    parser.add_argument("--output", type=Path, help="folder for train-memory-<machine>.json")
    arguments = parser.parse_args()
    table = Table("ViT-B/16 at 224, batch of 64", "peak memory (GiB)", "images/s", "loss")
    variants = {}
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "images"
        take_images(arguments.root, data)
        for number, (name, settings) in enumerate(SETTINGS.items()):
            variants[name] = of_variant = measure(data, Path(temporary) / f"run-{number}", settings)
            cells = [
                f"{of_variant[key]:.4g}"
                for key in ("peak_memory_gib", "images_per_second", "train_loss")
            ]
            table.add_row(name, *cells)
    Console().print(table)
    result = {
        "machine": describe_conditions("cpu"),
        "batch_size": BATCH_SIZE,
        "image_size": 224,
        "variants": variants,
        "fits_16_gib": {
            name: of_variant["peak_memory_gib"] < LIMIT_GIB for name, of_variant in variants.items()
        },
    }
    if arguments.output:
        print(write_result(arguments.output, "train-memory", result))


if __name__ == "__main__":
    main()
