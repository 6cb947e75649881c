"""Config → the images of a run: sources, decoded datasets, normalisation, loaders."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from vit.config import Config
from vit.data.augment import Augment
from vit.data.cache import DecodedDataset, decode_dataset
from vit.data.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vit.data.loaders import ResidentLoader, WorkerLoader, choose_pipeline
from vit.data.open import ImageSource, Split, load_source
from vit.runtime.arguments import as_pair
from vit.runtime.processes import Process

Loader = ResidentLoader | WorkerLoader
_MEASURED_IMAGES = 10_000  # mean and standard deviation come from at most so many


@dataclass(frozen=True)
class Data:
    """The images of a run, decoded or scanned once."""

    train: DecodedDataset
    validation: DecodedDataset | None
    sources: dict[Split, ImageSource]
    preprocess: Preprocess
    pipeline: Literal["resident", "workers"]
    pipeline_reason: str

    def describe(self) -> dict[str, Any]:
        """What travels in the model file."""
        datasets = {"train": self.train, "validation": self.validation}
        return {
            "name": self.train.name,
            "fingerprint": self.train.fingerprint,
            "splits": {
                split: {"num_images": len(dataset.labels), "fingerprint": dataset.fingerprint}
                for split, dataset in datasets.items()
                if dataset is not None
            },
            "unreadable": sum(
                len(dataset.unreadable) for dataset in datasets.values() if dataset is not None
            ),
            "notes": list(self.train.notes),
        }


def source_arguments(config: Config) -> dict[str, Any]:
    """What `load_source` takes, but for the split."""
    data = config.data
    return {
        "name": data.name,
        "root": data.root,
        "classes": data.classes,
        "validation_fraction": data.validation_fraction,
        "split_seed": data.split_seed,
    }


def build_data(config: Config, *, device: torch.device, pretrained: Preprocess | None = None) -> Data:
    """Find, split and decode the training and validation images. The test images are not touched."""
    data = config.data
    splits: tuple[Split, ...] = ("train", "validation") if data.validation_fraction > 0 else ("train",)
    sources = {split: load_source(**source_arguments(config), split=split) for split in splits}
    preprocess = Preprocess(
        image_size=as_pair(data.image_size, name="data.image_size"), crop_pct=data.crop_pct
    )
    height, width = preprocess.resize_size
    num_bytes = sum(map(len, sources.values())) * height * width * 3
    pipeline, reason = (
        choose_pipeline(num_bytes, device=device, fraction=data.memory_fraction)
        if data.pipeline == "auto"
        else (data.pipeline, "data.pipeline says so")
    )
    datasets = {
        split: decode_dataset(
            source,
            size=preprocess.resize_size if pipeline == "resident" or split == "validation" else None,
            cache_dir=data.cache_dir,
            workers=data.workers,
            max_unreadable_fraction=data.max_unreadable_fraction,
        )
        for split, source in sources.items()
    }
    mean, std = _normalization(config, datasets["train"], pretrained)
    return Data(
        train=datasets["train"],
        validation=datasets.get("validation"),
        sources=sources,
        preprocess=replace(preprocess, mean=mean, std=std),
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
        "augment": Augment(**config.augment.model_dump(exclude={"mix_until"})),
        "device": device,
        "seed": config.train.seed,
        "shuffle": True,
        "drop_last": True,
        "num_classes": len(data.train.class_names),
        "rank": process.rank,
        "world_size": process.world_size,
    }
    if data.pipeline == "resident":
        return ResidentLoader(data.train, **shared)
    return WorkerLoader(data.train, workers=config.data.workers, **shared)


def _normalization(
    config: Config, dataset: DecodedDataset, pretrained: Preprocess | None
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """The configured mean and standard deviation, the pretrained model's, or the training images' own."""
    if pretrained is not None:
        mean, std = pretrained.mean, pretrained.std
    elif dataset.images is None:
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    else:
        step = max(1, len(dataset.images) // _MEASURED_IMAGES)
        pixels = np.asarray(dataset.images[::step]).reshape(-1, 3)
        # exact sums of integers, so that the figures don't depend on how numpy adds
        histogram = [np.bincount(pixels[:, channel], minlength=256) for channel in range(3)]
        means = [float(h @ np.arange(256)) / len(pixels) / 255 for h in histogram]
        squares = [float(h @ np.arange(256) ** 2) / len(pixels) / 255**2 for h in histogram]
        stds = [max((square - mean**2) ** 0.5, 1 / 255) for square, mean in zip(squares, means, strict=True)]
        mean, std = _rounded(means), _rounded(stds)
    return config.data.mean or mean, config.data.std or std


def _rounded(values: list[float]) -> tuple[float, float, float]:
    red, green, blue = (round(value, 4) for value in values)
    return red, green, blue
