"""Config → the images of a run: its splits, their normalisation, and the loader of batches."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vit.config import Config, DataConfig
from vit.data.augment import Augmentation
from vit.data.cache import decode_dataset
from vit.data.corrections import check_corrections, read_corrections
from vit.data.dataset import ImageDataset, ImageRule, choose_evenly
from vit.data.loader import TrainLoader, fits_in_memory
from vit.data.open import open_dataset, open_passed
from vit.data.preprocess import Preprocess
from vit.data.splits import DatasetSplits
from vit.data.statistics import (
    ClassBalance,
    choose_class_balance,
    measure_mean_and_std,
    measure_value_range,
)
from vit.data.workers import Transform, apply_transform
from vit.runtime.processes import current_process

# Images at most that mean and standard deviation are measured on; the second number counts where
# they are decoded for it alone.
_MEASURED_IMAGES = 10_000
_SAMPLED_IMAGES = 256


@dataclass(frozen=True)
class TrainingData:
    """The images of a run, and what was decided about them."""

    # with the pipeline that was chosen
    config: Config
    splits: DatasetSplits
    # not decoded in the pipeline "workers"
    train: ImageDataset
    # decoded; None without any
    validation: ImageDataset | None
    preprocess: Preprocess
    # returns images of the run with their pixels; decoded images as they are
    decode: Callable[[ImageDataset], ImageDataset]
    class_balance: ClassBalance


def build_dataset(
    config: Config, *, user_dataset: Any = None, class_names: Sequence[str] | None = None
) -> DatasetSplits:
    """Find the images of a run, without decoding any: those that the section `data` names, or
    `dataset` of `vit.train`."""
    data = config.data
    rule = ImageRule(**{field.name: getattr(data, field.name) for field in fields(ImageRule)})
    if user_dataset is not None:
        # They have no test split: they are evaluated on those held out for validation, or others.
        rule = replace(rule, test_fraction=0.0, group_by=None, group_duplicates=False)
        return open_passed(user_dataset, class_names, rule=rule)
    splits = open_dataset(data.name, root=data.root, rule=rule)
    if corrections := read_corrections(data.corrections):
        splits = replace(splits, corrections=corrections)
        check_corrections(splits.split("all"), corrections)
    return splits


def build_data(
    config: Config,
    splits: DatasetSplits,
    *,
    device: torch.device,
    pretrained: Preprocess | None = None,
    has_transform: bool = False,
) -> TrainingData:
    """List the training and validation images, and decode them where they fit into the memory of
    the host or of a device, together with the images of a test split that is drawn among them."""
    data = config.data
    train = splits.split("train")
    if data.task == "multilabel" and not train.is_multilabel:
        raise ValueError(
            f"data.task=multilabel, and the images of {splits.title} have one class each; list"
            " their labels in a table (docs/guides/data.md), or leave it out"
        )
    preprocess = choose_preprocess(data, train, pretrained)
    validation = splits.split("validation") if data.validation_fraction > 0 else None
    num_images = len(train) + len(validation or ())
    num_bytes = num_images * math.prod(preprocess.resize_size) * 3
    # A resumed run names the pipeline, so that the memory that is free now doesn't change it.
    pipeline = data.pipeline
    if pipeline == "auto":
        pipeline = "workers"  # which give a transform its images in full size
        if not has_transform and fits_in_memory(num_bytes, torch.device("cpu")):
            pipeline = "cached"
        if not has_transform and fits_in_memory(num_bytes, device):
            pipeline = "resident"
        # The main process decides for all; the free memory of their devices differs.
        pipeline = current_process().broadcast(pipeline)

    decode = partial(
        decode_dataset,
        preprocess=preprocess,
        together=splits.pool if pipeline != "workers" else None,
        workers=data.workers,
        max_unreadable_fraction=data.max_unreadable_fraction,
    )
    if pipeline != "workers":
        train = decode(train)
    if validation is not None:
        validation = decode(validation)
    # Pretrained weights keep the normalisation that they were trained with.
    if pretrained is None:
        sample = train.read_sample(choose_evenly(len(train), _SAMPLED_IMAGES))
        images: Iterable[np.ndarray] = map(preprocess.to_uint8, sample)
        if train.pixels is not None:
            # Not as a slice, which would copy them.
            step = max(1, len(train) // _MEASURED_IMAGES)
            images = map(train.pixels.__getitem__, range(0, len(train), step))
        mean, std = measure_mean_and_std(images)
        preprocess = replace(preprocess, mean=data.mean or mean, std=data.std or std)
    return TrainingData(
        config=config.with_data(pipeline=pipeline),
        splits=splits,
        train=train,
        validation=validation,
        preprocess=preprocess,
        decode=decode,
        class_balance=choose_class_balance(train.labels, wanted=config.train.class_balance),
    )


def choose_preprocess(
    data: DataConfig, train: ImageDataset, pretrained: Preprocess | None
) -> Preprocess:
    """Choose the preprocessing of a run. The configuration's values come before those of
    `pretrained`, the preprocessing of weights, and these before measured ones."""
    preprocess = pretrained or Preprocess(data.size)
    return replace(
        preprocess,
        image_size=data.size,
        crop_pct=data.crop_pct or preprocess.crop_pct,
        resize_mode=data.resize_mode or preprocess.resize_mode,
        value_range=data.value_range or measure_value_range(train),
        mean=data.mean or preprocess.mean,
        std=data.std or preprocess.std,
    )


def build_train_loader(
    data: TrainingData,
    *,
    device: torch.device,
    transform: Transform | None = None,
    tokens: Float[Tensor, "n V N D"] | None = None,
) -> TrainLoader:
    """Build the loader of augmented training batches on a device, or of their `tokens`. A transform
    from Python is tried on one image at once."""
    config = data.config
    train = data.train
    if transform is not None:
        if config.data.pipeline != "workers":
            raise ValueError(
                f"data.pipeline={config.data.pipeline} keeps no full-size images for the transform;"
                " use workers"
            )
        # It is refused now rather than in a worker.
        sample = next(train.read_sample(range(len(train))))
        apply_transform(transform, data.preprocess.to_rgb(sample), seed=0)

    # If there are fewer images than a batch, take as many as divide into pairs for each process.
    process = current_process()
    multiple = 2 * process.world_size
    return TrainLoader(
        train,
        batch_size=min(config.train.batch_size, len(train) // multiple * multiple),
        seed=config.train.seed,
        process=process,
        device=device,
        preprocess=data.preprocess,
        augmentation=Augmentation(**config.augment.model_dump(exclude={"mix_until"})),
        is_resident=config.data.pipeline == "resident",
        transform=transform,
        tokens=tokens,
        workers=config.data.workers,
        max_unreadable_fraction=config.data.max_unreadable_fraction,
    )
