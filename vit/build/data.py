"""Config → the images of a run: data set, decoded splits, normalisation, loaders."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from vit.config import Config
from vit.data.augment import Augment
from vit.data.cache import DecodedDataset
from vit.data.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vit.data.loaders import ResidentLoader, WorkerLoader, choose_pipeline
from vit.data.open import ImageDataset, open_dataset
from vit.runtime.arguments import as_pair
from vit.runtime.processes import Process

Loader = ResidentLoader | WorkerLoader
_MEASURED_IMAGES = 10_000  # mean and standard deviation come from at most so many


@dataclass(frozen=True)
class Data:
    """The images of a run, decoded or scanned once."""

    train: DecodedDataset
    validation: DecodedDataset | None
    split_descriptions: list[str]  # what the test and validation splits are made of
    preprocess: Preprocess
    pipeline: Literal["resident", "workers"]
    pipeline_reason: str

    def describe(self) -> dict[str, Any]:
        """What the model file says of the data."""
        splits = {"train": self.train}
        if self.validation is not None:
            splits["validation"] = self.validation
        return {
            "name": self.train.name,
            "fingerprint": self.train.fingerprint,
            "splits": {
                split: {"num_images": len(dataset), "fingerprint": dataset.fingerprint}
                for split, dataset in splits.items()
            },
            "unreadable": sum(len(dataset.unreadable) for dataset in splits.values()),
            "notes": list(self.train.notes),
        }


def build_dataset(config: Config) -> ImageDataset:
    """The data set of the configuration, found but not decoded."""
    keys = {"name", "root", "classes", "validation_fraction", "split_seed", "cache_dir"}
    return open_dataset(**config.data.model_dump(include=keys))


def build_data(
    config: Config, dataset: ImageDataset, *, device: torch.device, pretrained: Preprocess | None = None
) -> Data:
    """Decode the training and validation images. The test images are not touched.

    The images are scaled, cropped and normalised as `pretrained`, the preprocessing of pretrained weights,
    says, but for what the configuration names itself.
    """
    data = config.data
    size = as_pair(data.image_size, name="data.image_size")
    preprocess = replace(pretrained or Preprocess(size), image_size=size)
    if data.crop_pct is not None:
        preprocess = replace(preprocess, crop_pct=data.crop_pct)
    splits = ("train", "validation") if data.validation_fraction > 0 else ("train",)
    height, width = preprocess.resize_size
    num_bytes = sum(len(dataset.split(split)) for split in splits) * height * width * 3
    pipeline, reason = (
        choose_pipeline(num_bytes, device=device, fraction=data.memory_fraction)
        if data.pipeline == "auto"
        else (data.pipeline, "data.pipeline says so")
    )
    decoded = {
        split: dataset.decode(
            split,
            preprocess if pipeline == "resident" or split == "validation" else None,
            workers=data.workers,
            max_unreadable_fraction=data.max_unreadable_fraction,
        )
        for split in splits
    }
    mean, std = (
        _measure_normalization(decoded["train"].images) if pretrained is None else (preprocess.mean, preprocess.std)
    )
    return Data(
        train=decoded["train"],
        validation=decoded.get("validation"),
        split_descriptions=dataset.describe_splits(),
        preprocess=replace(preprocess, mean=data.mean or mean, std=data.std or std),
        pipeline=pipeline,
        pipeline_reason=reason,
    )


def build_train_loader(config: Config, data: Data, *, device: torch.device, process: Process) -> Loader:
    """Augmented training batches."""
    # of a set smaller than the batch, all images that divide into pairs for every process
    multiple = 2 * process.world_size
    shared: dict[str, Any] = {
        "batch_size": min(config.train.batch_size, len(data.train) // multiple * multiple),
        "preprocess": data.preprocess,
        "augment": Augment(**config.augment.model_dump()),
        "device": device,
        "seed": config.train.seed,
        "num_classes": len(data.train.class_names),
        "rank": process.rank,
        "world_size": process.world_size,
    }
    if data.pipeline == "resident":
        return ResidentLoader(data.train, **shared)
    return WorkerLoader(data.train, workers=config.data.workers, **shared)


def _measure_normalization(images: np.ndarray | None) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation of the training images; ImageNet's where they were only scanned."""
    if images is None:
        return IMAGENET_MEAN, IMAGENET_STD
    step = max(1, len(images) // _MEASURED_IMAGES)
    pixels = np.asarray(images[::step]).reshape(-1, 3)
    # exact sums of integers, so that the numbers don't depend on how numpy adds
    histogram = [np.bincount(pixels[:, channel], minlength=256) for channel in range(3)]
    means = [float(h @ np.arange(256)) / len(pixels) / 255 for h in histogram]
    squares = [float(h @ np.arange(256) ** 2) / len(pixels) / 255**2 for h in histogram]
    stds = [max((square - mean**2) ** 0.5, 1 / 255) for square, mean in zip(squares, means, strict=True)]
    return _rounded(means), _rounded(stds)


def _rounded(values: list[float]) -> tuple[float, float, float]:
    red, green, blue = (round(value, 4) for value in values)
    return red, green, blue
