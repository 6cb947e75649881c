"""Readers of images, wherever they are stored, and checks that all kinds of sources share."""

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
from vit.runtime.files import read_text

# split → names that its folder, its shards or its value in a table may have
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
    """Decodes the images of a dataset one by one.

    A class of your own needs `image`, `cache_key` and `subset`.
    """

    # true if it can't be sent to another process, or needn't be: pixels, or objects from Python
    in_process: ClassVar[bool] = False
    # true if images come over a network: they are then read as training goes
    is_remote: ClassVar[bool] = False
    # true if `subset` is small enough to be sent to a worker with every batch
    has_small_subsets: ClassVar[bool] = False

    def image(self, index: int) -> Image.Image:
        """Decode an image to RGB, see `vit.data.images.read_image`.

        Raises:
            ValueError, OSError: It can't be decoded; the message names it.
            RemoteError: Object storage can't be reached; the image itself may be good.
        """

    def thumbnail(self, index: int, *, side: int) -> Image.Image:
        """Decode an image to at least `side` pixels a side, if that is faster than its full size.
        Raises the errors of `image`."""
        return self.image(index)

    def fetch(self, indices: Iterable[int]) -> None:
        """Download images of object storage, many at a time, before they are read. Raises
        RemoteError."""
        # other images are on this machine already
        return

    def sizes(self) -> np.ndarray | None:
        """Bytes of each image's file, int64 [n], -1 for a missing file; None if the images aren't
        files."""
        return None

    def cache_key(self) -> bytes:
        """Bytes that change when an image changes, found without decoding any image."""

    def subset(self, indices: np.ndarray) -> ImageReader:
        """A reader of these images in this order alone, which may be sent to another process."""


@dataclass(frozen=True, eq=False)
class ArrayReader(ImageReader):
    """Images in memory, uint8 [n, H, W, 3]."""

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

    def subset(self, indices: np.ndarray) -> FileReader:
        return FileReader(self.root, [self.paths[index] for index in indices])

    def _read_stats(self) -> np.ndarray:
        # joining texts is many times faster than joining paths
        root = os.fspath(self.root)
        return read_stats([os.path.join(root, path) for path in self.paths])


def read_stats(paths: Sequence[str]) -> np.ndarray:
    """Read the facts by which a changed file is noticed, int64 [n, 4].

    Returns:
        Bytes, times of modification and of change in nanoseconds, and inode of each file. A copy
        may have the size and the time of the file that it replaced, but not the others. Bytes are
        -1 for a missing file.
    """
    stats = np.zeros((len(paths), 4), dtype=np.int64)
    for index, path in enumerate(paths):
        try:
            stat = os.stat(path)
        except OSError:
            # a link to nothing; reading the image names it
            stats[index, 0] = -1
        else:
            inode = stat.st_ino & (2**63 - 1)
            stats[index] = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, inode
    return stats


def find_split_folders(root: Path) -> dict[str, Path]:
    """Find the folders below `root` that are named like a split: split → folder.

    Raises:
        ValueError: Two folders have names of the same split.
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
    """Count the files of each suffix, in small letters: ".heic" → 9."""
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
    """Describe counts as ".heic 9, .txt 3", the largest first; HEIC comes with how to read it."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{name} {count:,}" for name, count in ordered)
    has_heif = any(suffix in counts for suffix in HEIF_SUFFIXES)
    return f"{text} ({HEIF_HINT})" if has_heif else text


def check_labels(
    labels: Mapping[str, Sequence[str]],
    class_names: Collection[str],
    classes: ClassChoice,
    *,
    origin: str,
) -> None:
    """Refuse classes that no model could learn.

    Args:
        labels: Split → the class of each of its images.
        class_names: All classes.
        classes: Classes that are kept; None keeps all.
        origin: Name of the data, at the start of the message.

    Raises:
        ValueError: There are fewer than two classes, two look the same, or a class is in another
            split and not in "train".
    """
    check_classes(class_names, origin=origin)
    if "train" not in labels:
        return
    learned = set(labels["train"])
    for split, split_labels in labels.items():
        unknown = set(split_labels) - learned
        if classes is not None:
            unknown &= set(classes)
        if unknown:
            name = min(unknown)
            count = Counter(split_labels)[name]
            text = f"class {shorten(name)!r} has {count:,} images in the {split} split"
            hint = "add some, or leave it out with data.classes"
            raise ValueError(f"{origin}: {text} and none in the train split; {hint}")


def check_label(label: Any, *, origin: str) -> str:
    """Return the class in a row of a table, a text or a whole number, as text.

    Args:
        label: Value in the table.
        origin: Name of the row, at the start of the message.

    Raises:
        ValueError: It is anything else.
    """
    if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
        text = f"label {shorten(repr(label))} is neither a text nor a whole number"
        raise ValueError(f"{origin}: {text}; give each image one class")
    return str(label)


def choose_classes(
    class_names: Sequence[str], classes: ClassChoice, *, aliases: Aliases | None = None
) -> tuple[str, ...]:
    """Choose the classes that `data.classes` keeps, in the order of the set.

    Args:
        class_names: All classes of the set.
        classes: Classes to keep, each by its name or an alias; None keeps all.
        aliases: Class name → another name for it.

    Raises:
        ValueError: A class is unknown, or fewer than two are kept.
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
    """Raise ValueError if there are fewer than two classes, or two that look the same; the message
    begins with `origin`."""
    if len(class_names) < 2:
        names = shorten(", ".join(map(repr, class_names)) or "none")
        raise ValueError(
            f"{origin} names fewer than two classes: {names}; add images of another class"
        )

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
    """Read lines such as "n01440764 tench, Tinca tinca": class → its first synonym."""
    words = {}
    for line in read_text(path).splitlines():
        parts = line.split(maxsplit=1)
        if len(parts) == 2:
            words[parts[0]] = parts[1].split(",")[0].strip()
    return words


def find_wordnet_names(class_names: Collection[str]) -> dict[str, str]:
    """Find the names in words of classes that are WordNet ids: "chain saw" for n03000684.

    Returns:
        Class → the first of its synonyms; an id that timm's table lacks keeps its name. Empty if
        some classes aren't WordNet ids.
    """
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
    """Find the names of classes in words.

    Args:
        class_names: Classes as the data set calls them.
        source: Names by class, for all classes or some; or a text file for all. Its lines are a
            class and its name, or the name alone, in the order of the classes (line 0 first for
            classes that are numbers).

    Raises:
        ValueError: The file doesn't fit the classes.
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
        raise ValueError(f"data.class_names {source} has {counts}; write a line for each class")
    return deduplicate(dict(zip(class_names, lines, strict=True)))


def deduplicate(names: Mapping[str, str]) -> tuple[str, ...]:
    """Make names unique: the class is put behind a name that several classes have, as "crane"."""
    counts = Counter(names.values())
    return tuple(
        name if counts[name] == 1 else f"{name} ({class_name})"
        for class_name, name in names.items()
    )
