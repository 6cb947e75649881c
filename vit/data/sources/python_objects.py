"""Images passed from Python instead of named: arrays, or a map-style data set of torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.duplicates import hash_pixels
from vit.data.images import list_images
from vit.data.sources.base import ImageReader

# the data.name of such a run
FROM_PYTHON = "from-python"


@dataclass(frozen=True, eq=False)
class DatasetReader(ImageReader):
    """The images of a data set whose items are (image, label)."""

    dataset: Any
    indices: np.ndarray
    # uint64, of every image, so that the cache knows them
    digests: np.ndarray
    in_process = True

    def image(self, index: int) -> Image.Image:
        image, _ = _read_item(self.dataset, int(self.indices[index]))
        return image

    def cache_key(self) -> bytes:
        return bytes(self.digests[self.indices].data)

    def subset(self, indices: np.ndarray) -> DatasetReader:
        return DatasetReader(self.dataset, self.indices[indices], self.digests)


def find_python_objects(dataset: Any, class_names: Sequence[str] | None) -> SourceSplits:
    """The splits of images passed from Python.

    Args:
        dataset: a data set of torch of (PIL image or uint8 array, label), a pair of them (train,
            validation), or arrays: images uint8 [n, H, W, 3] and labels [n].
        class_names: names of the classes; None takes those in its `classes`, else "class 0" and so
            on.

    Raises:
        ValueError: the images or labels are of another kind, or the validation images have other
            classes.
    """
    # (train, validation) and (images, labels) are both pairs; images are an array
    is_pair = isinstance(dataset, tuple) and len(dataset) == 2
    if is_pair and not hasattr(dataset[0], "__array__"):
        parts = {"train": dataset[0], "validation": dataset[1]}
    else:
        parts = {"train": dataset}

    datasets: dict[str, ImageDataset] = {}
    for split, part in parts.items():
        names = class_names or getattr(part, "classes", None)
        if "train" in datasets:
            names = names or datasets["train"].class_names
        datasets[split] = read_map_style(part, split, names)

    train = datasets["train"]
    validation = datasets.get("validation", train)
    if validation.class_names != train.class_names:
        theirs = ", ".join(validation.class_names)
        ours = ", ".join(train.class_names)
        raise ValueError(f"the validation images have classes {theirs}, the training images {ours}")
    return SourceSplits(
        dict.fromkeys(datasets, "the images passed from Python"), datasets.__getitem__
    )


def read_map_style(dataset: Any, split: str, class_names: Sequence[str] | None) -> ImageDataset:
    """The images of one split, as `find_python_objects` takes them; each is read once."""
    if isinstance(dataset, tuple) and len(dataset) == 2:
        images, labels = dataset
        if len(images) != len(labels):
            raise ValueError(f"dataset holds {len(images)} images and {len(labels)} labels")
        dataset = list(zip(np.asarray(images), labels, strict=True))
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        kind = type(dataset).__name__
        raise ValueError(f"dataset is a {kind}, not (images, labels) nor a map-style data set")

    # every item is read once: labels are needed now, and hashes tell the images from others
    digests = np.zeros(len(dataset), dtype=np.uint64)
    labels = []
    for index in range(len(dataset)):
        image, label = _read_item(dataset, index)
        digests[index] = hash_pixels(image)
        labels.append(label)
    if not labels:
        raise ValueError("dataset holds no images")
    try:
        numbers = np.array([operator.index(label) for label in labels], dtype=np.int64)
    except TypeError:
        raise ValueError("the labels of dataset are not integers from 0") from None

    # without names, as many classes as the labels count
    names = tuple(class_names or (f"class {number}" for number in range(numbers.max() + 1)))
    if numbers.min() < 0 or numbers.max() >= len(names):
        text = f"labels from {numbers.min()} to {numbers.max()}, and {len(names)} class names"
        raise ValueError(f"dataset has {text}")
    return ImageDataset(
        name=FROM_PYTHON,
        split=split,
        class_names=names,
        labels=numbers,
        ids=[f"{split}/{index:06d}" for index in range(len(numbers))],
        reader=DatasetReader(dataset, np.arange(len(numbers)), digests),
    )


def _read_item(dataset: Any, index: int) -> tuple[Image.Image, Any]:
    image, label = dataset[index]
    rgb = next(list_images(image))
    if isinstance(rgb, str):
        raise ValueError(f"item {index} of dataset holds {image!r}, not a PIL image or uint8 array")
    return rgb, label
