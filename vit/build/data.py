"""Config → the images of a run: data set, decoded splits, normalisation, loaders."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from vit.config import Config
from vit.data.augment import Augment
from vit.data.balance import ClassBalance, choose_class_balance
from vit.data.dataset import DecodedDataset
from vit.data.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vit.data.listed import ListedDataset
from vit.data.loaders import Pipeline, ResidentLoader, WorkerLoader, choose_pipeline
from vit.data.open import ImageDataset, open_dataset
from vit.data.sets.given import GIVEN, find_given
from vit.data.sets.source import StoredReader
from vit.data.transforms import Transform, apply_transform
from vit.runtime.arguments import as_pair
from vit.runtime.files import default_cache_dir
from vit.runtime.processes import Process
from vit.training.observers import Observer

Loader = ResidentLoader | WorkerLoader
_MEASURED_IMAGES = 10_000  # mean and standard deviation come from at most so many
_SAMPLED_IMAGES = 256  # or so many, where images are decoded for it alone


@dataclass(frozen=True, kw_only=True, eq=False)
class Given:
    """What a program gives beside the configuration, see `vit.train`; or the data set, which is open already."""

    transform: Transform | None = None
    dataset: Any = None
    class_names: Sequence[str] | None = None
    model: nn.Module | None = None
    callbacks: Sequence[Observer] = ()

    @property
    def overrides(self) -> list[str]:
        """What the configuration says of it."""
        of_data = [] if self.dataset is None else [f"data.name={GIVEN}", "data.root=null", "data.classes=null"]
        return of_data + ([] if self.model is None else [f"model.init={GIVEN}"])

    def describe(self) -> dict[str, str]:
        """What tells this run from others; the images have a fingerprint."""
        transform = " ".join(re.sub(" at 0x[0-9a-f]+", "", repr(self.transform)).split())
        found = {} if self.transform is None else {"given.transform": transform}
        return found | ({} if self.model is None else {"given.model": type(self.model).__qualname__})


NOTHING_GIVEN = Given()


@dataclass(frozen=True)
class Data:
    """The images of a run: decoded, or listed where they don't fit memory."""

    train: DecodedDataset
    validation: DecodedDataset | None
    decode_validation: Callable[[], DecodedDataset]  # those, decoded when they are first needed
    split_descriptions: list[str]  # what the test and validation splits are made of
    preprocess: Preprocess
    pipeline: Pipeline
    pipeline_reason: str
    class_names: dict[str, str]  # class → the name that data.class_names gives it
    class_balance: ClassBalance
    class_balance_reason: str
    dataset: ImageDataset  # that they are splits of

    def describe(self) -> dict[str, Any]:
        """What the model file says of the data."""
        train = self.train.completed()
        datasets = [train] if self.validation is None else [train, self.decode_validation()]
        sizes = [{"num_images": len(dataset), "fingerprint": dataset.fingerprint} for dataset in datasets]
        return {
            "name": train.name,
            "fingerprint": train.fingerprint,
            "splits": dict(zip(("train", "validation"), sizes, strict=False)),
            "unreadable": sum(len(dataset.unreadable) for dataset in datasets),
            "notes": [*train.notes, *self._describe_progress()],
        }

    def _describe_progress(self) -> Iterator[str]:
        if isinstance(train := self.train.completed(), ListedDataset):
            known = f"{np.count_nonzero(train.state):,} of {len(train):,} training images"
            yield f"the run ended in its first epoch with {known} seen; duplicates of the others are not found"


def build_dataset(config: Config, given: Given = NOTHING_GIVEN) -> ImageDataset:
    """The data set of the configuration, or the one that was given, found but not decoded."""
    if isinstance(given.dataset, ImageDataset):
        return given.dataset
    if given.dataset is not None:
        found, cache_dir = find_given(given.dataset, given.class_names), config.data.cache_dir or default_cache_dir()
        splitting = (config.data.validation_fraction, config.data.split_seed)
        return ImageDataset(GIVEN, found, *splitting, cache_dir, test_fraction=0.0)
    keys = {"name", "root", "classes", "class_names", "validation_fraction", "split_seed", "cache_dir"}
    keys |= {"remote_cache_gb"}
    return open_dataset(**config.data.model_dump(include=keys))


def build_data(
    config: Config,
    dataset: ImageDataset,
    *,
    device: torch.device,
    pretrained: Preprocess | None = None,
    process: Process | None = None,
    was_listed: bool | None = None,
) -> Data:
    """Decode the training and validation images, or list them where they don't fit memory; the test images are not
    touched.

    `pretrained`, the preprocessing of pretrained weights, holds but for what the configuration names itself. A run that
    goes on goes on as it began: `was_listed`, or with every image decoded once.
    """
    data, size = config.data, as_pair(config.data.image_size, name="data.image_size")
    preprocess = replace(pretrained or Preprocess(size), image_size=size)
    if data.crop_pct is not None:
        preprocess = replace(preprocess, crop_pct=data.crop_pct)
    splits = ("train", "validation") if data.validation_fraction > 0 else ("train",)
    num_bytes = sum(len(dataset.split(split)) for split in splits) * math.prod(preprocess.resize_size) * 3
    pipeline: Pipeline
    if data.pipeline == "auto" and dataset.split("train").reader.remote_shards is not None:
        pipeline, reason = "workers", "images in object storage are read as training goes"
    elif data.pipeline == "auto" and was_listed:
        pipeline, reason = "workers", "the run began so"
    elif data.pipeline == "auto":
        pipeline, reason = choose_pipeline(num_bytes, device=device, fraction=data.memory_fraction)
    else:
        pipeline, reason = data.pipeline, "data.pipeline says so"
    options = {"workers": data.workers, "max_unreadable_fraction": data.max_unreadable_fraction}
    found, images = dict[str, DecodedDataset](), None

    @cache
    def decode_validation() -> DecodedDataset:
        decoded = dataset.decode("validation", preprocess, **options)
        if isinstance(train := found["train"], ListedDataset):  # otherwise the summary of the run has them
            train.news.extend(f"skipped validation image {name}: {reason}" for name, reason in decoded.unreadable)
        return decoded

    if pipeline == "workers" and was_listed is not False and isinstance(dataset.split("train").reader, StoredReader):
        for split in splits:
            found[split] = listed = ListedDataset.open(dataset.split(split), cache_dir=dataset.cache_dir, **options)
            listed.check_headers(process or Process())
        images = np.stack([preprocess.to_uint8(image) for image in found["train"].source.sample(_SAMPLED_IMAGES)])
    else:
        found["train"] = dataset.decode("train", preprocess if pipeline == "resident" else None, **options)
        found |= {"validation": decode_validation()} if len(splits) > 1 else {}
        images = found["train"].images
    mean, std = preprocess.mean, preprocess.std
    if pretrained is None:
        mean, std = _measure_normalization(images)
    preprocess = replace(preprocess, mean=data.mean or mean, std=data.std or std)
    train, of_splits = found["train"], dataset.describe_splits()
    balance, why = choose_class_balance(train.labels, wanted=config.train.class_balance)
    chosen = (preprocess, pipeline, reason, dataset.class_names, balance, why)
    return Data(train, found.get("validation"), decode_validation, of_splits, *chosen, dataset)


def build_train_loader(
    config: Config, data: Data, *, device: torch.device, process: Process, transform: Transform | None = None
) -> Loader:
    """Augmented training batches."""
    if transform is not None:  # refused now rather than in a worker
        stored = None if data.train.images is None else Image.fromarray(data.train.images[0])
        apply_transform(transform, stored or next(data.train.source.sample(_SAMPLED_IMAGES)), seed=0)
    # of a set smaller than the batch, all images that divide into pairs for every process
    multiple = 2 * process.world_size
    size, augment = min(config.train.batch_size, len(data.train) // multiple * multiple), config.augment.model_dump()
    batches: dict[str, Any] = {"batch_size": size, "augment": Augment(**augment), "preprocess": data.preprocess}
    place: dict[str, Any] = {"device": device, "rank": process.rank, "world_size": process.world_size}
    shared = {**batches, **place, "seed": config.train.seed, "num_classes": len(data.train.class_names)}
    shared |= {"balanced": data.class_balance == "sampler", "transform": transform}
    if data.pipeline == "resident":
        return ResidentLoader(data.train, **shared)
    shared |= {"workers": config.data.workers, "shuffle_window": config.data.shuffle_window}
    return WorkerLoader(data.train, **shared)


def _measure_normalization(images: np.ndarray | None) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation of images, uint8 [n, H, W, 3]; ImageNet's for None."""
    if images is None:
        return IMAGENET_MEAN, IMAGENET_STD
    # exact sums of integers, so that the numbers don't depend on how numpy adds
    histogram = np.zeros((3, 256), dtype=np.int64)
    for image in images[:: max(1, len(images) // _MEASURED_IMAGES)]:  # one by one: numpy takes 8 bytes a pixel
        histogram += [np.bincount(image[..., channel].ravel(), minlength=256) for channel in range(3)]
    count = int(histogram[0].sum())
    means = [float(h @ np.arange(256)) / count / 255 for h in histogram]
    squares = [float(h @ np.arange(256) ** 2) / count / 255**2 for h in histogram]
    stds = [max((square - mean**2) ** 0.5, 1 / 255) for square, mean in zip(squares, means, strict=True)]
    return _rounded(means), _rounded(stds)


def _rounded(values: list[float]) -> tuple[float, float, float]:
    red, green, blue = (round(value, 4) for value in values)
    return red, green, blue
