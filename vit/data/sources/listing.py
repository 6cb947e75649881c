"""The list that every source gives, and the labelled images that are made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from vit.data.class_names import (
    ClassChoice,
    check_classes,
    choose_classes,
    find_wordnet_names,
    name_classes,
    sort_class_names,
)
from vit.data.dataset import ImageDataset
from vit.data.label_sets import mark_labels
from vit.data.sources.base import ImageReader
from vit.runtime.arguments import shorten


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a source in all of its splits, as they are found.

    Attributes:
        name: The data.name.
        origin: Name of the list, at the start of messages.
        labels: Class of each image, a text; or the names of its labels, a tuple, where an image may
            have several.
        reader: Decodes the images. Its names are their ids: the path below the root, or a name such
            as "test/00012".
        splits: "train", "validation" or "test" for each image; None: all are "train".
        keeps_validation: Validation without a test split stays validation. Otherwise, as in
            ImageNet, it becomes the test split.
        class_names: Names of all classes in their order; None: those that occur.
        groups: Group of each image; None: each image is its own.
        columns: Values of each column of the table that lists the images.
        read: How the list was read, and what wasn't, for the plan.
        notes: Warnings for the user.
    """

    name: str
    origin: str
    labels: Sequence[Any]
    reader: ImageReader
    splits: Sequence[str] | None = None
    keeps_validation: bool = False
    class_names: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    columns: Mapping[str, Sequence[Any]] | None = None
    read: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Images:
    """All images of a source, numbered.

    Attributes:
        dataset: The images, those of one split after the other.
        splits: Split of each image, as text [n].
        own_splits: Splits that the source has.
        renamed_classes: Class → its name in words, if it has another one.
    """

    listing: Listing
    dataset: ImageDataset
    splits: np.ndarray
    own_splits: Sequence[str]
    renamed_classes: Mapping[str, str]

    def split(self, name: str) -> ImageDataset:
        """Return the images of a split that the source has, or of "all"."""
        if name == "all":
            return self.dataset
        return self.dataset.subset(np.flatnonzero(self.splits == name))


def number_listing(
    listing: Listing,
    *,
    classes: ClassChoice = None,
    class_names: Mapping[str, str] | None = None,
) -> Images:
    """Number the classes of a list, check them, and choose those that are kept.

    Args:
        listing: The list.
        classes: Classes to keep, by their names or in words; None keeps all.
        class_names: Class → its name in words; None names WordNet's ids.

    Raises:
        ValueError: There are fewer than two classes, or a class has no training images.
    """
    ids = listing.reader.names
    if not len(ids):
        raise ValueError(f"{listing.origin} lists no images; check it")
    splits = np.array(listing.splits or ["train"] * len(ids))
    notes = list(listing.notes)
    are_sets = any(isinstance(label, tuple) for label in listing.labels)
    # labels of sets, or classes
    each = chain.from_iterable(listing.labels) if are_sets else listing.labels
    names = tuple(listing.class_names or sort_class_names(each))
    check_classes(names, origin=listing.origin)
    kept = names
    if classes is not None:
        aliases = name_classes(names, find_wordnet_names(names)) | dict(class_names or {})
        kept = choose_classes(names, classes, aliases=aliases)
    if are_sets:
        labels = mark_labels(listing.labels, names)
        labels = labels[:, [names.index(name) for name in kept]]
        chosen = np.arange(len(labels))
    else:
        # -1 for classes that are left out
        place_of = dict.fromkeys(names, -1) | {name: place for place, name in enumerate(kept)}
        labels = np.array([place_of[label] for label in listing.labels], dtype=np.int64)
        chosen = np.flatnonzero(labels >= 0)
        _check_learned(labels, splits, kept, origin=listing.origin)

    if {"validation", "test"} & set(splits) == {"validation"} and not listing.keeps_validation:
        splits[splits == "validation"] = "test"
        notes.append("val is the test split; validation images are held out of the others")
    if class_names is None:
        class_names = find_wordnet_names(kept)
    renamed = name_classes(kept, class_names) if class_names else {}
    dataset = ImageDataset(
        name=listing.name,
        class_names=tuple(renamed.get(name, name) for name in kept),
        labels=labels,
        ids=ids,
        reader=listing.reader,
        notes=tuple(notes),
        groups=listing.groups,
        read_column=None if listing.columns is None else partial(_read_column, listing),
    )
    # the images of one split after the other
    own_splits = list(dict.fromkeys(splits.tolist()))
    chosen = np.concatenate([chosen[splits[chosen] == split] for split in own_splits])
    return Images(listing, dataset.subset(chosen), splits[chosen], own_splits, renamed)


def _check_learned(
    labels: np.ndarray, splits: np.ndarray, names: Sequence[str], *, origin: str
) -> None:
    """Raise ValueError for a class that another split has, and the training images lack."""
    unknown = np.setdiff1d(labels[labels >= 0], labels[splits == "train"])
    if len(unknown) and "train" in splits:
        is_wrong = labels == unknown[0]
        raise ValueError(
            f"{origin}: class {shorten(names[unknown[0]])!r} has {int(is_wrong.sum()):,} images in"
            f" the {splits[is_wrong][0]} split and none in the train split; add some, or leave it"
            " out with data.classes"
        )


def as_labels(values: Sequence[str]) -> tuple[str, ...]:
    """Return the labels in a list. Raises ValueError if one is there twice: the list may be a row
    of 0 and 1."""
    if len(set(values)) < len(values):
        raise ValueError(
            f"{shorten(', '.join(values), 60)} has a label twice; list the names of the labels, not 0"
            " and 1"
        )
    return tuple(values)


def _read_column(listing: Listing, column: str) -> dict[str, Any]:
    """Read a column of the table: id of an image → its value, unless it is empty."""
    assert listing.columns is not None
    if column not in listing.columns:
        known = shorten(", ".join(map(repr, listing.columns)), 600)
        raise ValueError(f"{listing.origin} has no column {shorten(column)!r}; they are {known}")
    pairs = zip(listing.reader.names, listing.columns[column], strict=True)
    return {image_id: value for image_id, value in pairs if value not in (None, "")}
