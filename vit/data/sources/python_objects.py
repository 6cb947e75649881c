"""Images that are passed from Python, as arrays or sets of items, become data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.data.class_names import check_classes, number_labels, sort_class_names
from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.duplicates import hash_pixels
from vit.data.images import DeepImage, list_images
from vit.data.label_sets import read_label_sets
from vit.data.python_images import (
    as_list,
    convert_pixels,
    find_class_names,
    is_pixels,
    list_items,
    read_labels,
    split_item,
)
from vit.data.sources.base import SPLIT_OF, ImageReader
from vit.data.sources.huggingface import read_rows_column
from vit.runtime.arguments import as_tuple, describe_kind, shorten

# data.name of such a run
FROM_PYTHON = "from-python"


@dataclass(frozen=True, eq=False)
class DatasetReader(ImageReader):
    """The images of a data set whose items are (image, label)."""

    dataset: Any
    indices: np.ndarray
    # uint64, hash of every image, by which the cache knows it
    digests: np.ndarray
    in_process = True

    def image(self, index: int) -> Image.Image:
        image, _ = _read_item(self.dataset, int(self.indices[index]))
        return image

    def __len__(self) -> int:
        return len(self.indices)

    def digest(self, index: int) -> int:
        return int(self.digests[self.indices[index]])

    def cache_key(self) -> bytes:
        return bytes(self.digests[self.indices].data)

    def subset(self, indices: np.ndarray) -> DatasetReader:
        return DatasetReader(self.dataset, self.indices[indices], self.digests)


def find_python_objects(
    dataset: Any,
    class_names: Sequence[str] | None,
    *,
    split: str = "train",
    numbered_classes: Sequence[str] | None = None,
    task: str | None = None,
) -> SourceSplits:
    """Find the splits of images passed from Python.

    Args:
        dataset: A set of items, see `split_item`, or a loader of one, see `list_items`; images and
            labels [n]; a pair of such sets (train, validation), or a dictionary of them by split.
            For an image see `convert_pixels`, or a PIL image; for a label `read_labels`.
        class_names: Names of the classes; None takes those that the set has, see
            `find_class_names`, or the labels that are names, in their alphabetical order.
        split: Name of the split of a data set that isn't a pair.
        numbered_classes: Names for integer labels if there are no other names; None for "class 0"
            and so on.
        task: See `LabelRule`.

    Raises:
        ValueError: The images or labels are of another type, or the validation images have other
            classes.
    """
    if class_names is not None:
        class_names = as_tuple(class_names)
    parts = {split: dataset}
    if isinstance(dataset, Mapping):
        parts = {SPLIT_OF.get(name, ""): part for name, part in dataset.items()}
        if not parts or "" in parts or len(parts) < len(dataset):
            have = shorten(", ".join(map(str, dataset)))
            raise ValueError(f"dataset is a dictionary of {have}; name its sets train, validation")
    elif isinstance(dataset, tuple) and len(dataset) == 2 and not _is_images_and_labels(dataset):
        parts = {"train": dataset[0], "validation": dataset[1]}

    datasets: dict[str, ImageDataset] = {}
    for name, part in parts.items():
        names = class_names or find_class_names(part)
        if "train" in datasets:
            names = names or datasets["train"].class_names
        datasets[name] = read_map_style(
            part, name, names, numbered_classes=numbered_classes, task=task
        )
        if "train" in datasets and task is None:
            task = "multilabel" if datasets["train"].is_multilabel else "classes"
        # a model that is evaluated knows its classes already
        if name == "train" and numbered_classes is None:
            datasets[name] = _check_training_images(datasets[name])

    first, *others = datasets.values()
    for other in others:
        if other.class_names != first.class_names:
            theirs = ", ".join(other.class_names)
            ours = ", ".join(first.class_names)
            raise ValueError(
                f"the validation images have classes {theirs}, the training images {ours}"
                "; pass class_names"
            )
    return SourceSplits(
        dict.fromkeys(datasets, "the images passed from Python"), datasets.__getitem__
    )


def read_map_style(
    dataset: Any,
    split: str,
    class_names: Sequence[str] | None,
    *,
    numbered_classes: Sequence[str] | None = None,
    task: str | None = None,
) -> ImageDataset:
    """Read each image and label of one split once, see `find_python_objects`."""
    if isinstance(dataset, tuple) and len(dataset) == 2:
        images, labels = dataset
        if len(images) != len(labels):
            raise ValueError(
                f"dataset holds {len(images)} images and {len(labels)} labels"
                "; pass a label for each image"
            )
        dataset = list(zip(images, labels, strict=True))
    read_column = None
    # a table of the library `datasets`
    if hasattr(dataset, "select_columns"):
        read_column = partial(read_rows_column, {split: dataset}, origin="dataset", id_format="06d")
    dataset = list_items(dataset)

    # every item is read now, for its label and for the hash by which the image is known
    digests = np.zeros(len(dataset), dtype=np.uint64)
    labels = []
    has_deep_floats = False
    for index in range(len(dataset)):
        image, label = _read_item(dataset, index)
        digests[index] = hash_pixels(image)
        labels.append(label)
        has_deep_floats |= isinstance(image, DeepImage) and not image.has_integers
    if has_deep_floats:
        _check_scale(dataset)
    if not labels:
        raise ValueError("dataset holds no images; pass at least one")
    several = read_label_sets(
        [as_list(label) for label in labels],
        class_names=class_names or numbered_classes,
        task=task,
    )
    if several is not None:
        numbers, names = several
    else:
        numbers, names = _read_classes(labels, class_names, numbered_classes)
    return ImageDataset(
        name=FROM_PYTHON,
        split=split,
        class_names=names,
        labels=numbers,
        ids=[f"{split}/{index:06d}" for index in range(len(labels))],
        reader=DatasetReader(dataset, np.arange(len(labels)), digests),
        read_column=read_column,
    )


def _read_classes(
    labels: Sequence[Any],
    class_names: Sequence[str] | None,
    numbered_classes: Sequence[str] | None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class of each image, int64 [n], and the class names, see `find_python_objects`."""
    plain_labels, num_classes = read_labels(labels)
    known = class_names or numbered_classes
    if all(isinstance(label, str) for label in plain_labels):
        own_names = sort_class_names(map(str, plain_labels))
        # the model's order, if it knows all labels, so that evaluations can be compared
        if numbered_classes is not None and set(own_names) <= set(numbered_classes):
            own_names = tuple(numbered_classes)
        names = tuple(class_names or own_names)
        if unknown := set(plain_labels) - set(names):
            wrong = next(label for label in plain_labels if label in unknown)
            shown = shorten(", ".join(map(str, names)))
            raise ValueError(f"the label {wrong!r} of dataset is not one of its classes {shown}")
        return number_labels(map(str, plain_labels), names), names

    numbers = np.array(plain_labels, dtype=np.int64)
    if num_classes is not None:
        known = known or [f"class {number}" for number in range(num_classes)]
        if len(known) != num_classes:
            raise ValueError(
                f"the labels of dataset are one-hot rows of {num_classes} classes, and there are"
                f" {len(known)} class names; name each class"
            )
    elif not known:
        # without names, the labels count the classes
        used = np.unique(numbers)
        if not np.array_equal(used, np.arange(len(used))):
            text = f"the labels of dataset are {shorten(', '.join(map(str, used)))}"
            raise ValueError(
                f"{text}, not 0 to {len(used) - 1} without gaps; number them so, as "
                "numpy.unique(labels, return_inverse=True)[1] does, or pass class_names"
            )
        known = [f"class {label}" for label in used]
    if numbers.min() < 0 or numbers.max() >= len(known):
        text = f"labels from {numbers.min()} to {numbers.max()}, and {len(known)} class names"
        raise ValueError(f"dataset has {text}; name each class")
    return numbers, tuple(known)


def _check_training_images(images: ImageDataset) -> ImageDataset:
    """Note the classes without a training image. Raises ValueError for fewer than two classes."""
    counts = images.class_counts.tolist()
    used = [name for name, count in zip(images.class_names, counts, strict=True) if count]
    check_classes(used, origin="dataset")
    unused = [name for name in images.class_names if name not in used]
    if not unused:
        return images
    word = "label" if images.is_multilabel else "class"
    note = f"no training image has the {word} {shorten(', '.join(unused))}; leave it out"
    return replace(images, notes=(*images.notes, f"{note} of class_names"))


def _read_item(dataset: Any, index: int) -> tuple[Image.Image, Any]:
    name = f"item {index} of dataset"
    image, label = split_item(dataset[index], name=name)
    if isinstance(image, str | Path):
        raise ValueError(
            f"{name} holds {image!r}, not a PIL image, an array or a tensor"
            "; open it (PIL.Image.open), or train on a table of the paths"
        )
    if not isinstance(image, Image.Image):
        if not hasattr(image, "__array__"):
            expected = "a PIL image, an array or a tensor"
            raise ValueError(f"{name} holds {describe_kind(image)}, not {expected}")
        image = convert_pixels(image, name=name)
    rgb = next(list_images(image))
    assert not isinstance(rgb, str)
    return rgb, label


def _check_scale(dataset: Any) -> None:
    """Raise ValueError if floating-point images of a set have values from 0 to 1, although those of
    others go beyond: one scale is meant for all."""
    for index in range(len(dataset)):
        image, _ = split_item(dataset[index], name="")
        # "float32" of numpy, "torch.float32" of torch
        is_float = "float" in str(getattr(image, "dtype", ""))
        pixels = convert_pixels(image) if is_float else np.zeros(0)
        if pixels.dtype == np.uint8 and pixels.any():
            raise ValueError(
                f"item {index} of dataset has values from 0 to 1, and other items have values beyond"
                " these; give all the same scale, as uint8 or uint16"
            )


def _is_images_and_labels(pair: tuple[Any, Any]) -> bool:
    """Return true for (images, labels), false for (training, validation)."""
    images, labels = pair
    if isinstance(labels, list | tuple) and labels:
        # items of a validation set have images
        first = labels[0]
        first = first[0] if isinstance(first, list | tuple) and first else first
        return not isinstance(first, Mapping) and not is_pixels(first)
    return hasattr(images, "__array__")
