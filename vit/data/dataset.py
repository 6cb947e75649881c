"""Labelled images of one split, the splits of a data set, and the kinds of data sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit.data.class_names import ClassChoice, choose_classes
from vit.data.images import UNREADABLE
from vit.data.label_sets import count_labels, number_label_sets
from vit.data.sources.base import ImageReader, Root
from vit.runtime.arguments import shorten
from vit.runtime.files import expand_home

# unreadable images that an error names
_MAX_NAMED = 10


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageDataset:
    """Labelled images of one split.

    A source gives the labels, and a reader that decodes an image when it is needed.
    `vit.data.cache.decode_dataset` adds the pixels, hashes and sizes of all images, and leaves out
    unreadable images.
    """

    name: str
    split: str = "all"
    class_names: tuple[str, ...]
    # class of each image, int64 [n]; or which labels it has, bool [n, C], where it may have several
    labels: np.ndarray
    # path below the root, or a name such as "test/00012"
    ids: Sequence[str]
    # decodes the original images in full size
    reader: ImageReader
    # sentences for the user: a split under another name, files that are not images
    notes: tuple[str, ...] = ()
    # number of files that are not used, by suffix (".txt") or description ("images in …")
    unused: Mapping[str, int] = field(default_factory=dict)
    # group of each image: one group is never on both sides of a split; None: each image is a group
    groups: Sequence[str] | None = None
    # uint8 [n, H, W, 3], memory-mapped; None: decoded when needed
    pixels: np.ndarray | None = None
    # uint64 [2, n], see `vit.data.duplicates`; None: not known
    hashes: np.ndarray | None = None
    # int32 [2, n], width and height of the full-size images; None: not known
    sizes: np.ndarray | None = None
    # (id, reason) of the images that were left out
    unreadable: Sequence[tuple[str, str]] = ()
    # function that reads a column of the table that lists the images: id → value; ValueError: there
    # is no such column
    read_column: Callable[[str], Mapping[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_multilabel(self) -> bool:
        """True if an image may have several labels, or none."""
        return self.labels.ndim == 2

    @property
    def class_word(self) -> str:
        """Word for the `class_names` in a sentence."""
        return "labels" if self.is_multilabel else "classes"

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
        """Decode the image at `index` to RGB in full size.

        Raises:
            ValueError, OSError: It can't be decoded; the message names it.
        """
        return self.reader.image(index)

    def describe_labels(self, index: int) -> str:
        """Return the class of an image, or the names of its labels."""
        if not self.is_multilabel:
            return self.class_names[int(self.labels[index])]
        places = np.flatnonzero(self.labels[index]).tolist()
        return ", ".join(self.class_names[place] for place in places) or "no label"

    def read_sample(self, indices: Iterable[int]) -> Iterator[Image.Image]:
        """Read the images at `indices` that can be read. Raises ValueError if none can."""
        # fetched together: object storage answers many requests at once
        sample = self.subset(list(indices))
        sample.reader.fetch(range(len(sample)))
        num_read = 0
        for index in range(len(sample)):
            with suppress(ValueError, OSError):
                yield sample.image(index)
                num_read += 1
        if not num_read:
            text = f"none of {len(sample)} images of {self.name} {self.split} can be read"
            raise ValueError(f"{text}; check the files, such as {self.ids[0]}")

    @property
    def digests(self) -> np.ndarray:
        """Hashes of size and pixels of decoded images, uint64 [n]."""
        assert self.hashes is not None
        digests: np.ndarray = self.hashes[0]
        return digests

    @property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 by which the images are known.

        If there are hashes, it covers class names, split and the images' labels and pixels, but not
        their names or order. JPEG files decode to the same pixels only with the same decoder:
        libjpeg versions may differ in a bit. Without hashes it covers the names of the images, too,
        in their order, and the sizes of their files.
        """
        if self.hashes is not None:
            # sorted, so that names and order of the files don't count
            labels = self.labels if self.is_multilabel else self.labels[:, None]
            pairs = np.concatenate([labels.astype(np.uint64), self.digests[:, None]], axis=1)
            ordered = pairs[np.lexsort(pairs.T)].astype("<u8")
            names = json.dumps([self.split, *self.class_names])
            names += "several labels" * self.is_multilabel
            return hashlib.sha256(names.encode() + ordered.tobytes()).hexdigest()

        # sizes instead of times, which differ on another machine
        names = json.dumps(["listed", self.split, *self.class_names, *self.ids])
        sizes = self.reader.sizes()
        contents = self.reader.cache_key() if sizes is None else sizes.astype("<i8").tobytes()
        names += "several labels" * self.is_multilabel
        facts = self.labels.astype("<i8").tobytes() + contents
        return hashlib.sha256(names.encode() + facts).hexdigest()

    def cache_key(self) -> str:
        """Hexadecimal sha256 that changes with the files (name, size, times, inode), labels, class
        names or split; found without decoding any image."""
        texts = ("\n".join(self.class_names), self.split, "\n".join(self.ids))
        names = "".join(text + "\0" for text in texts).encode(errors="surrogateescape")
        facts = self.labels.tobytes() + self.reader.cache_key()
        return hashlib.sha256(names + facts).hexdigest()

    def count_groups(self, label: int) -> int:
        """Count the groups of a class; the images, if each is its own group."""
        has_label = self.labels[:, label] if self.is_multilabel else self.labels == label
        indices = np.flatnonzero(has_label).tolist()
        return len(indices if self.groups is None else {self.groups[index] for index in indices})

    def subset(self, indices: Sequence[int] | np.ndarray) -> ImageDataset:
        """The images at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            labels=self.labels[chosen],
            ids=[self.ids[index] for index in chosen],
            reader=self.reader.subset(chosen),
            groups=None if self.groups is None else [self.groups[index] for index in chosen],
            pixels=None if self.pixels is None else self.pixels[chosen],
            hashes=None if self.hashes is None else self.hashes[:, chosen],
            sizes=None if self.sizes is None else self.sizes[:, chosen],
        )

    def keep_classes(self, classes: ClassChoice) -> ImageDataset:
        """Keep the images of `classes` (None: all), with labels in the order of `class_names`. Where
        images have several labels, all images and these labels. Raises the errors of
        `choose_classes`."""
        class_names = choose_classes(self.class_names, classes)
        if self.is_multilabel:
            places = [self.class_names.index(name) for name in class_names]
            return replace(self, labels=self.labels[:, places], class_names=class_names)
        # label before → label after, -1 for classes that are left out
        label_of = {name: label for label, name in enumerate(class_names)}
        new_labels = np.array([label_of.get(name, -1) for name in self.class_names])

        chosen = self.subset(np.flatnonzero(new_labels[self.labels] >= 0))
        return replace(chosen, labels=new_labels[chosen.labels], class_names=class_names)


class SourceSplits(NamedTuple):
    """The splits that a data set has of its own, out of "train", "validation" and "test".

    Attributes:
        origins: Split → the place of its images, as in a sentence: "train/".
        load: Function that lists the images of a split.
        unused: Number of files outside the splits that are not used, as in `ImageDataset`.
        guesses: How the list of the images was read, a phrase each: "label in 'breed'".
    """

    origins: Mapping[str, str]
    load: Callable[[str], ImageDataset]
    unused: Mapping[str, int] = MappingProxyType({})
    guesses: Sequence[str] = ()

    def with_test_split(self) -> SourceSplits:
        """Make a validation split without a test split, as in ImageNet, the test split."""
        origins = dict(self.origins)
        if "validation" not in origins or "test" in origins:
            return self
        origins["test"] = origins.pop("validation")
        note = f"{origins['test']} is the test split; validation images are held out of the others"

        def load(split: str) -> ImageDataset:
            dataset = self.load("validation" if split == "test" else split)
            return replace(dataset, notes=(*dataset.notes, note))

        return self._replace(origins=origins, load=load)


def join_datasets(datasets: Sequence[ImageDataset]) -> ImageDataset:
    """Join datasets as the split "all". Raises ValueError if they don't have the same classes."""
    first = datasets[0]
    for other in datasets:
        if other.class_names != first.class_names:
            texts = (shorten(", ".join(dataset.class_names)) for dataset in (first, other))
            names = " and ".join(texts)
            raise ValueError(f"the splits of {first.name} have other classes: {names}")
    if len(datasets) == 1:
        return replace(first, split="all")

    places = [
        np.stack([np.full(len(dataset), number), np.arange(len(dataset))], axis=1)
        for number, dataset in enumerate(datasets)
    ]
    readers = [dataset.reader for dataset in datasets]
    notes = [note for dataset in datasets for note in dataset.notes]
    groups = None
    if any(dataset.groups is not None for dataset in datasets):
        groups = [group for dataset in datasets for group in dataset.groups or dataset.ids]
    return replace(
        first,
        split="all",
        labels=np.concatenate([dataset.labels for dataset in datasets]),
        ids=[name for dataset in datasets for name in dataset.ids],
        reader=_JoinedReader(readers, np.concatenate(places)),
        groups=groups,
        notes=tuple(dict.fromkeys(notes)),
        read_column=partial(_read_joined_column, datasets) if first.read_column else None,
    )


def _read_joined_column(datasets: Sequence[ImageDataset], column: str) -> dict[str, Any]:
    """Read a column of datasets with different ids."""
    values: dict[str, Any] = {}
    for read in {dataset.read_column for dataset in datasets if dataset.read_column}:
        values |= read(column)
    return values


@dataclass(frozen=True, eq=False)
class _JoinedReader(ImageReader):
    readers: Sequence[ImageReader]
    # int64 [n, 2], the number of each image's reader and its index there
    places: np.ndarray

    def image(self, index: int) -> Image.Image:
        reader, place = self._find(index)
        return reader.image(place)

    def decode(self, index: int) -> Image.Image | np.ndarray:
        reader, place = self._find(index)
        return reader.decode(place)

    def thumbnail(self, index: int, *, side: int) -> Image.Image:
        reader, place = self._find(index)
        return reader.thumbnail(place, side=side)

    def path(self, index: int) -> str | None:
        reader, place = self._find(index)
        return reader.path(place)

    def _find(self, index: int) -> tuple[ImageReader, int]:
        number, place = self.places[index].tolist()
        return self.readers[number], place

    def fetch(self, indices: Iterable[int]) -> None:
        places = self.places[list(indices)]
        for number, reader in enumerate(self.readers):
            reader.fetch(places[places[:, 0] == number, 1].tolist())

    def __len__(self) -> int:
        return len(self.places)

    @property
    def place(self) -> str:
        places = {reader.place for reader in self.readers}
        return places.pop() if len(places) == 1 else ""

    def stats(self) -> np.ndarray | None:
        parts = [reader.stats() for reader in self.readers]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        stats = np.zeros((len(self), 4), dtype=np.int64)
        for number, part in enumerate(known):
            is_own = self.places[:, 0] == number
            stats[is_own] = part[self.places[is_own, 1]]
        return stats

    def digest(self, index: int) -> int:
        reader, place = self._find(index)
        return reader.digest(place)

    def cache_key(self) -> bytes:
        keys = [reader.cache_key() for reader in self.readers]
        return b"".join(keys) + self.places.tobytes()

    def subset(self, indices: np.ndarray) -> _JoinedReader:
        # each reader is cut to its own images, which are then counted from 0
        places = self.places[indices]
        readers = []
        for number, reader in enumerate(self.readers):
            chosen = places[:, 0] == number
            readers.append(reader.subset(places[chosen, 1]))
            places[chosen, 1] = np.arange(chosen.sum())
        return _JoinedReader(readers, places)


def choose_evenly(count: int, num_chosen: int) -> list[int]:
    """Return at most `num_chosen` evenly spaced indices of `count`."""
    num_chosen = min(num_chosen, count)
    return [place * count // num_chosen for place in range(num_chosen)]


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def check_unreadable(unreadable: Sequence[tuple[str, str]], count: int, fraction: float) -> None:
    """Raise ValueError if too many images can't be read, or none can.

    Args:
        unreadable: (id, reason) of each image that can't be read.
        count: Number of all images.
        fraction: Fraction of the images that may be unreadable, 0 to 1.
    """
    num_unreadable = len(unreadable)
    if num_unreadable > fraction * count or num_unreadable == count:
        others = [
            f"{name}: {reason.partition(UNREADABLE)[2] or reason}"
            for name, reason in unreadable[1:_MAX_NAMED]
        ]
        if num_unreadable > _MAX_NAMED:
            others.append(f"{num_unreadable - _MAX_NAMED} more")
        also = f"; also {', '.join(others)}" if others else ""
        raise ValueError(
            f"{num_unreadable} of {count} images can't be read, more than the allowed fraction of"
            f" {fraction}; the first is {': '.join(unreadable[0])}{also}"
        )


class LabelRule(NamedTuple):
    """How the class of an image is found, where the user says so.

    Attributes:
        label_by: Regular expression with one group, which is searched in the path of an image: the
            class is the group's text.
        path_column: Column of a table that names the image files.
        label_column: Column of a table that names the classes.
        task: "classes" for one class an image, "multilabel" for any number of labels; None: as the
            labels look.
    """

    label_by: str | None = None
    path_column: str | None = None
    label_column: str | None = None
    task: str | None = None


class Request(NamedTuple):
    """The images that a source is asked for.

    Attributes:
        root: Place of the images, `data.root`.
        classes: Classes to keep, by name; None keeps all.
        cache_dir: Folder for downloads and for what is read once.
        allow_outside: A table may name images outside its folder.
        download: A published set that isn't on this machine may be downloaded.
        labels: How the class of an image is found.
    """

    root: Root
    classes: ClassChoice
    cache_dir: Path
    allow_outside: bool = False
    download: bool = True
    labels: LabelRule = LabelRule()

    @property
    def place(self) -> Path:
        """The root of a source that needs one."""
        assert self.root is not None
        return expand_home(self.root)


@dataclass(frozen=True)
class Source:
    """A kind of data set, for `vit.register_source`.

    Args:
        name: The `data.name` of the data set.
        find: Function that finds the splits of a request: `request.root` is the
            place of the images, `request.classes` are the classes to keep, and
            it returns a `vit.data.dataset.SourceSplits`.
        recognizes: Function that is true for a path, pattern or address of such
            images: users then name their images by it. None for a data set that
            is known only by its name.
        needs_root: The data set can't be found without `data.root`.
        is_here: Function that is true if the images at a root can be read
            without a download.
        unit: Word for the images in messages, "files" or "rows"; empty for a
            published data set, whose images aren't counted.

    Example:
        >>> source = vit.Source("colours", find_colours, needs_root=True)
        >>> vit.register_source(source)
    """

    name: str
    find: Callable[[Request], SourceSplits]
    recognizes: Callable[[str], bool] | None = None
    needs_root: bool = False
    is_here: Callable[[Root], bool] = lambda root: False
    unit: str = ""


def root_exists(root: Root) -> bool:
    """Return true if there is something at a root on this machine."""
    return root is not None and Path(root).exists()
