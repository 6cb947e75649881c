"""Readers of images, wherever they are stored, and names of splits and files in folders."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from vit.data.dicom import DICOM_HINT, DICOM_SUFFIX, has_dicom
from vit.data.duplicates import hash_pixels
from vit.data.images import (
    HEIF_HINT,
    HEIF_SUFFIXES,
    is_image_name,
    list_files,
    read_image,
    read_pixels,
    to_rgb,
)

# split → names that its folder, its shards or its value in a table may have
SPLIT_NAMES = {
    "train": ("train", "training", "trainval"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
SPLIT_OF = {name: split for split, names in SPLIT_NAMES.items() for name in names}

Root = Path | str | None


class ImageReader:
    """A sequence of images, each the path or the bytes of a file, or a PIL image.

    A source gives `__len__`, `__getitem__` and `subset`; `get_name` if images are bytes; and
    `stats` and `place` if they are in files.
    """

    # true if it can't be sent to another process, or needn't be: pixels, or objects from Python
    in_process: ClassVar[bool] = False

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Path | bytes | Image.Image:
        """Return an image as it is stored. Raises the errors of `image`."""
        raise NotImplementedError

    def subset(self, indices: np.ndarray) -> ImageReader:
        """A reader of these images in this order alone, which may be sent to another process."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """Folder or file that holds the images; empty if they aren't files."""
        return ""

    def stats(self) -> np.ndarray | None:
        """Facts of each image's file, see `read_stats`; None if the images aren't files."""
        return None

    def sizes(self) -> np.ndarray | None:
        """Bytes of each image's file, int64 [n], -1 for a missing file; None if the images aren't
        files."""
        return None

    def path(self, index: int) -> str | None:
        """Path of an image's file; None for an image that isn't a file."""
        return None

    def get_name(self, index: int) -> str:
        """Name of an image that isn't a file, for messages."""
        return f"image {index}"

    def image(self, index: int) -> Image.Image:
        """Decode an image to RGB, see `vit.data.images.read_image`.

        Raises:
            ValueError, OSError: It can't be decoded; the message names it.
            DriveError: The drive doesn't answer.
        """
        image: Image.Image = self._open(index, read_image)
        return image

    def decode(self, index: int) -> Image.Image | np.ndarray:
        """Decode an image, to an array of the same pixels if that is faster. See
        `vit.data.images.read_pixels`. Raises the errors of `image`."""
        decoded: Image.Image | np.ndarray = self._open(index, read_pixels)
        return decoded

    def thumbnail(self, index: int, *, side: int) -> Image.Image:
        """Decode an image to at least `side` pixels a side, if that is faster than its full size.
        Raises the errors of `image`."""
        image: Image.Image = self._open(index, partial(read_image, draft_side=side))
        return image

    def _open(self, index: int, read: Callable[..., Any]) -> Any:
        stored = self[index]
        if isinstance(stored, Path):
            return read(stored)
        if isinstance(stored, bytes):
            return read(io.BytesIO(stored), name=self.get_name(index))
        return to_rgb(stored)

    def digest(self, index: int) -> int:
        """Hash of the bytes of an image's file, or of its pixels, 64 bits."""
        try:
            stored = self[index]
            if isinstance(stored, Image.Image):
                return hash_pixels(to_rgb(stored))
            return hash_bytes(stored.read_bytes() if isinstance(stored, Path) else stored)
        except (ValueError, OSError):
            # decoding the image names the fault
            return hash_bytes(os.fsencode(self.path(index) or self.get_name(index)))

    def cache_key(self) -> bytes:
        """Bytes that change when an image changes; no image of a file is decoded for it."""
        stats = self.stats()
        if stats is not None:
            return stats.tobytes()
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(np.asarray(self.image(index)).data)
        return digest.digest()


@dataclass(frozen=True, eq=False)
class ArrayReader(ImageReader):
    """Images in memory, uint8 [n, H, W, 3] or, of grey ones, [n, H, W]."""

    pixels: np.ndarray
    in_process = True

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])

    def subset(self, indices: np.ndarray) -> ArrayReader:
        return ArrayReader(self.pixels[indices])


@dataclass(frozen=True, eq=False)
class FileReader(ImageReader):
    """Image files below a root."""

    root: Path
    # relative to the root
    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Path:
        return self.root / self.paths[index]

    def subset(self, indices: np.ndarray) -> FileReader:
        return FileReader(self.root, [self.paths[index] for index in indices])

    @property
    def place(self) -> str:
        return os.path.realpath(self.root)

    def path(self, index: int) -> str:
        # joining texts is many times faster than joining paths
        return os.path.join(self.root, self.paths[index])

    def stats(self) -> np.ndarray:
        return read_stats(list(map(self.path, range(len(self)))))

    def sizes(self) -> np.ndarray:
        return self.stats()[:, 0]


def hash_bytes(content: bytes) -> int:
    """Return 64 bits of the sha256 of bytes."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


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


def list_below(root: Path, left_out: list[str]) -> list[str]:
    """List the files below a root by their paths from there. See `list_files`."""
    # cutting texts is many times faster than `relative_path`
    start = len(os.path.join(root, ""))
    return [file[start:].replace(os.sep, "/") for file in list_files(root, left_out=left_out)]


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


def count_suffixes(paths: Iterable[str], *, images: str | None = None) -> Counter[str]:
    """Count the files of each suffix, in small letters: ".heic" → 9.

    Args:
        paths: The files.
        images: Name under which images are counted; None counts them by their suffixes, too.
    """
    counts: Counter[str] = Counter()
    for path in paths:
        name = os.path.basename(path)
        suffix = os.path.splitext(name)[1].lower() or "suffixless"
        if images is not None and is_image_name(name):
            suffix = images
        elif name.startswith("."):
            suffix = "hidden"
        counts[suffix] += 1
    return counts


def count_system_images(folders: Iterable[str | Path]) -> Counter[str]:
    """Count the images in folders that systems make."""
    counts: Counter[str] = Counter()
    for folder in folders:
        images = sum(map(is_image_name, list_files(folder)))
        counts[f"images in folders {os.path.basename(folder)}"] += images
    return +counts


def describe_counts(counts: Mapping[str, int]) -> str:
    """Describe counts as ".heic 9, .txt 3", the largest first; HEIC and DICOM come with how to read
    them."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{name} {count:,}" for name, count in ordered)
    if DICOM_SUFFIX in counts and not has_dicom():
        return f"{text} ({DICOM_HINT})"
    if any(suffix in counts for suffix in HEIF_SUFFIXES):
        return f"{text} ({HEIF_HINT})"
    return text
