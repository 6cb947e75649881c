"""Labelled images of one split, and the rule by which the images of a source are found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from PIL import Image

from vit.data.label_sets import count_labels, number_label_sets
from vit.data.patterns import search_group
from vit.data.sources.base import ImageReader
from vit.runtime.arguments import check_choice, shorten

# fields of `ImageRule` that are for folders and tables alone
LABEL_FIELDS = ("label_by", "path_column", "label_column", "split_column", "group_column")


@dataclass(frozen=True, eq=False)
class DecodedPixels:
    """Pixels of decoded images, uint8 [n, H, W, 3]: rows, int64 [n], of memory-mapped ones that may
    be of other images, too."""

    stored: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice) -> np.ndarray:
        return np.asarray(self.stored[self.rows[index]])

    def subset(self, indices: np.ndarray) -> DecodedPixels:
        """The images at `indices`, in that order."""
        return replace(self, rows=self.rows[indices])


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageDataset:
    """Labelled images of one split. `vit.data.cache.decode_dataset` adds the pixels and hashes of
    all images, and leaves out unreadable images."""

    name: str
    split: str = "all"
    class_names: tuple[str, ...]
    # class of each image, int64 [n]; or which labels it has, bool [n, C], where it may have several
    labels: np.ndarray
    # path below the root, or a name such as "test/00012"
    ids: Sequence[str]
    # decodes the original images in full size
    reader: ImageReader
    # warnings for the user: a split under another name, classes that a split lacks
    notes: tuple[str, ...] = ()
    # group of each image: one group is never on both sides of a split; None: each image is a group
    groups: Sequence[str] | None = None
    # None: decoded when needed
    pixels: DecodedPixels | None = None
    # uint64 [2, n], see `vit.data.duplicates`; None: not known
    hashes: np.ndarray | None = None
    # (id, reason) of the images that were left out
    unreadable: Sequence[tuple[str, str]] = ()
    # id of an image → its row of the table that lists the images
    rows: Mapping[str, Mapping[str, str]] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_multilabel(self) -> bool:
        """True if an image may have several labels, or none."""
        return self.labels.ndim == 2

    @property
    def strata(self) -> np.ndarray:
        """The part of the data that each image stands for when splits and folds are drawn, int64
        [n]: its class, or its set of labels."""
        return number_label_sets(self.labels) if self.is_multilabel else self.labels

    @property
    def class_counts(self) -> np.ndarray:
        """Number of images of each class, or with each label, int64 [C]."""
        return count_labels(self.labels, len(self.class_names))

    def image(self, index: int) -> Image.Image:
        """Decode the image at `index` to RGB in full size. Raises ValueError or OSError."""
        return self.reader.image(index)

    def read_column(self, column: str) -> dict[str, str]:
        """Read a column of the table that lists the images: id → value, unless it is empty. Raises
        ValueError without such a column."""
        rows = self.rows or {}
        # all rows have the same columns
        known = next(iter(rows.values()), {})
        if column not in known:
            text = shorten(", ".join(map(repr, known)), 600)
            raise ValueError(f"the table has no column {shorten(column)!r}; they are {text}")
        return {name: row[column] for name, row in rows.items() if row[column]}

    def read_sample(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Read the images at `indices` that can be read. Raises ValueError if none can."""
        num_read = 0
        for index in indices:
            with suppress(ValueError, OSError):
                yield self.image(index)
                num_read += 1
        if not num_read:
            text = f"none of {len(indices)} images of {self.name} {self.split} can be read"
            raise ValueError(f"{text}; check the files, such as {self.ids[0]}")

    @property
    def digests(self) -> np.ndarray:
        """Hashes of size and pixels of decoded images, uint64 [n]."""
        assert self.hashes is not None
        return np.asarray(self.hashes[0])

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 by which the images are known.

        It covers class names, split, and the images' labels and pixels, but not their names or
        order; libjpeg versions may differ in a bit of a pixel. Without hashes it covers names and
        sizes of the files, in their order, instead of pixels.
        """
        names = [self.split, *self.class_names]
        if self.hashes is not None:
            # sorted, so that names and order of the files don't count
            pairs = np.column_stack([self.labels.astype(np.uint64), self.digests])
            facts = pairs[np.lexsort(pairs.T)].astype("<u8").tobytes()
        else:
            names = ["listed", *names, *self.ids]
            facts = self.labels.astype("<i8").tobytes()
            stats = self.reader.stats()
            # sizes instead of times, which differ on another machine
            facts += (self.reader.digests() if stats is None else stats[:, 0]).tobytes()
        text = json.dumps(names) + "several labels" * self.is_multilabel
        return hashlib.sha256(text.encode() + facts).hexdigest()

    def subset(self, indices: Sequence[int] | np.ndarray) -> ImageDataset:
        """The images at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            labels=self.labels[chosen],
            ids=[self.ids[index] for index in chosen],
            reader=self.reader.subset(chosen),
            groups=None if self.groups is None else [self.groups[index] for index in chosen],
            pixels=None if self.pixels is None else self.pixels.subset(chosen),
            hashes=None if self.hashes is None else self.hashes[:, chosen],
        )


def choose_evenly(count: int, num_chosen: int) -> list[int]:
    """Return at most `num_chosen` evenly spaced indices of `count`."""
    num_chosen = min(num_chosen, count)
    return [place * count // num_chosen for place in range(num_chosen)]


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def check_unreadable(unreadable: Sequence[tuple[str, str]], count: int, fraction: float) -> None:
    """Raise ValueError if more than a fraction of `count` images can't be read, or none can, from
    their ids and reasons."""
    if len(unreadable) > fraction * count or len(unreadable) == count:
        named = "; ".join(f"{name}: {reason}" for name, reason in unreadable[:10])
        raise ValueError(
            f"{len(unreadable)} of {count} images can't be read, more than the allowed fraction of"
            f" {fraction}: {named}"
        )


@dataclass(frozen=True, kw_only=True)
class ImageRule:
    """How the class, the group and the split of an image are found: keys of
    `vit.config.DataConfig`, which explains them. Raises ValueError for a wrong task or regular
    expression."""

    classes: Sequence[str] | None = None
    class_names: Mapping[str, str] | None = None
    label_by: str | None = None
    path_column: str | None = None
    label_column: str | None = None
    split_column: str | None = None
    group_column: str | None = None
    task: str | None = None
    group_by: int | str | None = None
    group_duplicates: bool = False
    validation_fraction: float = 0.1
    test_fraction: float = 0.2
    split_seed: int = 0

    def __post_init__(self) -> None:
        # before images are listed
        if self.task is not None:
            check_choice(self.task, ("classes", "multilabel"), name="data.task")
        if self.label_by is not None:
            search_group(self.label_by, [], name="data.label_by")
        if isinstance(self.group_by, str) and not self.group_by.isdecimal():
            search_group(self.group_by, [], name="data.group_by")

    @property
    def finds_labels(self) -> bool:
        """True if it is for a folder or a table."""
        return any(getattr(self, name) is not None for name in LABEL_FIELDS)
