"""Images that are passed from Python, as arrays or sets of items, become data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vit.data.class_names import check_classes, sort_class_names
from vit.data.duplicates import hash_pixels
from vit.data.images import list_images
from vit.data.python_images import (
    as_plain,
    convert_pixels,
    find_class_names,
    is_pixels,
    list_items,
    split_item,
)
from vit.data.sources.base import SPLIT_OF, ImageReader
from vit.data.sources.huggingface import RowColumns
from vit.data.sources.listing import Listing
from vit.runtime.arguments import as_tuple, describe_kind, shorten

# data.name of such a run
FROM_PYTHON = "from-python"


@dataclass(frozen=True, eq=False)
class ItemReader(ImageReader):
    """The images of sets whose items are (image, label)."""

    sets: Sequence[Any]
    # int64 [n, 2]: set, and place in it
    places: np.ndarray
    # uint64 [n], hash of every image, by which the cache knows it
    digests: np.ndarray
    in_process = True

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Image.Image:
        number, place = self.places[index].tolist()
        return _read_item(self.sets[number], place)[0]

    def digest(self, index: int) -> int:
        return int(self.digests[index])

    def cache_key(self) -> bytes:
        return self.digests.tobytes()

    def subset(self, indices: np.ndarray) -> ItemReader:
        return ItemReader(self.sets, self.places[indices], self.digests[indices])


def find_python_objects(
    dataset: Any,
    class_names: Sequence[str] | None,
    *,
    split: str = "train",
    numbered_classes: Sequence[str] | None = None,
    task: str | None = None,
) -> Listing:
    """List images passed from Python.

    Args:
        dataset: A set of items, see `split_item`; images and labels [n]; a pair of such sets
            (train, validation), or a dictionary of them by split. For an image see
            `convert_pixels`, or a PIL image. A label is a text or a whole number; a
            list of names, or a row of 0 and 1, where an image may have several.
        class_names: Names of the classes; None takes those that the set has, see
            `find_class_names`, or the labels that are names, in their order.
        split: Name of the split of a data set that isn't a pair.
        numbered_classes: Names for integer labels if there are no other names; None for "class 0"
            and so on.
        task: See `LabelRule`.

    Raises:
        ValueError: The images or labels are of another type, or the validation images have other
            classes.
    """
    parts = {split: dataset}
    if isinstance(dataset, Mapping):
        parts = {SPLIT_OF.get(name, ""): part for name, part in dataset.items()}
        if not parts or "" in parts or len(parts) < len(dataset):
            have = shorten(", ".join(map(str, dataset)))
            raise ValueError(f"dataset is a dictionary of {have}; name its sets train, validation")
    elif isinstance(dataset, tuple) and len(dataset) == 2 and not _is_images_and_labels(dataset):
        parts = {"train": dataset[0], "validation": dataset[1]}

    known: Sequence[str] | None = None if class_names is None else as_tuple(class_names)
    if known is None:
        own_names = list(filter(None, dict.fromkeys(map(find_class_names, parts.values()))))
        if len(own_names) > 1:
            texts = " and ".join(shorten(", ".join(names)) for names in own_names)
            raise ValueError(f"the sets of dataset have the classes {texts}; pass class_names")
        known = own_names[0] if own_names else None
    sets = [_list_set(part) for part in parts.values()]
    splits: list[str] = []
    labels: list[Any] = []
    digests: list[int] = []
    places: list[tuple[int, int]] = []
    for number, (name, items) in enumerate(zip(parts, sets, strict=True)):
        if not len(items):
            raise ValueError("dataset holds no images; pass at least one")
        # every item is read now, for its label and for the hash by which the image is known
        for index in range(len(items)):
            image, label = _read_item(items, index)
            digests.append(hash_pixels(image))
            labels.append(as_plain(label))
            splits.append(name)
            places.append((number, index))
    named, names = _name_labels(labels, known, numbered_classes, task=task)
    tables = [part for part in parts.values() if hasattr(part, "select_columns")]
    return Listing(
        name=FROM_PYTHON,
        origin="dataset",
        ids=[f"{name}/{index:06d}" for name, (_, index) in zip(splits, places, strict=True)],
        labels=named,
        reader=ItemReader(sets, np.array(places), np.array(digests, dtype=np.uint64)),
        splits=splits,
        keeps_validation=True,
        origins=dict.fromkeys(parts, "the images passed from Python"),
        class_names=names,
        columns=RowColumns(tables) if len(tables) == len(parts) else None,
        # a model that is evaluated knows its classes already
        notes=[] if numbered_classes is not None else _note_unused(named, splits, names),
    )


def _list_set(part: Any) -> Any:
    if isinstance(part, tuple) and len(part) == 2 and _is_images_and_labels(part):
        images, labels = part
        if len(images) != len(labels):
            raise ValueError(
                f"dataset holds {len(images)} images and {len(labels)} labels"
                "; pass a label for each image"
            )
        return list(zip(images, labels, strict=True))
    return list_items(part)


def _name_labels(
    labels: Sequence[Any],
    class_names: Sequence[str] | None,
    numbered_classes: Sequence[str] | None,
    *,
    task: str | None,
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the class of each image by its name, or its labels, a tuple; and the names of all."""
    known = class_names or numbered_classes
    are_lists = bool(labels) and all(isinstance(label, list) for label in labels)
    if task == "multilabel" or (are_lists and task is None):
        if task is None and all(sum(map(bool, label)) == 1 for label in labels):
            raise ValueError(
                f"each label of dataset is a list of one, such as {shorten(repr(labels[0]))}; pass"
                " its index or name, or set data.task=multilabel"
            )
        return _name_sets(labels, known)
    if all(isinstance(label, str) for label in labels):
        names = sort_class_names(map(str, labels))
        # the model's order, if it knows all labels, so that evaluations can be compared
        if known is not None and (class_names is not None or set(names) <= set(known)):
            names = tuple(known)
        if unknown := set(labels) - set(names):
            wrong = next(label for label in labels if label in unknown)
            shown = shorten(", ".join(names))
            raise ValueError(f"the label {wrong!r} of dataset is not one of its classes {shown}")
        return list(labels), names
    for label in labels:
        if not isinstance(label, int):
            text = "the labels of dataset are not integers from 0, nor all of them class names"
            hint = "; rows of 0 and 1 or lists are several labels, data.task=multilabel"
            raise ValueError(
                f"{text}; one is {shorten(repr(label))}{hint * isinstance(label, list)}"
            )
    used = sorted(set(labels))
    if known is None:
        # without names, the labels count the classes
        if used != list(range(len(used))):
            text = f"the labels of dataset are {shorten(', '.join(map(str, used)))}"
            raise ValueError(
                f"{text}, not 0 to {len(used) - 1} without gaps; number them so, as "
                "numpy.unique(labels, return_inverse=True)[1] does, or pass class_names"
            )
        known = [f"class {label}" for label in used]
    if used[0] < 0 or used[-1] >= len(known):
        text = f"labels from {used[0]} to {used[-1]}, and {len(known)} class names"
        raise ValueError(f"dataset has {text}; name each class")
    return [known[label] for label in labels], tuple(known)


def _name_sets(
    labels: Sequence[Any], known: Sequence[str] | None
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the names of the labels of each image, and of all labels."""
    if not all(isinstance(label, list) for label in labels):
        wrong = next(label for label in labels if not isinstance(label, list))
        raise ValueError(
            "the labels of dataset are not several an image: pass rows of 0 and 1, or lists of"
            f" names, instead of {shorten(repr(wrong))}"
        )
    if all(isinstance(each, str) for label in labels for each in label):
        used = sorted({each for label in labels for each in label})
        names = tuple(known or used)
        if unknown := set(used) - set(names):
            text = f"the label {min(unknown)!r} of dataset is not one of"
            raise ValueError(f"{text} {shorten(', '.join(names))}; name each label")
        return [tuple(dict.fromkeys(label)) for label in labels], names
    lengths = {len(label) for label in labels}
    is_row = len(lengths) == 1 and all(each in (0, 1) for label in labels for each in label)
    names = tuple(known or (f"class {place}" for place in range(max(lengths))))
    if not is_row or len(names) != max(lengths):
        raise ValueError(
            f"the labels of dataset are {shorten(repr(labels[0]))}, not rows of 0 and 1 with a"
            f" number for each of {len(names)} labels, nor lists of names"
        )
    rows = [tuple(names[place] for place, mark in enumerate(label) if mark) for label in labels]
    return rows, names


def _note_unused(labels: Sequence[Any], splits: Sequence[str], names: Sequence[str]) -> list[str]:
    """Note the classes without a training image. Raises ValueError for fewer than two classes."""
    pairs = zip(labels, splits, strict=True)
    used = {each for label, split in pairs if split == "train" for each in as_tuple(label)}
    if "train" not in splits:
        return []
    check_classes([name for name in names if name in used], origin="dataset")
    unused = [name for name in names if name not in used]
    word = "label" if any(isinstance(label, tuple) for label in labels) else "class"
    text = f"no training image has the {word} {shorten(', '.join(unused))}"
    return [f"{text}; leave it out of class_names"] if unused else []


def _read_item(dataset: Any, index: int) -> tuple[Image.Image, Any]:
    name = f"item {index} of dataset"
    image, label = split_item(dataset[index], name=name)
    if isinstance(image, str):
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


def _is_images_and_labels(pair: tuple[Any, Any]) -> bool:
    """Return true for (images, labels), false for (training, validation)."""
    images, labels = pair
    if isinstance(labels, list | tuple) and labels:
        # items of a validation set have images
        first = labels[0]
        first = first[0] if isinstance(first, list | tuple) and first else first
        return not isinstance(first, Mapping) and not is_pixels(first)
    return hasattr(images, "__array__")
