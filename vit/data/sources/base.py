"""Readers of images, wherever they are stored, and what the kinds of sources have in common."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from vit.data.images import HEIF_HINT, HEIF_SUFFIXES, read_image
from vit.runtime.arguments import check_choice, shorten
from vit.runtime.files import compute_sha256, read_text

# split → what its folder, its shards or the value in a table may be called
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
SPLIT_OF = {name: split for split, names in SPLIT_NAMES.items() for name in names}

Root = Path | str | None
ClassChoice = Sequence[str] | None
# folder name → readable name
Aliases = Mapping[str, str]


@runtime_checkable
class ImageReader(Protocol):
    """Decodes the images of a dataset one by one."""

    # true if it can't be sent to another process, or needn't be: pixels, or objects from Python
    in_process: ClassVar[bool] = False
    # true if images come over a network: they are then read as training goes
    is_remote: ClassVar[bool] = False
    # true if `subset` is small enough to be sent to a worker with every batch
    has_small_subsets: ClassVar[bool] = False

    def image(self, index: int) -> Image.Image:
        """The RGB image, as `vit.data.images.read_image` gives it.

        Raises:
            ValueError, OSError: it can't be decoded; the message names it.
            RemoteError: object storage can't be reached, which says nothing about the image.
        """

    def thumbnail(self, index: int, *, side: int) -> Image.Image:
        """The image, of at least `side` pixels a side or its own; smaller where that is faster.
        Raises as `image`."""
        return self.image(index)

    def fetch(self, indices: Iterable[int]) -> None:
        """Bring images of object storage here, many at a time, before they are read. Raises
        RemoteError."""
        # others are at hand
        return

    def sizes(self) -> np.ndarray | None:
        """Bytes of each image's file, int64 [n], -1 for one that is missing; None where the images
        aren't files."""
        return None

    def cache_key(self) -> bytes:
        """Bytes that change when an image changes, found without decoding any."""

    def content_key(self) -> bytes:
        """The same from the contents alone, which are all read: for file systems whose times and
        inodes can't be trusted."""
        # whoever knows a checksum gives it already
        return self.cache_key()

    def subset(self, indices: np.ndarray) -> ImageReader:
        """These images in this order, and nothing else: it may be sent to another process."""


@dataclass(frozen=True, eq=False)
class ArrayReader(ImageReader):
    """Images that are already pixels: uint8 [n, H, W, 3]."""

    pixels: np.ndarray
    in_process = True

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])

    def cache_key(self) -> bytes:
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).digest()

    def subset(self, indices: np.ndarray) -> ArrayReader:
        return ArrayReader(self.pixels[indices])


@dataclass(frozen=True, eq=False)
class FileReader(ImageReader):
    """Image files below a root."""

    root: Path
    # relative to the root
    paths: Sequence[str]
    has_small_subsets: ClassVar[bool] = True

    def image(self, index: int) -> Image.Image:
        return read_image(self.root / self.paths[index])

    def thumbnail(self, index: int, *, side: int) -> Image.Image:
        return read_image(self.root / self.paths[index], draft_side=side)

    def sizes(self) -> np.ndarray:
        return self._read_stats()[:, 0]

    def cache_key(self) -> bytes:
        return self._read_stats().tobytes()

    def content_key(self) -> bytes:
        return hash_files(self.root / path for path in self.paths)

    def subset(self, indices: np.ndarray) -> FileReader:
        return FileReader(self.root, [self.paths[index] for index in indices])

    def _read_stats(self) -> np.ndarray:
        # joining texts is many times faster than joining paths
        root = os.fspath(self.root)
        return read_stats([os.path.join(root, path) for path in self.paths])


def read_stats(paths: Sequence[str]) -> np.ndarray:
    """Bytes, times of modification and of change in nanoseconds, and inode of each file, int64
    [n, 4]: a copy may have the size and the time of what it replaced, but not the others."""
    stats = np.zeros((len(paths), 4), dtype=np.int64)
    for index, path in enumerate(paths):
        try:
            stat = os.stat(path)
        except OSError:
            # a link to nothing: reading the image will say so
            stats[index, 0] = -1
        else:
            inode = stat.st_ino & (2**63 - 1)
            stats[index] = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, inode
    return stats


def hash_files(paths: Iterable[Path]) -> bytes:
    """SHA-256 over the contents of files; of one that can't be read its name counts."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            digest.update(compute_sha256(path).encode())
        except OSError:
            digest.update(os.fsencode(path))
    return digest.digest()


def find_split_folders(root: Path) -> dict[str, Path]:
    """Split → the folder below `root` that has its name.

    Raises:
        ValueError: two folders have names of the same split.
    """
    folders: dict[str, Path] = {}
    for entry in sorted(root.iterdir()):
        split = SPLIT_OF.get(entry.name.lower())
        if split is None or not entry.is_dir():
            continue
        if split in folders:
            text = f"{root} holds {folders[split].name}/ and {entry.name}/"
            raise ValueError(f"{text}, both names of the {split} split; merge or rename one")
        folders[split] = entry
    return folders


def count_suffixes(paths: Iterable[str]) -> Counter[str]:
    """How many files there are of each suffix, in small letters: ".heic" → 9."""
    counts: Counter[str] = Counter()
    for path in paths:
        name = os.path.basename(path)
        suffix = os.path.splitext(name)[1].lower()
        if name.startswith("."):
            counts["hidden"] += 1
        else:
            counts[suffix or "suffixless"] += 1
    return counts


def describe_counts(counts: Mapping[str, int]) -> str:
    """Such as ".heic 9, .txt 3": what there is most of first, and how HEIC is read."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{name} {count:,}" for name, count in ordered)
    has_heif = any(suffix in counts for suffix in HEIF_SUFFIXES)
    return f"{text} ({HEIF_HINT})" if has_heif else text


def check_test_classes(
    counts: Mapping[str, Counter[str]], classes: ClassChoice, *, origin: str
) -> None:
    """Refuse classes that no model could learn.

    Args:
        counts: split → class → number of its images; without "train" nothing is learned from them.
        classes: those that are kept; None keeps all.
        origin: what names the classes, at the start of the message.

    Raises:
        ValueError: a class is in another split, and not in "train".
    """
    for split, class_counts in counts.items():
        unknown = set(class_counts) - set(counts.get("train", class_counts))
        if classes is not None:
            unknown &= set(classes)
        if unknown:
            name = min(unknown)
            text = f"class {shorten(name)!r} has {class_counts[name]:,} images in the {split} split"
            hint = "add some, or leave it out with data.classes"
            raise ValueError(f"{origin}: {text} and none in the train split; {hint}")


def check_label(label: Any, *, origin: str) -> str:
    """The class that a table names, a text or a whole number, as text.

    Args:
        label: the value in the table.
        origin: the row, at the start of the message.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        text = f"label {shorten(repr(label))} is neither a text nor a whole number"
        raise ValueError(f"{origin}: {text}; an image has one class")
    return str(label)


def choose_classes(
    class_names: Sequence[str], classes: ClassChoice, *, aliases: Aliases | None = None
) -> tuple[str, ...]:
    """Those of `class_names` that `data.classes` keeps, in the order of the set.

    Args:
        class_names: all classes of the set.
        classes: those to keep, each by its name or an alias; None keeps all.
        aliases: class name → another name for it.

    Raises:
        ValueError: a class is unknown, or fewer than two are kept.
    """
    if classes is None:
        return tuple(class_names)

    # a class has its own name and perhaps an alias, such as "tench" for n01440764
    class_of = {name: name for name in class_names}
    class_of |= {alias: name for name, alias in (aliases or {}).items() if name in class_of}
    for name in classes:
        check_choice(name, class_of, name="class of data.classes")

    # the order is that of the set, so that labels don't depend on how classes are listed
    chosen = {class_of[name] for name in classes}
    check_classes(chosen, origin="data.classes")
    return tuple(name for name in class_names if name in chosen)


def check_classes(class_names: Collection[str], *, origin: str) -> None:
    """Raise ValueError where there are fewer than two classes, or two that look the same; the
    message begins with `origin`."""
    if len(class_names) < 2:
        names = shorten(", ".join(map(repr, class_names)) or "none")
        raise ValueError(f"{origin} names fewer than two classes: {names}; a classifier needs two")

    # spaces, and é as one character or as two, can't be told apart on a screen
    original: dict[str, str] = {}
    for name in class_names:
        normal = " ".join(unicodedata.normalize("NFC", name).split())
        if normal in original:
            pair = f"{original[normal]!a} and {name!a}"
            text = "differ only in spaces or in how their characters are encoded"
            raise ValueError(f"{origin}: the classes {pair} {text}; write them alike")
        original[normal] = name


def read_words(path: Path) -> dict[str, str]:
    """Class → name of each line such as "n01440764 tench, Tinca tinca": of synonyms the first."""
    words = {}
    for line in read_text(path).splitlines():
        parts = line.split(maxsplit=1)
        if len(parts) == 2:
            words[parts[0]] = parts[1].split(",")[0].strip()
    return words


def find_wordnet_names(class_names: Collection[str]) -> dict[str, str]:
    """Class → name in words, of synonyms the first, where all classes are WordNet ids: "chain saw"
    for n03000684. Empty where they aren't; an id that timm's table lacks stays as it is."""
    if not all(re.fullmatch(r"n\d{8}", name) for name in class_names):
        return {}
    # takes seconds to import
    from timm.data import ImageNetInfo

    table = ImageNetInfo()
    words = {name: name for name in class_names}
    for name in class_names:
        with suppress(KeyError):
            words[name] = table.label_name_to_description(name).split(",")[0].strip()
    return dict(zip(words, deduplicate(words), strict=True))


def resolve_class_names(
    class_names: Sequence[str], source: Path | Mapping[str, str]
) -> tuple[str, ...]:
    """The names of classes in words.

    Args:
        class_names: the classes as the data set calls them.
        source: names by class, of all classes or some; or a text file of all. Its lines are a class
            and its name or, in the order of the classes (of numbers: line 0 first), the name alone.

    Raises:
        ValueError: the file doesn't fit the classes.
    """
    if isinstance(source, Mapping):
        return deduplicate({name: source.get(name, name) for name in class_names})

    # a class and its name a line, perhaps of more classes than there are here
    words = read_words(source)
    if all(name in words for name in class_names):
        return deduplicate({name: words[name] for name in class_names})

    # or the names alone, in the order of the classes
    lines = [line.strip() for line in read_text(source).splitlines() if line.strip()]
    are_numbers = all(name.isdecimal() for name in class_names)
    if are_numbers and max(map(int, class_names)) < len(lines):
        return deduplicate({name: lines[int(name)] for name in class_names})

    if len(lines) != len(class_names):
        missing = next(name for name in class_names if name not in words)
        counts = f"{len(lines)} lines for {len(class_names)} classes and none for {missing!r}"
        raise ValueError(f"data.class_names {source} has {counts}")
    return deduplicate(dict(zip(class_names, lines, strict=True)))


def deduplicate(names: Mapping[str, str]) -> tuple[str, ...]:
    """The names of classes, with the class behind a name that several have: "crane" is a bird and a
    machine."""
    counts = Counter(names.values())
    return tuple(
        name if counts[name] == 1 else f"{name} ({class_name})"
        for class_name, name in names.items()
    )
