"""Name → ImageSource: labelled images that can be read one by one, with their split already drawn.

A split that has a folder of its own is that folder. What is missing is held out of the training images, class by
class (stratified), by the rank of a hash of (seed, id): adding images moves few others between splits, and no
library's random stream is involved.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image

from vit.data.images import read_image

Split = Literal["train", "validation", "test", "all"]
SPLITS = ("train", "validation", "test", "all")
SOURCES = ("cifar10", "cifar100", "digits", "folder", "imagenet", "imagenette", "webdataset")

TEST_FRACTION = 0.2  # of the images, where a source has no test split of its own

_IMAGE_SUFFIXES = frozenset(".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .avif".split())
_SPLIT_FOLDERS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}


class Backing(Protocol):
    """Where the pixels are; an image is named by its position."""

    def read(self, position: int) -> Image.Image:
        """The RGB image; raises ValueError naming it when it can't be decoded."""

    def stamp(self, positions: np.ndarray) -> bytes:
        """Bytes that change when the images at `positions` change, without decoding them."""


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Labelled images. `ids` name them for people: a path relative to the root, or "test/00012"."""

    name: str
    split: str
    class_names: tuple[str, ...]
    labels: np.ndarray  # int64 [n]
    ids: Sequence[str]
    backing: Backing
    positions: np.ndarray  # int64 [n], into the backing
    notes: tuple[str, ...] = ()  # what a person should know: files ignored, a split that was renamed

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image.Image:
        """The RGB image at `index`; raises ValueError naming it when it can't be decoded."""
        return self.backing.read(int(self.positions[index]))

    def signature(self) -> str:
        """A cheap cache key: changes with the files (name, size, time), labels, class names or split."""
        digest = hashlib.sha256()
        for part in ("\n".join(self.class_names), self.split, "\n".join(self.ids)):
            digest.update(part.encode() + b"\0")
        digest.update(self.labels.tobytes())
        digest.update(self.backing.stamp(self.positions))
        return digest.hexdigest()

    def subset(self, indices: Sequence[int] | np.ndarray) -> ImageSource:
        """The images at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            labels=self.labels[chosen],
            ids=[self.ids[index] for index in chosen],
            positions=self.positions[chosen],
        )


def load_source(
    name: str,
    *,
    root: Path | str | None = None,
    split: Split = "train",
    classes: Sequence[str] | None = None,
    validation_fraction: float = 0.1,
    split_seed: int = 0,
    download: bool = True,
) -> ImageSource:
    """Find the images of a split.

    `root` is where the data is or goes; `classes` keeps only those classes, in the source's order; split "all" is
    every image there is, whatever split it belongs to. Raises ValueError listing the choices for an unknown name,
    split or class, FileNotFoundError for a missing root.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction {validation_fraction} must be at least 0 and below 1")
    if name == "digits":
        pool = _load_digits()
        source = _hold_out({"train": pool}, split, validation_fraction=validation_fraction, seed=split_seed)
    elif name == "folder":
        parts = _scan_root("folder", root, classes)
        source = _hold_out(parts, split, validation_fraction=validation_fraction, seed=split_seed)
    else:
        raise ValueError(f"unknown source {name!r}; known: {', '.join(SOURCES)}")
    return source if classes is None else _keep_classes(source, classes)


# --- splits ------------------------------------------------------------------------------------------------


def _hold_out(
    parts: dict[str, ImageSource], split: str, *, validation_fraction: float, seed: int
) -> ImageSource:
    """The asked-for split out of those that exist; a missing test or validation split is drawn from "train"."""
    if split == "all":
        return replace(_join(list(parts.values())), split="all")
    if split in parts and split != "train":
        return replace(parts[split], split=split)
    if "train" not in parts:
        raise ValueError(f"there is no {split} split here, only {', '.join(parts)}")
    rest = parts["train"]
    for held, fraction in (("test", TEST_FRACTION), ("validation", validation_fraction)):
        if held in parts:
            continue
        drawn = _stratified(rest.labels, rest.ids, fraction, f"{seed}:{held}")
        if split == held:
            if not drawn.any():
                raise ValueError(f"the {held} split is empty: {len(rest)} images, a share of {fraction}")
            return replace(rest.subset(np.flatnonzero(drawn)), split=held)
        rest = rest.subset(np.flatnonzero(~drawn))
    return replace(rest, split=split)


def _stratified(labels: np.ndarray, ids: Sequence[str], fraction: float, salt: str) -> np.ndarray:
    """Mask [n] of a share of every class: the ids with the lowest hashes; a class of two or more gives at least one."""
    ranks = np.array(
        [int.from_bytes(hashlib.blake2b(f"{salt}:{name}".encode(), digest_size=8).digest()) for name in ids],
        dtype=np.uint64,
    )
    mask = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(round(fraction * len(members)), fraction > 0), len(members) - 1)
        mask[members[np.argsort(ranks[members], kind="stable")[:count]]] = True
    return mask


def _join(parts: list[ImageSource]) -> ImageSource:
    """One source of several splits of the same backing and classes."""
    return replace(
        parts[0],
        labels=np.concatenate([part.labels for part in parts]),
        ids=[name for part in parts for name in part.ids],
        positions=np.concatenate([part.positions for part in parts]),
    )


def _keep_classes(source: ImageSource, classes: Sequence[str]) -> ImageSource:
    unknown = [name for name in classes if name not in source.class_names]
    if unknown:
        known = ", ".join(source.class_names[:20]) + (", …" if len(source.class_names) > 20 else "")
        raise ValueError(f"unknown class {unknown[0]!r} in data.classes; known: {known}")
    if len(set(classes)) < 2:
        raise ValueError(f"data.classes names {len(set(classes))} class; a classifier needs at least two")
    kept = [index for index, name in enumerate(source.class_names) if name in set(classes)]
    renumbered = np.full(len(source.class_names), -1, dtype=np.int64)
    renumbered[kept] = np.arange(len(kept))
    chosen = source.subset(np.flatnonzero(renumbered[source.labels] >= 0))
    return replace(
        chosen,
        labels=renumbered[chosen.labels],
        class_names=tuple(source.class_names[index] for index in kept),
    )


# --- digits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ArrayBacking:
    """Images that are already pixels: uint8 [n, H, W, 3]."""

    pixels: np.ndarray

    def read(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels[position])

    def stamp(self, positions: np.ndarray) -> bytes:
        digest = hashlib.blake2b(np.ascontiguousarray(self.pixels).data)
        digest.update(positions.tobytes())
        return digest.digest()


def _load_digits() -> ImageSource:
    """scikit-learn's 1,797 scanned digits, 8×8 pixels of 0..16, inside the installed package."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return ImageSource(
        name="digits",
        split="all",
        class_names=tuple(str(digit) for digit in range(10)),
        labels=digits.target.astype(np.int64),
        ids=[f"digits/{index:05d}" for index in range(len(grey))],
        backing=ArrayBacking(np.repeat(grey[..., None], 3, axis=-1)),
        positions=np.arange(len(grey)),
    )


# --- image folders -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FileBacking:
    """Image files below a root."""

    root: Path
    paths: Sequence[str]  # relative to the root

    def read(self, position: int) -> Image.Image:
        return read_image(self.root / self.paths[position])

    def stamp(self, positions: np.ndarray) -> bytes:
        stats = [os.stat(self.root / self.paths[position]) for position in positions]
        return np.array([(stat.st_size, stat.st_mtime_ns) for stat in stats], dtype=np.int64).tobytes()


def _scan_root(name: str, root: Path | str | None, classes: Sequence[str] | None) -> dict[str, ImageSource]:
    """The splits of an image folder: root/<split>/<class>/*, or root/<class>/* as one."""
    if root is None:
        raise ValueError(f"data.name={name} needs data.root, the folder that holds the images")
    root = Path(root).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"data.root {root} is not a folder")
    folders = {entry.name.lower(): entry for entry in sorted(root.iterdir()) if entry.is_dir()}
    splits = {
        split: folders[alias]
        for split, aliases in _SPLIT_FOLDERS.items()
        for alias in aliases
        if alias in folders
    }
    if not splits:
        splits = {"train": root}
    scanned: dict[str, ImageSource] = {}
    for split, folder in splits.items():
        scanned[split] = _scan_classes(name, root, folder)
    return scanned


def _scan_classes(name: str, root: Path, folder: Path) -> ImageSource:
    class_names = tuple(
        sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    )
    paths: list[str] = []
    labels: list[int] = []
    for label, class_name in enumerate(class_names):
        for path in sorted((folder / class_name).rglob("*")):
            if path.suffix.lower() in _IMAGE_SUFFIXES and not path.name.startswith("."):
                paths.append(str(path.relative_to(root)))
                labels.append(label)
    if not paths:
        raise ValueError(f"{folder} holds no images in class folders, {folder}/<class>/<image>")
    if len(class_names) < 2:
        raise ValueError(f"{folder} holds one class, {class_names[0]!r}; a classifier needs at least two")
    return ImageSource(
        name=name,
        split="all",
        class_names=class_names,
        labels=np.array(labels, dtype=np.int64),
        ids=paths,
        backing=FileBacking(root, paths),
        positions=np.arange(len(paths)),
    )
