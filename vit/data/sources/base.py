"""The list of images and the reader that every source gives, wherever the images are stored."""

from __future__ import annotations

import copy
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.data.depth import DICOM_HINT, DICOM_SUFFIX
from vit.data.duplicates import hash_pixels
from vit.data.images import (
    HEIF_HINT,
    HEIF_SUFFIXES,
    is_system_folder,
    list_files,
    read_image,
    to_rgb,
)
from vit.runtime.arguments import shorten
from vit.runtime.files import open_cached, read_arrays, write_arrays

# name that a folder, shards or a value in a table may have → split
SPLIT_OF = {
    "train": "train",
    "training": "train",
    "trainval": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}

Root = Path | str | None


class ImageReader:
    """A sequence of images, each the path or the bytes of a file, or a PIL image. Images have
    names, for messages, and places by which they are found: their pixels, or numbers, [n, …]."""

    # true if it can't be sent to another process, or needn't be: pixels, or objects from Python
    in_process = False
    # folder or file that holds the images
    place = ""

    def __init__(self, names: Sequence[str], places: np.ndarray) -> None:
        self.names = names
        self.places = places

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Path | bytes | Image.Image:
        """Return an image as it is stored. Raises the errors of `image`."""
        raise NotImplementedError

    def subset(self, indices: np.ndarray) -> ImageReader:
        """A reader of these images in this order alone, which may be sent to another process."""
        chosen = copy.copy(self)
        chosen.names = [self.names[index] for index in indices]
        chosen.places = self.places[indices]
        return chosen

    def stats(self) -> np.ndarray | None:
        """Bytes of each image, -1 for a missing file, and facts of its file, see `read_stats`,
        int64 [n, k]; None if the images aren't files."""
        return None

    def image(self, index: int, *, draft_side: int | None = None) -> Image.Image:
        """Decode an image to RGB, see `read_image`. Raises ValueError or OSError, which names it."""
        stored = self[index]
        if isinstance(stored, Path):
            return read_image(stored, draft_side=draft_side)
        if isinstance(stored, bytes):
            return read_image(io.BytesIO(stored), name=self.names[index], draft_side=draft_side)
        return to_rgb(stored)

    def digest(self, index: int) -> int:
        """Hash of the bytes of an image's file, or of its pixels, 64 bits."""
        try:
            return hash_stored(self[index])
        except (ValueError, OSError):
            # decoding the image names the fault
            return hash_bytes(os.fsencode(self.names[index]))

    def digests(self) -> np.ndarray:
        """The `digest` of each image, uint64 [n]."""
        return np.array(list(map(self.digest, range(len(self)))), np.uint64)


class ArrayReader(ImageReader):
    """Images in memory: uint8 [n, H, W, 3] or, of grey ones, [n, H, W]."""

    in_process = True

    def __init__(self, pixels: np.ndarray, names: Sequence[str] | None = None) -> None:
        super().__init__(names or [f"image {index}" for index in range(len(pixels))], pixels)

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.places[index])


class FileReader(ImageReader):
    """Image files, by their paths below a root."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        super().__init__(paths, np.zeros((len(paths), 0)))
        self.root = root
        self.place = os.path.realpath(root)

    def __getitem__(self, index: int) -> Path:
        return self.root / self.names[index]

    def stats(self) -> np.ndarray:
        # joining texts is many times faster than joining paths
        return read_stats([os.path.join(self.root, name) for name in self.names])


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a source in all of its splits, as they are found."""

    # class of each image, a text; or the names of its labels, a tuple, where it may have several
    labels: Sequence[Any]
    # its names are the ids of the images: the path below the root, or a name such as "test/00012"
    reader: ImageReader
    # train, validation or test for each image; None: all are train
    splits: Sequence[str] | None = None
    # validation without a test split stays validation, and isn't the test split, as in ImageNet
    keeps_validation: bool = False
    # all classes in their order; None: those that occur
    class_names: Sequence[str] | None = None
    # see `ImageDataset`
    groups: Sequence[str] | None = None
    rows: Mapping[str, Mapping[str, str]] | None = None
    # how the list was read, and what wasn't, for the plan
    read: Sequence[str] = ()
    # warnings for the user
    notes: Sequence[str] = ()


def hash_bytes(content: bytes) -> int:
    """Return 64 bits of the sha256 of bytes."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def hash_stored(stored: Path | bytes | Image.Image) -> int:
    """Return the hash of an image as a reader stores it: of its bytes, or of its pixels."""
    if isinstance(stored, Image.Image):
        return hash_pixels(to_rgb(stored))
    return hash_bytes(stored.read_bytes() if isinstance(stored, Path) else stored)


def read_stats(paths: Sequence[str]) -> np.ndarray:
    """Read the facts by which a changed file is noticed, int64 [n, 4]: bytes (-1 for a missing
    file), times of modification and of change in nanoseconds, and inode. A copy may have the size
    and the time of the file that it replaced, but not the others."""
    stats = np.zeros((len(paths), 4), dtype=np.int64)
    # a link to nothing keeps it; reading the image names the file
    stats[:, 0] = -1
    for index, path in enumerate(paths):
        with suppress(OSError):
            stat = os.stat(path)
            inode = stat.st_ino & (2**63 - 1)
            stats[index] = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, inode
    return stats


def compute_once(
    path: Path, keys: np.ndarray, compute: Callable[[int], Sequence[int] | np.ndarray]
) -> np.ndarray:
    """Return m numbers for each key [n, k], uint64 [n, m]. Those that the .npz file `path` lacks
    are computed in threads, from the index of a key."""
    stored = open_cached(path, partial(read_arrays, path)) or {"keys": keys[:0], "values": keys[:0]}
    known = dict(zip(map(bytes, stored["keys"]), stored["values"], strict=True))
    texts = list(map(bytes, keys))
    missing = {text: index for index, text in enumerate(texts) if text not in known}
    with ThreadPoolExecutor() as pool:
        known |= zip(missing, pool.map(compute, missing.values()), strict=True)
    if missing:
        # a cache that can't be written costs time alone
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stored = {
                "keys": np.frombuffer(b"".join(known), keys.dtype).reshape(len(known), -1),
                "values": np.array(list(known.values()), np.uint64),
            }
            write_arrays(path, stored)
    return np.array([known[text] for text in texts], np.uint64)


def read_digests(reader: ImageReader, cache_dir: Path) -> np.ndarray:
    """Read the hash of each image's bytes, uint64 [n]. Unchanged files aren't read again: the cache
    keeps the hashes by the `stats`."""
    stats = reader.stats()
    if stats is None:
        return reader.digests()
    name = hash_bytes(os.fsencode(reader.place))
    path = cache_dir / "digests" / f"{name:016x}.npz"
    return compute_once(path, stats, lambda index: (reader.digest(index),))[:, 0]


def list_below(root: Path) -> list[str]:
    """List the files below a root by their paths from there, with slashes on every system, but for
    folders that systems make."""
    # cutting texts is many times faster than os.path.relpath
    start = len(os.path.join(root, ""))
    return [file[start:].replace(os.sep, "/") for file in list_files(root)]


def list_folders(folder: Path) -> list[str]:
    """List the folders in a folder that may be splits or classes, sorted by name."""
    names = [entry.name for entry in sorted(folder.iterdir()) if entry.is_dir()]
    return [name for name in names if not is_system_folder(name) and not name.startswith("__")]


def find_split_folders(root: Path) -> dict[str, str]:
    """Find the folders in `root` that are named like splits, in sorted order: name → split."""
    names = list_folders(root)
    return {name: SPLIT_OF[name.lower()] for name in names if name.lower() in SPLIT_OF}


def describe_unused(paths: Iterable[str]) -> list[str]:
    """Return a sentence about files that aren't used, if there are any, with how HEIC and DICOM are
    read."""
    # a name that begins with a dot is its own suffix
    suffixes = [os.path.splitext(path)[1].lower() or os.path.basename(path) for path in paths]
    if not suffixes:
        return []
    text = f"files not used: {len(suffixes):,} ({shorten(', '.join(sorted(set(suffixes))), 60)})"
    for hint, known in ((HEIF_HINT, HEIF_SUFFIXES), (DICOM_HINT, (DICOM_SUFFIX,))):
        if not set(known).isdisjoint(suffixes):
            text += f"; {hint}"
    return [text]
