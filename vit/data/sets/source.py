"""Labelled images that can be read one by one, and what the finders of data sets give."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from PIL import Image

from vit.data.images import check_header, open_image
from vit.runtime.arguments import shorten

# split → what its folder, its shards or the value in a table may be called
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
SPLIT_OF = {name: split for split, names in SPLIT_NAMES.items() for name in names}
Value = TypeVar("Value")


@runtime_checkable
class ImageReader(Protocol):
    """Reads the images of a source, wherever they are stored."""

    in_process: ClassVar[bool] = False  # is used in this process alone: pixels already, or a program's own objects

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        """The RGB image, as `vit.data.images.open_image` gives it; raises ValueError or OSError naming it when it can't
        be decoded."""

    def fetch(self, indices: Iterable[int]) -> None:
        """Get images of object storage together, before they are opened; others are at hand. Raises RemoteError."""
        return

    @property
    def remote_shards(self) -> np.ndarray | None:
        """The shard of each image, int64 [n], where they are in object storage."""
        return None

    def cache_key(self) -> bytes:
        """Bytes that change when an image changes, found without decoding any."""

    def subset(self, indices: np.ndarray) -> ImageReader:
        """These images in this order, and nothing else: it may be sent to another process."""

    def take(self, indices: np.ndarray) -> ImageReader:
        """`subset` for a batch of these images, which is read as all of them are."""
        return self.subset(indices)


@runtime_checkable
class StoredReader(ImageReader, Protocol):
    """Images in files, which training may decode as it needs them: they are listed without reading them."""

    def check(self, index: int) -> None:
        """Read format and size alone, where that is quick; raises as `open`."""
        return

    def sizes(self) -> np.ndarray:
        """Bytes of each image's file, int64 [n]; -1 for one that isn't there."""


@dataclass(frozen=True, eq=False)
class ArrayReader(ImageReader):
    """Images that are already pixels: uint8 [n, H, W, 3]."""

    pixels: np.ndarray
    in_process: ClassVar[bool] = True

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        return nullcontext(Image.fromarray(self.pixels[index]))

    def cache_key(self) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).digest()

    def subset(self, indices: np.ndarray) -> ArrayReader:
        return ArrayReader(self.pixels[indices])


@dataclass(frozen=True, eq=False)
class FileReader(StoredReader):
    """Image files below a root."""

    root: Path
    paths: Sequence[str]  # relative to the root

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        return open_image(self.root / self.paths[index])

    def check(self, index: int) -> None:
        check_header(self.root / self.paths[index])

    def sizes(self) -> np.ndarray:
        return self._measure()[:, 0]

    def cache_key(self) -> bytes:
        return self._measure().tobytes()

    def _measure(self) -> np.ndarray:
        """Bytes and time of each file, int64 [n, 2]."""
        root = os.fspath(self.root)
        return np.array([_measure(os.path.join(root, path)) for path in self.paths], dtype=np.int64).reshape(-1, 2)

    def subset(self, indices: np.ndarray) -> FileReader:
        return FileReader(self.root, [self.paths[index] for index in indices])


def _measure(path: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError:  # a link to nothing: it can't be read, and is named when it is tried
        return -1, 0
    return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageSource:
    """Labelled images of one split. Each id is a path below the root, or such as "test/00012"."""

    name: str
    split: str = "all"
    class_names: tuple[str, ...]
    labels: np.ndarray  # int64 [n]
    ids: Sequence[str]
    reader: ImageReader
    notes: tuple[str, ...] = ()  # what the user should know: files ignored, a split under another name

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        """The RGB image at `index`, whose pixels count among those in flight until the context ends; raises ValueError
        or OSError naming it when it can't be decoded."""
        return self.reader.open(index)

    def read(self, index: int) -> Image.Image:
        """`open` for an image that is the only one, or known to be small."""
        with self.open(index) as image:
            return image

    def sample(self, count: int) -> Iterator[Image.Image]:
        """At most `count` images, evenly spaced, without those that can't be read; raises ValueError where none can."""
        count, is_empty = min(count, len(self)), True
        chosen = self.subset([place * len(self) // count for place in range(count)])
        chosen.reader.fetch(range(count))
        for place in range(count):
            with suppress(ValueError, OSError):
                image = chosen.read(place)
                is_empty = False
                yield image
        if is_empty:
            what = f"none of {count} images of {self.name} {self.split} can be read"
            raise ValueError(f"{what}: the first is {self.ids[0]}")

    def cache_key(self) -> str:
        """A cheap cache key: changes with the files (name, size, time), labels, class names or split."""
        text = "".join(part + "\0" for part in ("\n".join(self.class_names), self.split, "\n".join(self.ids)))
        contents = text.encode(errors="surrogateescape") + self.labels.tobytes() + self.reader.cache_key()
        return hashlib.sha256(contents).hexdigest()

    def subset(self, indices: Sequence[int] | np.ndarray) -> ImageSource:
        """The images at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        ids = [self.ids[index] for index in chosen]
        return replace(self, labels=self.labels[chosen], ids=ids, reader=self.reader.subset(chosen))

    def keep_classes(self, wanted: Sequence[str] | None) -> ImageSource:
        """The images of the `wanted` classes, renumbered in the source's order; raises as `choose_classes`."""
        kept = choose_classes(self.class_names, wanted)
        numbers = {name: number for number, name in enumerate(kept)}
        renumbered = np.array([numbers.get(name, -1) for name in self.class_names])
        chosen = self.subset(np.flatnonzero(renumbered[self.labels] >= 0))
        return replace(chosen, labels=renumbered[chosen.labels].astype(np.int64), class_names=kept)


Root = Path | str | None
Classes = Sequence[str] | None
Aliases = Mapping[str, str]  # folder name → readable name


@dataclass(frozen=True)
class FindOptions:
    """What every finder of a data set is told."""

    root: Root
    classes: Classes
    cache_dir: Path
    remote_cache_gb: float = 32.0  # of shards in object storage


@dataclass(frozen=True)
class FoundSplit:
    """A split that a data set has of its own; `load` lists its images."""

    origin: str  # where they are, as a name in a sentence: "train/"
    load: Callable[[], ImageSource]


FoundSplits = Mapping[str, FoundSplit]  # "train", "validation", "test", those that there are


def take_validation_as_test(splits: Mapping[str, Value]) -> dict[str, Value]:
    """A validation split without a test split, as in ImageNet, is the test split."""
    known = set(splits)
    return {"test" if split == "validation" and "test" not in known else split: splits[split] for split in splits}


def check_label(label: Any, *, origin: str) -> str:
    """The class that a table names, a text or a whole number, as text."""
    if isinstance(label, list | tuple | dict | np.ndarray):
        raise ValueError(f"{origin}: label {shorten(str(label))} is several labels; an image has one class here")
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        raise ValueError(f"{origin}: label {shorten(repr(label))} is neither a text nor a whole number")
    return str(label)


def join_sources(sources: Sequence[ImageSource]) -> ImageSource:
    """One source of the images of several, which name the same classes."""
    first = sources[0]
    assert all(source.class_names == first.class_names for source in sources)
    if len(sources) == 1:
        return replace(first, split="all")
    places = [(number, index) for number, source in enumerate(sources) for index in range(len(source))]
    labels = np.concatenate([source.labels for source in sources])
    ids = [name for source in sources for name in source.ids]
    reader = _JoinedReader([source.reader for source in sources], np.array(places, dtype=np.int64))
    notes = tuple(dict.fromkeys(note for source in sources for note in source.notes))
    return replace(first, split="all", labels=labels, ids=ids, reader=reader, notes=notes)


@dataclass(frozen=True, eq=False)
class _JoinedReader(ImageReader):
    readers: Sequence[ImageReader]
    places: np.ndarray  # int64 [n, 2]: reader, index in it

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        reader, place = self.places[index]
        return self.readers[int(reader)].open(int(place))

    def fetch(self, indices: Iterable[int]) -> None:
        chosen = self.places[list(indices)]
        for number, reader in enumerate(self.readers):
            reader.fetch(chosen[chosen[:, 0] == number, 1].tolist())

    def cache_key(self) -> bytes:
        return b"".join([reader.cache_key() for reader in self.readers]) + self.places.tobytes()

    def subset(self, indices: np.ndarray) -> _JoinedReader:
        chosen = self.places[indices]
        places, readers = chosen.copy(), []
        for number, reader in enumerate(self.readers):
            own = chosen[:, 0] == number
            readers.append(reader.subset(chosen[own, 1]))
            places[own, 1] = np.arange(own.sum())
        return _JoinedReader(readers, places)


def choose_classes(class_names: Sequence[str], wanted: Classes, *, aliases: Aliases | None = None) -> tuple[str, ...]:
    """The `wanted` of `class_names`, by name or alias, in their order; all for None; ValueError for unknown or < 2."""
    if wanted is None:
        return tuple(class_names)
    spellings = {name: name for name in class_names}
    spellings |= {other: name for name, other in (aliases or {}).items() if name in spellings}
    if unknown := [name for name in wanted if name not in spellings]:
        known = ", ".join(list(spellings)[:20]) + (", …" if len(spellings) > 20 else "")
        raise ValueError(f"unknown class {unknown[0]!r} in data.classes; known: {known}")
    chosen = {spellings[name] for name in wanted}
    if len(chosen) < 2:
        raise ValueError(f"data.classes {', '.join(wanted)} is {len(chosen)} class; a classifier needs at least two")
    return tuple(name for name in class_names if name in chosen)
