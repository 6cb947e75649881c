"""Images that are passed from Python: arrays, or a map-style data set of torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.data.class_names import check_classes, sort_class_names
from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.duplicates import hash_pixels
from vit.data.images import list_images
from vit.data.sources.base import ImageReader
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
) -> SourceSplits:
    """Find the splits of images passed from Python.

    Args:
        dataset: A data set of torch of (image, label), a pair of them (train, validation), or
            arrays: images and labels [n]. An image is a PIL image, a uint8 array [H, W, 3] or a
            tensor [3, H, W], of uint8 or of values from 0 to 1; a label is an integer from 0 or a
            class name.
        class_names: Names of the classes; None takes those in its `classes`, or the labels that are
            names, in their alphabetical order.
        split: Name of the split of a data set that isn't a pair.
        numbered_classes: Names for integer labels if there are no other names; None for "class 0"
            and so on.

    Raises:
        ValueError: The images or labels are of another type, or the validation images have other
            classes.
    """
    if class_names is not None:
        class_names = as_tuple(class_names)
    # (train, validation) and (images, labels) are both pairs; images are an array
    is_pair = isinstance(dataset, tuple) and len(dataset) == 2
    if is_pair and not hasattr(dataset[0], "__array__"):
        parts = {"train": dataset[0], "validation": dataset[1]}
    else:
        parts = {split: dataset}

    datasets: dict[str, ImageDataset] = {}
    for name, part in parts.items():
        names = class_names or getattr(part, "classes", None)
        if "train" in datasets:
            names = names or datasets["train"].class_names
        datasets[name] = read_map_style(part, name, names, numbered_classes=numbered_classes)
        # a model that is evaluated knows its classes already
        if name == "train" and numbered_classes is None:
            datasets[name] = _check_training_images(datasets[name])

    first, *others = datasets.values()
    for other in others:
        if other.class_names != first.class_names:
            theirs = ", ".join(other.class_names)
            ours = ", ".join(first.class_names)
            text = f"the validation images have classes {theirs}, the training images {ours}"
            raise ValueError(f"{text}; pass class_names")
    return SourceSplits(
        dict.fromkeys(datasets, "the images passed from Python"), datasets.__getitem__
    )


def read_map_style(
    dataset: Any,
    split: str,
    class_names: Sequence[str] | None,
    *,
    numbered_classes: Sequence[str] | None = None,
) -> ImageDataset:
    """Read each image and label of one split once, see `find_python_objects`."""
    if isinstance(dataset, tuple) and len(dataset) == 2:
        images, labels = dataset
        if len(images) != len(labels):
            text = f"dataset holds {len(images)} images and {len(labels)} labels"
            raise ValueError(f"{text}; pass a label for each image")
        # tensors have their channels first, arrays last
        images = images if _is_tensor(images) else np.asarray(images)
        dataset = list(zip(images, labels, strict=True))
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        kind = describe_kind(dataset)
        raise ValueError(f"dataset is {kind}, not (images, labels) nor a map-style data set")

    # every item is read now, for its label and for the hash by which the image is known
    digests = np.zeros(len(dataset), dtype=np.uint64)
    labels = []
    for index in range(len(dataset)):
        image, label = _read_item(dataset, index)
        digests[index] = hash_pixels(image)
        labels.append(label)
    if not labels:
        raise ValueError("dataset holds no images; pass at least one")
    numbers, names = _number_labels(labels, class_names, numbered_classes)
    if numbers.min() < 0 or numbers.max() >= len(names):
        text = f"labels from {numbers.min()} to {numbers.max()}, and {len(names)} class names"
        raise ValueError(f"dataset has {text}; name each class")
    return ImageDataset(
        name=FROM_PYTHON,
        split=split,
        class_names=names,
        labels=numbers,
        ids=[f"{split}/{index:06d}" for index in range(len(numbers))],
        reader=DatasetReader(dataset, np.arange(len(numbers)), digests),
    )


def _check_training_images(images: ImageDataset) -> ImageDataset:
    """Note the classes without a training image. Raises ValueError for fewer than two classes."""
    counts = np.bincount(images.labels, minlength=len(images.class_names))
    used = [name for name, count in zip(images.class_names, counts, strict=True) if count]
    check_classes(used, origin="dataset")
    unused = [name for name in images.class_names if name not in used]
    if not unused:
        return images
    note = f"no training image has the class {shorten(', '.join(unused))}; leave it out"
    return replace(images, notes=(*images.notes, f"{note} of class_names"))


def _number_labels(
    labels: Sequence[Any],
    class_names: Sequence[str] | None,
    numbered_classes: Sequence[str] | None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the labels as numbers, int64 [n], and the class names in the order of the numbers."""
    if all(isinstance(label, str) for label in labels):
        own_names = sort_class_names(map(str, labels))
        # the model's order, if it knows all labels, so that evaluations can be compared
        if numbered_classes is not None and set(own_names) <= set(numbered_classes):
            own_names = tuple(numbered_classes)
        names = tuple(class_names or own_names)
        number_of = {name: number for number, name in enumerate(names)}
        unknown = [label for label in labels if label not in number_of]
        if unknown:
            known = shorten(", ".join(map(str, names)))
            raise ValueError(
                f"the label {unknown[0]!r} of dataset is not one of its classes {known}"
            )
        return np.array([number_of[label] for label in labels], dtype=np.int64), names

    try:
        numbers = np.array([operator.index(label) for label in labels], dtype=np.int64)
    except TypeError:
        text = "the labels of dataset are not integers from 0, nor all of them class names"
        raise ValueError(text) from None
    numbered = class_names or numbered_classes
    if not numbered:
        # without names, the labels count the classes
        used = np.unique(numbers)
        if not np.array_equal(used, np.arange(len(used))):
            text = f"the labels of dataset are {shorten(', '.join(map(str, used)))}"
            raise ValueError(
                f"{text}, not 0 to {len(used) - 1} without gaps; number them so, as "
                "numpy.unique(labels, return_inverse=True)[1] does, or pass class_names"
            )
        numbered = [f"class {label}" for label in used]
    return numbers, tuple(numbered)


def _read_item(dataset: Any, index: int) -> tuple[Image.Image, Any]:
    item = dataset[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        kind = describe_kind(item)
        raise ValueError(f"item {index} of dataset is {kind}, not a pair (image, label)")
    image, label = item
    expected = "a PIL image, a uint8 array or a tensor [3, H, W]"
    if isinstance(image, str | Path):
        raise ValueError(f"item {index} of dataset holds {image!r}, not {expected}")
    if _is_tensor(image):
        image = _tensor_to_pixels(image, index)
    elif not isinstance(image, Image.Image) and not hasattr(image, "__array__"):
        raise ValueError(f"item {index} of dataset holds {describe_kind(image)}, not {expected}")
    rgb = next(list_images(image))
    assert not isinstance(rgb, str)
    return rgb, label


def _is_tensor(value: Any) -> bool:
    # takes a second to import
    import torch

    return isinstance(value, torch.Tensor)


def _tensor_to_pixels(image: Any, index: int) -> np.ndarray:
    """Convert the tensors of torchvision's ToTensor and PILToTensor to uint8 [H, W, 3] or [H, W]; a
    uint8 tensor [H, W, 3] stays as it is."""
    pixels: np.ndarray = image.detach().cpu().numpy()
    is_float = np.issubdtype(pixels.dtype, np.floating)
    if is_float:
        low, high = float(pixels.min(initial=0.0)), float(pixels.max(initial=1.0))
        # false for NaN, too
        if not (low >= 0 and high <= 1):
            text = f"item {index} of dataset is a tensor of values from {low:.3g} to {high:.3g}"
            raise ValueError(f"{text}, not 0 to 1; leave out Normalize, vit normalises by itself")
        pixels = np.rint(pixels * 255).astype(np.uint8)
    is_channels_first = pixels.ndim == 3 and pixels.shape[0] in (1, 3)
    if is_channels_first and (is_float or pixels.shape[-1] != 3):
        pixels = pixels.transpose(1, 2, 0)
        # a single channel is a grey image
        pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    return pixels
