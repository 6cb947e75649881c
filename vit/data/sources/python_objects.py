"""Images that are passed from Python, as arrays or sets of items, become data sets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vit.data.class_names import check_classes, sort_class_names
from vit.data.duplicates import hash_pixels
from vit.data.images import list_images
from vit.data.python_images import convert_pixels, is_pixels, split_item
from vit.data.sources.base import SPLIT_OF, ImageReader
from vit.data.sources.huggingface import find_feature_names
from vit.data.sources.listing import Listing
from vit.runtime.arguments import as_tuple, shorten

# data.name of such a run
FROM_PYTHON = "from-python"


class ItemReader(ImageReader):
    """The images of sets whose items are (image, label). `places` has the number of the set, the
    place in it, and the hash of the image, by which the cache knows it, uint64 [n, 3]."""

    in_process = True

    def __init__(self, sets: Sequence[Any], names: Sequence[str], places: np.ndarray) -> None:
        super().__init__(names, places)
        self._sets = sets

    def __getitem__(self, index: int) -> Image.Image:
        number, place, _ = self.places[index].tolist()
        return _read_item(self._sets[number], place)[0]

    def digest(self, index: int) -> int:
        return int(self.places[index, 2])

    def cache_key(self) -> bytes:
        return self.places[:, 2].tobytes()


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
        class_names: Names of the classes; None takes those that the set has, its attribute
            `classes` or the features of a set of Hugging Face, or the labels that are names.
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
        found = list(filter(None, dict.fromkeys(map(_find_class_names, parts.values()))))
        if len(found) > 1:
            texts = " and ".join(shorten(", ".join(names)) for names in found)
            raise ValueError(f"the sets of dataset have the classes {texts}; pass class_names")
        known = found[0] if found else None

    sets = [_list_set(part) for part in parts.values()]
    labels: list[Any] = []
    places: list[tuple[int, int, int]] = []
    for number, items in enumerate(sets):
        if not len(items):
            raise ValueError("dataset holds no images; pass at least one")
        # every item is read now, for its label and for the hash by which the image is known
        for index in range(len(items)):
            image, label = _read_item(items, index)
            labels.append(_as_plain(label))
            places.append((number, index, hash_pixels(image)))
    splits = [name for name, items in zip(parts, sets, strict=True) for _ in range(len(items))]
    ids = [f"{name}/{place[1]:06d}" for name, place in zip(splits, places, strict=True)]
    named, names = _name_labels(labels, known, numbered_classes, task=task)
    notes = []
    # a model that is evaluated knows its classes already
    if numbered_classes is None and "train" in parts:
        pairs = zip(named, splits, strict=True)
        used = {each for label, name in pairs if name == "train" for each in as_tuple(label)}
        check_classes([name for name in names if name in used], origin="dataset")
        if unused := [name for name in names if name not in used]:
            text = f"no training image has the class {shorten(', '.join(unused))}"
            notes.append(f"{text}; leave it out of class_names")
    return Listing(
        name=FROM_PYTHON,
        origin="dataset",
        labels=named,
        reader=ItemReader(sets, ids, np.array(places, dtype=np.uint64)),
        splits=splits,
        keeps_validation=True,
        class_names=names,
        notes=notes,
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


def _find_class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return the class names that a set has, or the set that a Subset is of."""
    while dataset is not None:
        names = getattr(dataset, "classes", None)
        features = getattr(dataset, "features", None)
        if names is None and isinstance(features, Mapping):
            names = find_feature_names(features.get("label", features.get("labels")))
        if names is not None:
            return tuple(map(str, names))
        dataset = getattr(dataset, "dataset", None)
    return None


def _list_set(part: Any) -> Any:
    """Return a set of items that has a length and is read by index."""
    if isinstance(part, tuple) and len(part) == 2 and _is_images_and_labels(part):
        images, labels = part
        if len(images) != len(labels):
            counts = f"{len(images)} images and {len(labels)} labels"
            raise ValueError(f"dataset holds {counts}; pass a label for each image")
        return list(zip(images, labels, strict=True))
    # the keys of pandas' DataFrame are its columns
    is_text = isinstance(part, str | bytes | Mapping) or hasattr(part, "iloc")
    if not is_text and hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        return part
    if is_text or not isinstance(part, Iterable):
        raise ValueError(
            f"dataset is of the type {type(part).__name__}, not (images, labels) nor a data set of torch;"
            " a table of paths and labels is read from its file (data.root=TABLE.csv)"
        )
    return list(part)


def _read_item(dataset: Any, index: int) -> tuple[Image.Image, Any]:
    name = f"item {index} of dataset"
    image, label = split_item(dataset[index], name=name)
    if not isinstance(image, Image.Image):
        if not hasattr(image, "__array__"):
            kind = type(image).__name__
            raise ValueError(
                f"the image of {name} is of the type {kind}, not a PIL image, an array or a tensor;"
                " open a file with PIL.Image.open"
            )
        image = convert_pixels(image, name=name)
    rgb = next(list_images(image))
    assert not isinstance(rgb, str)
    return rgb, label


def _as_plain(label: Any) -> Any:
    """Return a label as a text, a whole number or a list; others as they are."""
    if hasattr(label, "tolist"):
        label = label.tolist()
    if isinstance(label, list | tuple | set | frozenset):
        return [_as_plain(each) for each in label]
    if isinstance(label, bool | float) and label == label // 1:
        return int(label)
    return label


def _name_labels(
    labels: Sequence[Any],
    class_names: Sequence[str] | None,
    numbered_classes: Sequence[str] | None,
    *,
    task: str | None,
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the class of each image by its name, or its labels, a tuple; and the names of all."""
    known = class_names or numbered_classes
    if task != "classes" and all(isinstance(label, list) for label in labels):
        if task is None and all(sum(map(bool, label)) == 1 for label in labels):
            text = f"each label of dataset is a list of one, such as {shorten(repr(labels[0]))}"
            raise ValueError(f"{text}; pass its index or name, or set data.task=multilabel")
        return _name_sets(labels, known)
    if task != "multilabel" and all(isinstance(label, str) for label in labels):
        names = sort_class_names(labels)
        # the model's order, if it knows all labels, so that evaluations can be compared
        if known is not None and (class_names is not None or set(names) <= set(known)):
            names = tuple(known)
        _check_known(labels, names)
        return list(labels), names
    wrong = next((label for label in labels if not isinstance(label, int)), None)
    if wrong is not None or task == "multilabel":
        raise ValueError(
            "the labels of dataset are not all integers from 0, class names, or lists of them, or"
            f" rows of 0 and 1, for several labels; one is {shorten(repr(wrong))}"
        )
    used = sorted(set(labels))
    # without names, the labels count the classes
    names = tuple(known or (f"class {label}" for label in used))
    if used[0] < 0 or used[-1] >= len(names):
        raise ValueError(
            f"the labels of dataset are {shorten(', '.join(map(str, used)))}, not 0 to"
            f" {len(names) - 1}; name each class, or number them as"
            " numpy.unique(labels, return_inverse=True)[1] does"
        )
    return [names[label] for label in labels], names


def _name_sets(
    labels: Sequence[Any], known: Sequence[str] | None
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the names of the labels of each image, and of all labels."""
    each = [value for label in labels for value in label]
    if all(isinstance(value, str) for value in each):
        names = tuple(known or sorted(set(each)))
        _check_known(each, names)
        return [tuple(dict.fromkeys(label)) for label in labels], names
    count = len(labels[0])
    names = tuple(known or (f"class {place}" for place in range(count)))
    are_rows = set(each) <= {0, 1} and {len(label) for label in labels} == {len(names)}
    if not are_rows:
        raise ValueError(
            f"the labels of dataset are {shorten(repr(labels[0]))}, not rows of 0 and 1 with a"
            f" number for each of {len(names)} labels, nor lists of names"
        )
    return [tuple(names[place] for place in np.flatnonzero(label)) for label in labels], names


def _check_known(labels: Sequence[str], names: Sequence[str]) -> None:
    unknown = sorted(set(labels) - set(names))
    if unknown:
        text = f"the label {unknown[0]!r} of dataset is not one of its classes"
        raise ValueError(f"{text} {shorten(', '.join(names))}")
