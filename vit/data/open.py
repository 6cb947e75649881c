"""Name → ImageSource, with its split drawn.

A split that has a folder of its own is that folder. What is missing is held out of the training images,
class by class (stratified), by the rank of a hash of (seed, id): adding images moves few others between
splits, and no library's random stream is involved. Where there is a validation folder but no test folder
(as in ImageNet), that folder is the *test* split, touched by the final evaluation alone, and validation is
held out of the training images.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from vit.data.sets import folders, named, shards
from vit.data.sets.source import ImageSource, join_sources

__all__ = ["SOURCES", "SPLITS", "ImageSource", "Split", "load_source"]

Split = Literal["train", "validation", "test", "all"]
SPLITS = ("train", "validation", "test", "all")
SOURCES = ("cifar10", "cifar100", "digits", "folder", "imagenet", "imagenette", "webdataset")

TEST_FRACTION = 0.2  # of the images, where a source has no test split of its own


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

    `root` is where the data is or goes. `classes` keeps only those classes, in the source's order. Split
    "all" is every image there is. Raises ValueError listing the choices for an unknown name, split or
    class, FileNotFoundError for a missing root, OSError when a download fails.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction {validation_fraction} must be at least 0 and below 1")
    if name in ("cifar10", "cifar100"):
        parts = named.find_cifar(name, root, classes, download=download)
    elif name == "digits":
        parts = named.find_digits(classes)
    elif name == "folder":
        parts = folders.find_splits(name, folders.existing_root(name, root), classes)
    elif name == "imagenet":
        parts = named.find_imagenet(root, classes)
    elif name == "imagenette":
        parts = named.find_imagenette(root, classes, download=download)
    elif name == "webdataset":
        parts = shards.find_shards(root, classes)
    else:
        raise ValueError(f"unknown source {name!r}; known: {', '.join(SOURCES)}")
    return _take_split(parts, split, validation_fraction=validation_fraction, seed=split_seed)


def _take_split(
    parts: Mapping[str, Callable[[], ImageSource]], split: str, *, validation_fraction: float, seed: int
) -> ImageSource:
    """The asked-for split of those that exist; a missing test or validation split is drawn from "train"."""
    if split == "all":
        return join_sources([find() for find in parts.values()])
    if split in parts and split != "train":
        return replace(parts[split](), split=split)
    if "train" not in parts:
        raise ValueError(f"there is no {split} split here, only {', '.join(parts)}")
    rest = parts["train"]()
    for held, fraction in (("test", TEST_FRACTION), ("validation", validation_fraction)):
        if held in parts:
            continue
        drawn = _stratified(rest, fraction, f"{seed}:{held}")
        if split == held:
            if not drawn.any():
                raise ValueError(f"the {held} split is empty: a share of {fraction} of {len(rest)} images")
            return replace(rest.subset(np.flatnonzero(drawn)), split=held)
        rest = rest.subset(np.flatnonzero(~drawn))
    return replace(rest, split=split)


def _stratified(source: ImageSource, fraction: float, salt: str) -> np.ndarray:
    """Mask [n] of a share of every class, at least one of two or more: the ids whose hashes rank lowest."""
    hashes = [hashlib.blake2b(f"{salt}:{name}".encode(errors="surrogateescape")) for name in source.ids]
    ranks = np.array([int.from_bytes(digest.digest()[:8], "big") for digest in hashes], dtype=np.uint64)
    mask = np.zeros(len(source), dtype=bool)
    for label in np.unique(source.labels):
        members = np.flatnonzero(source.labels == label)
        count = min(max(round(fraction * len(members)), fraction > 0), len(members) - 1)
        mask[members[np.argsort(ranks[members], kind="stable")[:count]]] = True
    return mask
