"""Readers of images, wherever they are stored, and names of splits and files in folders."""

from __future__ import annotations

import copy
import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vit.data.dicom import DICOM_HINT, DICOM_SUFFIX
from vit.data.duplicates import hash_pixels
from vit.data.images import (
    HEIF_HINT,
    HEIF_SUFFIXES,
    list_files,
    read_image,
    to_rgb,
)

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
    """A sequence of images, each the path or the bytes of a file, or a PIL image.

    Args:
        names: Name of each image, for messages.
        places: What finds each image: its pixels, or numbers.
    """

    # true if it can't be sent to another process, or needn't be: pixels, or objects from Python
    in_process = False

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

    @property
    def place(self) -> str:
        """Folder or file that holds the images; empty if they aren't files."""
        return ""

    def stats(self) -> np.ndarray | None:
        """Facts of each image's file, see `read_stats`; None if the images aren't files."""
        return None

    def sizes(self) -> np.ndarray | None:
        """Bytes of each image, int64 [n], -1 for a missing file; None if they aren't files."""
        stats = self.stats()
        return None if stats is None else stats[:, 0]

    def image(self, index: int, *, draft_side: int | None = None) -> Image.Image:
        """Decode an image to RGB, see `vit.data.images.read_image`.

        Raises:
            ValueError, OSError: It can't be decoded; the message names it.
            DriveError: The drive doesn't answer.
        """
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

    def cache_key(self) -> bytes:
        """Bytes that change when an image changes; no image of a file is decoded for it."""
        stats = self.stats()
        if stats is not None:
            return stats.tobytes()
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(np.asarray(self.image(index)).data)
        return digest.digest()


class ArrayReader(ImageReader):
    """Images in memory.

    Args:
        pixels: uint8 [n, H, W, 3] or, of grey ones, [n, H, W].
        names: Names of the images; None for their numbers.
    """

    in_process = True

    def __init__(self, pixels: np.ndarray, names: Sequence[str] | None = None) -> None:
        super().__init__(names or [f"image {index}" for index in range(len(pixels))], pixels)

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.places[index])


class FileReader(ImageReader):
    """Image files below a root.

    Args:
        root: The folder.
        paths: Paths of the images from there.
    """

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        super().__init__(paths, np.zeros((len(paths), 0)))
        self.root = root

    def __getitem__(self, index: int) -> Path:
        return self.root / self.names[index]

    @property
    def place(self) -> str:
        return os.path.realpath(self.root)

    def stats(self) -> np.ndarray:
        # joining texts is many times faster than joining paths
        return read_stats([os.path.join(self.root, name) for name in self.names])


def hash_bytes(content: bytes) -> int:
    """Return 64 bits of the sha256 of bytes."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def hash_stored(stored: Path | bytes | Image.Image) -> int:
    """Return the hash of an image as a reader stores it: of its bytes, or of its pixels."""
    if isinstance(stored, Image.Image):
        return hash_pixels(to_rgb(stored))
    return hash_bytes(stored.read_bytes() if isinstance(stored, Path) else stored)


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


def relative_path(path: str | Path, root: Path) -> str:
    """Return a path below a root, with slashes on every system: it is also the name of an image."""
    return os.path.relpath(path, root).replace(os.sep, "/")


def list_below(root: Path) -> list[str]:
    """List the files below a root by their paths from there, but for folders that systems make."""
    # cutting texts is many times faster than `relative_path`
    start = len(os.path.join(root, ""))
    return [file[start:].replace(os.sep, "/") for file in list_files(root)]


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
            raise ValueError(
                f"{root} holds {folders[split].name}/ and {entry.name}/"
                f", both names of the {split} split; merge or rename one"
            )
        folders[split] = entry
    return folders


def describe_files(paths: Iterable[str]) -> str:
    """Count files by their suffixes, as ".heic 9, .txt 3", the largest number first; HEIC and DICOM
    come with how to read them."""
    names = map(os.path.basename, paths)
    counts = Counter(
        "hidden" if name.startswith(".") else os.path.splitext(name)[1].lower() or "suffixless"
        for name in names
    )
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{suffix} {count:,}" for suffix, count in ordered)
    hints = {DICOM_SUFFIX: DICOM_HINT, **dict.fromkeys(HEIF_SUFFIXES, HEIF_HINT)}
    return text + "".join(f" ({hint})" for suffix, hint in hints.items() if suffix in counts)


def describe_unused(paths: Iterable[str]) -> list[str]:
    """Return a sentence about files that aren't used; none without any."""
    text = describe_files(paths)
    return [f"not used: {text}"] if text else []
