"""Images that are passed from Python, as arrays or sets of items, become data sets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.data.class_names import check_classes, sort_class_names
from vit.data.images import list_images
from vit.data.python_images import convert_pixels, split_item
from vit.data.sources.base import SPLIT_OF, ImageReader, hash_stored
from vit.data.sources.listing import Listing, as_labels
from vit.runtime.arguments import as_tuple, shorten

# data.name of such a run
FROM_PYTHON = "from-python"


class ItemReader(ImageReader):
    """The images of sets whose items are (image, label). `places` has the number of the set, the
    place in it, and the hash of the image, by which the cache knows it, uint64 [n, 3]."""

    def __init__(self, sets: Sequence[Any], names: Sequence[str], places: np.ndarray) -> None:
        super().__init__(names, places)
        self._sets = sets
        # rows of tables on disk can be sent to another process
        self.in_process = not all(getattr(items, "is_on_disk", False) for items in sets)

    def __getitem__(self, index: int) -> Path | bytes | Image.Image:
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
    model_classes: Sequence[str] | None = None,
    task: str | None = None,
) -> Listing:
    """List images passed from Python.

    Args:
        dataset: A set of items, see `split_item`, which is read by index; images and labels [n]; or
            a dictionary of such sets by split. For an image see `convert_pixels`, or a PIL image.
            A label is a text or a whole number; a list of names, or a row of 0 and 1, where an
            image may have several.
        class_names: Names of the classes; None takes those that the set has, its attribute
            `classes` or the features of a set of Hugging Face, or the labels that are names.
        split: Name of the split of a data set that isn't a dictionary.
        model_classes: Classes of the model that is evaluated, which are the names if there are no
            others.
        task: See `LabelRule`.

    Raises:
        ValueError: The images or labels are of another type, or the validation images have other
            classes.
    """
    parts = dataset if isinstance(dataset, Mapping) else {split: dataset}
    if not parts or {SPLIT_OF.get(name) for name in parts} & {None}:
        have = shorten(", ".join(map(str, parts)))
        raise ValueError(f"dataset is a dictionary of {have}; name its sets train, validation")
    known = class_names and as_tuple(class_names)
    if not known:
        found = list(filter(None, dict.fromkeys(map(_find_class_names, parts.values()))))
        if len(found) > 1:
            raise ValueError("the sets of dataset have different classes; pass class_names")
        known = next(iter(found), model_classes)

    sets = list(map(_list_items, parts.values()))
    labels: list[Any] = []
    places: list[tuple[int, int, int]] = []
    splits: list[str] = []
    for number, (name, items) in enumerate(zip(parts, sets, strict=True)):
        # every item is read now, for its label and for the hash by which the image is known
        for index in range(len(items)):
            image, label = _read_item(items, index)
            labels.append(_as_plain(label))
            places.append((number, index, hash_stored(image)))
            splits.append(SPLIT_OF[name])
    if not labels:
        raise ValueError("dataset holds no images; pass at least one")
    named, names = _name_labels(labels, known, task=task)
    # a model that is evaluated knows its classes already
    if model_classes is None and "train" in splits:
        pairs = zip(named, splits, strict=True)
        used = {each for label, name in pairs if name == "train" for each in as_tuple(label)}
        check_classes(sorted(used), origin="dataset")
    ids = [f"{name}/{place[1]:06d}" for name, place in zip(splits, places, strict=True)]
    return Listing(
        name=FROM_PYTHON,
        origin="dataset",
        labels=named,
        reader=ItemReader(sets, ids, np.array(places, dtype=np.uint64)),
        splits=splits,
        keeps_validation=True,
        class_names=names,
    )


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


def find_feature_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of the classes in a feature of Hugging Face, one class or a list of them;
    None if it has none."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else tuple(map(str, names))


def _list_items(part: Any) -> Any:
    """Return a set of items that has a length and is read by index."""
    if isinstance(part, tuple) and len(part) == 2:
        images, labels = part
        if len(images) != len(labels):
            counts = f"{len(images)} images and {len(labels)} labels"
            raise ValueError(
                f"dataset holds {counts}; pass a label for each image, and validation images as"
                ' {"train": …, "validation": …}'
            )
        return list(zip(images, labels, strict=True))
    # pandas' DataFrame is read by its columns
    is_table = isinstance(part, str | bytes | Mapping) or hasattr(part, "iloc")
    if is_table or not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        raise ValueError(
            f"dataset is of the type {type(part).__name__}, not (images, labels) nor a data set of"
            " torch; pass list(…) of items, and read a table from its file (data.root=TABLE.csv)"
        )
    return part


def _read_item(items: Any, index: int) -> tuple[bytes | Image.Image, Any]:
    """Return the image of an item, as RGB or as the bytes of its file, and its label."""
    name = f"item {index} of dataset"
    image, label = split_item(items[index], name=name)
    if isinstance(image, bytes):
        return image, label
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
    """Return a label of an array or a tensor as a text, a whole number or a list."""
    if hasattr(label, "tolist"):
        label = label.tolist()
    if isinstance(label, tuple | list | set):
        return list(map(_as_plain, label))
    return label


def _name_labels(
    labels: Sequence[Any], known: Sequence[str] | None, *, task: str | None
) -> tuple[list[Any], tuple[str, ...]]:
    """Return the class of each image by its name, or its labels, a tuple; and the names of all."""
    are_sets = task != "classes" and all(isinstance(label, list) for label in labels)
    each = [value for label in labels for value in label] if are_sets else labels
    are_names = all(isinstance(value, str) for value in each)
    are_numbers = all(isinstance(value, int) for value in each)
    if not (are_names or are_numbers) or (task == "multilabel" and not are_sets):
        wrong = next((label for label in labels if not isinstance(label, int | str)), labels[0])
        raise ValueError(
            "the labels of dataset are not all integers from 0, class names, or lists of them, or"
            f" rows of 0 and 1, for several labels; one is {shorten(repr(wrong))}"
        )
    if are_names:
        names = tuple(known or (sorted(set(each)) if are_sets else sort_class_names(each)))
        if unknown := sorted(set(each) - set(names)):
            text = f"the label {unknown[0]!r} of dataset is not one of its classes"
            raise ValueError(f"{text} {shorten(', '.join(names))}")
        return [as_labels(label) if are_sets else label for label in labels], names
    if not are_sets:
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
    names = tuple(known or (f"class {place}" for place in range(len(labels[0]))))
    if not set(each) <= {0, 1} or {len(label) for label in labels} != {len(names)}:
        raise ValueError(
            f"the labels of dataset are {shorten(repr(labels[0]))}, not rows of 0 and 1 with a"
            f" number for each of {len(names)} labels, nor lists of names"
        )
    if task is None and all(sum(label) == 1 for label in labels):
        text = f"each label of dataset has a single 1, such as {shorten(repr(labels[0]))}"
        raise ValueError(f"{text}; pass its index or name, or set data.task=multilabel")
    return [tuple(names[place] for place in np.flatnonzero(label)) for label in labels], names
