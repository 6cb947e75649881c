"""The list that every source gives, and the splits that are made of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np

from vit.data.class_names import (
    ClassChoice,
    check_labels,
    find_alike,
    number_labels,
    sort_class_names,
)
from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.label_sets import mark_splits
from vit.data.sources.base import ImageReader
from vit.runtime.arguments import shorten


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a source in all of its splits, as they are found.

    Attributes:
        name: The data.name.
        origin: Name of the list, at the start of messages.
        ids: Path below the root, or a name such as "test/00012", of each image.
        labels: Class of each image, a text; or the names of its labels, a tuple, where an image may
            have several.
        reader: Decodes the images.
        splits: "train", "validation" or "test" for each image; None: all are "train".
        origins: Split → the place of its images, as in a sentence.
        class_names: Names of all classes in their order; None: those that occur.
        groups: Group of each image; None: each image is its own.
        columns: Values of each column of the table that lists the images.
        read: How the list was read, for the plan.
        notes: Warnings for the user.
        unused: Number of files that aren't used, by suffix or description.
    """

    name: str
    origin: str
    ids: Sequence[str]
    labels: Sequence[str] | Sequence[tuple[str, ...]]
    reader: ImageReader
    splits: Sequence[str] | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    class_names: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    columns: Mapping[str, Sequence[Any]] | None = None
    read: Sequence[str] = ()
    notes: Sequence[str] = ()
    unused: Mapping[str, int] = field(default_factory=dict)


def build_splits(listing: Listing, classes: ClassChoice) -> SourceSplits:
    """Number the classes of a list, and divide it into its splits.

    Args:
        listing: The list.
        classes: Classes to keep; None keeps all.

    Raises:
        ValueError: There are fewer than two classes, or a class has no training images.
    """
    if not len(listing.ids):
        raise ValueError(f"{listing.origin} lists no images; check it")
    splits = np.array(listing.splits or ["train"] * len(listing.ids))
    names = listing.class_names or find_names(listing.labels)
    labels, notes = number_classes(listing, splits, names, classes)
    everything = ImageDataset(
        name=listing.name,
        class_names=tuple(names),
        labels=labels,
        ids=listing.ids,
        reader=listing.reader,
        notes=(*listing.notes, *notes),
        groups=listing.groups,
        read_column=None if listing.columns is None else partial(_read_column, listing),
    )

    present = dict.fromkeys(splits.tolist())

    def load(split: str) -> ImageDataset:
        parts = present if split == "all" else [split]
        chosen = np.concatenate([np.flatnonzero(splits == part) for part in parts])
        return everything.subset(chosen).keep_classes(classes)

    origins = {split: listing.origins.get(split, listing.origin) for split in present}
    return SourceSplits(origins, load, listing.unused, listing.read)


def as_labels(values: Sequence[str]) -> tuple[str, ...]:
    """Return the labels in a list. Raises ValueError if one is there twice: the list may be a row
    of 0 and 1."""
    if len(set(values)) < len(values):
        raise ValueError(
            f"{shorten(', '.join(values), 60)} has a label twice; list the names of the labels, not 0"
            " and 1"
        )
    return tuple(values)


def find_names(labels: Sequence[Any]) -> tuple[str, ...]:
    """Return the classes or labels that occur, in order."""
    each = (label if isinstance(label, tuple) else (label,) for label in labels)
    return sort_class_names(chain.from_iterable(each))


def number_classes(
    listing: Listing, splits: np.ndarray, names: Sequence[str], classes: ClassChoice
) -> tuple[np.ndarray, list[str]]:
    """Return the class of each image, int64 [n], or which labels it has, bool [n, C]; and warnings.

    Raises:
        ValueError: See `check_labels` and `mark_splits`.
    """
    by_split = {
        split: [listing.labels[index] for index in np.flatnonzero(splits == split).tolist()]
        for split in np.unique(splits).tolist()
    }
    notes = [
        f"classes whose names differ in case or zeros alone: {' and '.join(map(repr, alike))}"
        for alike in find_alike(names)
    ]
    if any(isinstance(label, tuple) for label in listing.labels):
        marks, about_labels = mark_splits(by_split, names, origin=listing.origin)
        labels = np.zeros((len(splits), len(names)), dtype=bool)
        for split, rows in marks.items():
            labels[splits == split] = rows
        return labels, [*notes, *about_labels]
    check_labels(cast(Any, by_split), names, classes, origin=listing.origin)
    return number_labels(cast(Sequence[str], listing.labels), names), notes


def _read_column(listing: Listing, column: str) -> dict[str, Any]:
    """Read a column of the table: id of an image → its value, unless it is empty."""
    assert listing.columns is not None
    # small and large letters don't count
    column = {name.casefold(): name for name in listing.columns}.get(column.casefold(), column)
    if column not in listing.columns:
        known = shorten(", ".join(map(repr, listing.columns)), 600)
        raise ValueError(f"{listing.origin} has no column {shorten(column)!r}; they are {known}")
    pairs = zip(listing.ids, listing.columns[column], strict=True)
    return {image_id: value for image_id, value in pairs if value not in (None, "")}


def count_other_files(paths: Sequence[str], used: Sequence[str]) -> Counter[str]:
    """Count the image files that are in no list."""
    return +Counter({"images that aren't listed": len(set(paths) - set(used))})
