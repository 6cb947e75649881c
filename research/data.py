"""Time the data path alone: the ways a training image reaches the model, beside torchvision's.

    python research/data.py ROOT --image-size 32 --output benchmarks/results

ROOT is an image folder with a train/ split. Variants take turns round by round, each in an epoch of
its own; a result is the median over the rounds. The dataset is built in an empty cache; its files
are in the page cache.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from itertools import islice
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from vit.config import AugmentConfig
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.loader import TrainLoader
from vit.data.open import open_dataset
from vit.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

WORKERS = 2


def recipes(size: int) -> dict[str, AugmentConfig]:
    return {
        "nothing": AugmentConfig(),
        "crop, flip, cutout": AugmentConfig(
            crop_padding=size // 8, flip="random", cutout=size // 4
        ),
        "resized crop, flip": AugmentConfig(resized_crop_scale=(0.35, 1.0), flip="random"),
        "colour jitter": AugmentConfig(color_jitter=0.4),
        "RandAugment(2, 9)": AugmentConfig(rand_augment=(2, 9)),
        "mixup, cutmix": AugmentConfig(mixup=0.8, cutmix=1.0),
    }


def torchvision_batches(root: Path, size: int, batch_size: int) -> Generator[Any, None, None]:
    """The usual loader: a data set of files, per-image transforms in two workers."""
    steps = [
        transforms.RandomResizedCrop(size, scale=(0.35, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    images = ImageFolder(root / "train", transforms.Compose(steps))
    yield from DataLoader(images, batch_size, shuffle=True, num_workers=WORKERS)


def worker_batches(
    dataset: ImageDataset, epoch: int, options: dict[str, Any], augment: AugmentConfig
) -> Generator[Any, None, None]:
    loader = TrainLoader(dataset, augment=augment, workers=WORKERS, **options)
    try:
        yield from loader.epoch(epoch)
    finally:
        loader.close()  # or they would decode ahead while the next variant is timed


def images_per_second(batches: Generator[Any, None, None], steps: int, batch_size: int) -> float:
    """The first batches, which wait for workers to start or were decoded meanwhile, are not
    counted."""
    for _ in range(2 * WORKERS + 1):
        next(batches)
    start = time.perf_counter()
    done = sum(1 for _ in islice(batches, steps))
    rate = done * batch_size / (time.perf_counter() - start)
    batches.close()
    return rate


def measure(root: Path, *, size: int, batch_size: int, steps: int, rounds: int) -> dict[str, float]:
    """Images a second of each variant."""
    preprocess = Preprocess((size, size))
    with tempfile.TemporaryDirectory() as cache:
        source = open_dataset("folder", root=root).split("train")
        for path in source.ids:
            (root / path).read_bytes()
        start = time.perf_counter()
        dataset = decode_dataset(
            source, size=(size, size), cache_dir=Path(cache), workers=WORKERS, progress=False
        )
        built = {
            f"dataset built by {WORKERS} processes": len(dataset) / (time.perf_counter() - start)
        }
        variants = build_variants(root, dataset, preprocess, batch_size)
        timings: dict[str, list[float]] = {name: [] for name in variants}
        for epoch in range(rounds):
            for name, batches in variants.items():
                timings[name].append(images_per_second(batches(epoch), steps, batch_size))
    return built | {name: statistics.median(values) for name, values in timings.items()}


def build_variants(
    root: Path, dataset: ImageDataset, preprocess: Preprocess, batch_size: int
) -> dict[str, Callable[[int], Any]]:
    """Name → the batches of an epoch."""
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": 0,
        "device": "cpu",
        "preprocess": preprocess,
    }
    size = preprocess.image_size[0]
    crop = recipes(size)["resized crop, flip"]
    variants: dict[str, Callable[[int], Any]] = {
        f"torchvision, {WORKERS} workers": lambda _: torchvision_batches(root, size, batch_size),
        f"worker loader, {WORKERS} workers": lambda epoch: worker_batches(
            dataset, epoch, options, crop
        ),
    }
    for name, augment in recipes(size).items():
        variants[f"resident: {name}"] = TrainLoader(dataset, augment=augment, **options).epoch
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rates = measure(
        options.root,
        size=options.image_size,
        batch_size=options.batch_size,
        steps=options.steps,
        rounds=options.rounds,
    )
    machine = describe_conditions("cpu")
    table = Table(
        "path", "images/s", "ms a batch", title=", ".join(f"{k} {v}" for k, v in machine.items())
    )
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.0f}", f"{1e3 * options.batch_size / rate:.2f}")
    Console().print(table)
    if options.output is not None:
        result = {
            "machine": machine,
            "image_size": options.image_size,
            "batch_size": options.batch_size,
        }
        write_result(
            options.output, f"data-{options.image_size}px", result | {"images_per_second": rates}
        )


if __name__ == "__main__":
    main()
