"""Images that a program gives instead of naming them: arrays, or a map-style data set of torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from vit.data.duplicates import hash_pixels
from vit.data.inputs import list_images
from vit.data.sets.source import ArrayReader, FoundSplit, FoundSplits, ImageReader, ImageSource

GIVEN = "given"  # the data.name of such a run


@dataclass(frozen=True, eq=False)
class DatasetReader(ImageReader):
    """The images of a data set whose items are (image, label)."""

    dataset: Any
    indices: np.ndarray
    digests: np.ndarray  # of every image, so that the cache knows them
    in_process: ClassVar[bool] = True

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        return nullcontext(_read(self.dataset, int(self.indices[index]))[0])

    def cache_key(self) -> bytes:
        return bytes(self.digests[self.indices].data)

    def subset(self, indices: np.ndarray) -> DatasetReader:
        return DatasetReader(self.dataset, self.indices[indices], self.digests)


def find_given(dataset: Any, class_names: Sequence[str] | None) -> FoundSplits:
    """The splits of a data set, of a pair of them (train, validation), or of arrays: images uint8 [n, H, W, 3] and
    labels [n]. Names not given are those in its `classes`, else "class 0" and so on. Raises ValueError for images or
    labels that are none, and for validation images of other classes."""
    is_pair = isinstance(dataset, tuple) and len(dataset) == 2 and not hasattr(dataset[0], "__array__")
    splits = {"train": dataset[0], "validation": dataset[1]} if is_pair else {"train": dataset}
    found: dict[str, ImageSource] = {}
    names = class_names
    for split, of_split in splits.items():
        found[split] = _open(of_split, split, class_names or getattr(of_split, "classes", None) or names)
        names = names or found[split].class_names
        if found[split].class_names != tuple(names):
            theirs, ours = ", ".join(found[split].class_names), ", ".join(names)
            raise ValueError(f"the validation images have classes {theirs}, the training images {ours}")
    return {split: FoundSplit("the given images", partial(copy, source)) for split, source in found.items()}


def _open(dataset: Any, split: str, class_names: Sequence[str] | None) -> ImageSource:
    reader: ImageReader
    if isinstance(dataset, tuple) and len(dataset) == 2:
        pixels, labels = np.asarray(dataset[0]), list(dataset[1])
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3 or len(pixels) != len(labels):
            kind = f"images {pixels.dtype} {list(pixels.shape)} and {len(labels)} labels"
            raise ValueError(f"dataset holds {kind}, not images uint8 [n, H, W, 3] and n labels")
        reader = ArrayReader(pixels)
    elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        samples = [(hash_pixels(image), label) for image, label in (_read(dataset, i) for i in range(len(dataset)))]
        digests, labels = np.array([digest for digest, _ in samples], dtype=np.uint64), [label for _, label in samples]
        reader = DatasetReader(dataset, np.arange(len(labels)), digests)
    else:
        raise ValueError(f"dataset is a {type(dataset).__name__}, no (images, labels) and no data set with a length")
    if not labels:
        raise ValueError("dataset holds no images")
    try:
        numbers = np.array([operator.index(label) for label in labels], dtype=np.int64)
    except TypeError:
        raise ValueError("the labels of dataset are no integers; number the classes from 0") from None
    names = tuple(class_names or ()) or tuple(f"class {number}" for number in range(numbers.max() + 1))
    if not ((numbers >= 0) & (numbers < len(names))).all():
        raise ValueError(f"dataset has labels from {numbers.min()} to {numbers.max()}, and {len(names)} class names")
    ids = [f"{split}/{index:06d}" for index in range(len(numbers))]
    return ImageSource(name=GIVEN, split=split, class_names=names, labels=numbers, ids=ids, reader=reader)


def _read(dataset: Any, index: int) -> tuple[Image.Image, Any]:
    image, label = dataset[index]
    found = next(list_images(image))
    if isinstance(found, str):
        raise ValueError(f"item {index} of dataset holds {image!r}, not a PIL image or uint8 array")
    return found, label
