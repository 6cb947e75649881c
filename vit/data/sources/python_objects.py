"""Images that are passed from Python, as arrays or sets of items, become data sets."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from PIL import Image

from vit.data.images import IMAGE_KEYS, LABEL_KEYS, find_key, open_pixels
from vit.data.sources.base import SPLIT_OF, ImageReader, Listing, hash_stored
from vit.runtime.arguments import as_tuple, shorten

# data.name of such a run
FROM_PYTHON = "from-python"


class ItemReader(ImageReader):
    """The images of sets of items. `places` has the number of the set, the place in it, and the
    hash of the image, uint64 [n, 3]."""

    def __init__(self, sets: Sequence[Any], names: Sequence[str], places: np.ndarray) -> None:
        super().__init__(names, places)
        self._sets = sets
        # rows of tables on disk can be sent to another process
        self.in_process = not all(getattr(items, "is_on_disk", False) for items in sets)

    def __getitem__(self, index: int) -> bytes | Image.Image:
        number, place, _ = self.places[index].tolist()
        return _read_item(self._sets[number], place)[0]

    def digest(self, index: int) -> int:
        return int(self.places[index, 2])


def find_python_objects(
    dataset: Any,
    class_names: Sequence[str] | None,
    *,
    split: str = "train",
    model_classes: Sequence[str] | None = None,
    task: str | None = None,
) -> Listing:
    """List images passed from Python. Raises ValueError if they or their labels are of another type
    than these, or sets have different classes.

    Args:
        dataset: A set of items that is read by index, pairs (image, label) or dictionaries with the
            keys image (img) and label (labels, class); images and labels [n]; or a dictionary of
            such sets by split. An image is one of PIL, or see `convert_pixels`. A label is the name
            or the number of a class, or a list of names.
        class_names: None takes those that the set has, see `find_class_names`, or else the
            `model_classes`, or the labels.
        split: The split of a set that is in no dictionary.
    """
    parts = dataset
    if not isinstance(dataset, Mapping):
        parts = {split: dataset}
    if not parts or not parts.keys() <= SPLIT_OF.keys():
        have = shorten(", ".join(map(str, parts)))
        raise ValueError(f"dataset is a dictionary of {have}; name its sets train, validation")
    found = {names for names in map(find_class_names, parts.values()) if names}
    if len(found) > 1 and not class_names:
        raise ValueError("the sets of dataset have different classes; pass class_names")
    known: Sequence[str] = as_tuple(class_names or next(iter(found), model_classes) or ())

    sets = list(map(_list_items, parts.values()))
    labels: list[Any] = []
    places: list[tuple[int, int, int]] = []
    splits: list[str] = []
    ids: list[str] = []
    for number, (name, items) in enumerate(zip(parts, sets, strict=True)):
        # every item is read now, for its label and for the hash by which the image is known
        for index in range(len(items)):
            image, label = _read_item(items, index)
            labels.append(_as_plain(label))
            places.append((number, index, hash_stored(image)))
            splits.append(SPLIT_OF[name])
            ids.append(f"{SPLIT_OF[name]}/{index:06d}")
    if not labels:
        raise ValueError("dataset holds no images; pass at least one")
    named, known = _name_labels(labels, known, task=task)
    return Listing(
        labels=named,
        reader=ItemReader(sets, ids, np.array(places, dtype=np.uint64)),
        splits=splits,
        keeps_validation=True,
        class_names=known,
    )


def find_class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return the class names that a set of torch or Hugging Face has, or the set that a Subset is
    of."""
    names = getattr(dataset, "classes", None)
    features = getattr(dataset, "features", None)
    if names is None and isinstance(features, Mapping):
        feature = next((features[key] for key in LABEL_KEYS if key in features), None)
        # a list has the feature of each of its values
        names = getattr(getattr(feature, "feature", feature), "names", None)
    if names is not None:
        return tuple(map(str, names))
    if hasattr(dataset, "dataset"):
        return find_class_names(dataset.dataset)
    return None


def _list_items(part: Any) -> Any:
    """Return a set of items that has a length and is read by index."""
    if isinstance(part, tuple) and len(part) == 2:
        images, labels = part
        if len(images) != len(labels):
            raise ValueError(
                f"dataset holds {len(images)} images and {len(labels)} labels; pass a label for"
                ' each image, and validation images as {"train": …, "validation": …}'
            )
        return list(zip(images, labels, strict=True))
    # pandas' DataFrame is read by its columns
    is_table = isinstance(part, Mapping) or hasattr(part, "iloc")
    if is_table or not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        raise ValueError(
            f"dataset is of the type {type(part).__name__}, not (images, labels) nor a data set of"
            " torch; pass list(…) of items, or the file of a table as data"
        )
    return part


def _read_item(items: Any, index: int) -> tuple[bytes | Image.Image, Any]:
    """Return the image of an item, as RGB or as the bytes of its file, and its label."""
    name, item = f"item {index} of dataset", items[index]
    if isinstance(item, Mapping):
        item = [item[find_key(item, keys, name=name)] for keys in (IMAGE_KEYS, LABEL_KEYS)]
    if not isinstance(item, tuple | list) or len(item) != 2:
        expected = "a pair (image, label) or a dictionary with these keys"
        raise ValueError(f"{name} is of the type {type(item).__name__}, not {expected}")
    image, label = item
    if not isinstance(image, bytes):
        image = open_pixels(image, name=name)
    return image, label


def _as_plain(label: Any) -> Any:
    """Return a label of an array or a tensor as a text, a whole number or a list."""
    if hasattr(label, "tolist"):
        label = label.tolist()
    if isinstance(label, tuple | list | set):
        return list(map(_as_plain, label))
    return label


def _name_labels(
    labels: Sequence[Any], known: Sequence[str], *, task: str | None
) -> tuple[Sequence[Any], Sequence[str]]:
    """Return the class of each image by its name, or its labels, a tuple; and the known classes."""
    are_sets = task != "classes" and all(isinstance(label, list) for label in labels)
    flat = labels
    if are_sets:
        flat = list(chain.from_iterable(labels))
        labels = list(map(tuple, labels))
        known = known or sorted(set(flat))
    elif task != "multilabel" and all(isinstance(label, int) for label in labels):
        # without names, the labels count the classes
        known = known or [f"class {place}" for place in range(len(set(labels)))]
        if 0 <= min(labels) <= max(labels) < len(known):
            labels = flat = [known[label] for label in labels]
    is_wrong = task == "multilabel" and not are_sets
    if is_wrong or not all(isinstance(value, str) for value in flat):
        values = shorten(", ".join(sorted(set(map(repr, flat)))))
        raise ValueError(
            f"the labels of dataset are {values}, not class names nor integers that count the"
            " classes from 0, or for several labels lists of their names, such as"
            " [[names[place] for place in row.nonzero()[0]] for row in marks]"
        )
    unknown = sorted(set(flat) - set(known))
    if known and unknown:
        text = f"the label {unknown[0]!r} of dataset is not one of its classes"
        raise ValueError(f"{text} {shorten(', '.join(known))}")
    return labels, known
