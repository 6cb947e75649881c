"""Sets known by name: scikit-learn's digits, four of torchvision, Imagenette, an ImageNet
folder."""

import gzip
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.sources.base import ArrayReader, Listing, Root, find_split_folders
from vit.data.sources.folders import check_root, list_folder
from vit.runtime.arguments import first_line
from vit.runtime.files import default_cache_dir

# 320 pixels of the shorter side are enough to train at 224, in a quarter of the full download
_IMAGENETTE = "imagenette2-320"
_TORCHVISION = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
}
# torchvision's errors for a file that is missing, or has another checksum or another length; and for
# one without a checksum that holds something else
_MISSING = (RuntimeError, OSError)
_DAMAGED = (AssertionError, ValueError, TypeError, LookupError)
# bytes of an unpacked idx file, of which the largest has 47 MB
_MAX_UNPACKED = 1 << 30
NAMED = ("digits", "imagenette", "imagenet", *_TORCHVISION)


def find_own_name(name: str) -> str:
    """Return our name of a set that is called as in torchvision: cifar10 for torchvision:CIFAR10."""
    own_names = {f"torchvision:{theirs}": own for own, theirs in _TORCHVISION.items()}
    return own_names.get(name, name)


def find_named(name: str, root: Root, classes: Sequence[str] | None, *, download: bool) -> Listing:
    """List the images of a set of `NAMED`. Raises OSError if the root is missing or a download
    fails."""
    if name == "digits":
        return _list_digits()
    # a name of torchvision's without capitals
    set_name = _TORCHVISION.get(name, name)
    folder = default_cache_dir() / "downloads" / set_name.lower()
    if root is not None:
        folder = check_root(root)
    if name == "imagenet":
        return list_folder(folder, classes)
    if name == "imagenette":
        return list_folder(_find_imagenette(folder, download=download), classes)
    return _list_torchvision(name, folder, download=download)


def _list_digits() -> Listing:
    """List scikit-learn's 1,797 scanned digits, 8×8 pixels of 0..16, in the installed package."""
    # takes a second to import
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return Listing(
        labels=list(map(str, digits.target.tolist())),
        reader=ArrayReader(pixels, [f"digits/{number:05d}" for number in range(len(pixels))]),
    )


def _find_imagenette(folder: Path, *, download: bool) -> Path:
    """Find Imagenette v2, ten easy ImageNet classes: the folder itself, or the place where the
    download was unpacked."""
    for place in filter(Path.is_dir, (folder, *sorted(folder.glob("imagenette2*")))):
        if {"train", "validation"} <= set(find_split_folders(place).values()):
            return place
    # takes seconds to import
    from torchvision.datasets import Imagenette

    open_set = partial(Imagenette, folder, size="320px")
    _open_or_download(open_set, "imagenette", folder, download=download)
    return folder / _IMAGENETTE


def _open_or_download(
    open_set: Callable[..., Any], name: str, folder: Path, *, download: bool
) -> Any:
    """Open torchvision's data set in `folder`; download it (with its checksum) if it is missing.
    Raises OSError if that fails; the message says how to do it by hand."""
    # without download=True no network is used
    with suppress(*_MISSING):
        return open_set()
    if not download:
        raise OSError(f"{name} is not on this machine; to download it, name it (--data {name})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open_set(download=True)
    except _MISSING as error:
        # torchvision's message has a line for each mirror
        reason = " ".join(str(error).split())
        raise OSError(
            f"{name} could not be downloaded ({reason}); put torchvision's files of it into"
            f" {folder} and start again, or point data.root at a copy"
        ) from error


def _list_torchvision(name: str, folder: Path, *, download: bool) -> Listing:
    """List CIFAR-10, CIFAR-100, MNIST or Fashion-MNIST in torchvision's files, or in idx files in
    the folder itself. Raises ValueError for damaged ones."""
    # takes seconds to import
    from torchvision import datasets

    dataset_class: Any = getattr(datasets, _TORCHVISION[name])
    # Debian's packages and hand-made copies
    has_idx = any(folder.glob("train-images?idx3*"))
    # drawn splits depend on the ids
    width = 5 if has_idx or name.startswith("cifar") else 6
    pixels: list[np.ndarray] = []
    labels: list[str] = []
    ids: list[str] = []
    splits: list[str] = []
    for split, prefix in (("train", "train"), ("test", "t10k")):
        if has_idx:
            names = dataset_class.classes
            images = _read_idx(folder, f"{prefix}-images?idx3-ubyte*")
            targets = _read_idx(folder, f"{prefix}-labels?idx1-ubyte*")
        else:
            open_split = partial(dataset_class, folder, train=split == "train")
            try:
                dataset = _open_or_download(open_split, name, folder, download=download)
            except _DAMAGED as error:
                text = f"the files of {name} in {folder} can't be read ({first_line(error)})"
                raise ValueError(f"{text}; copy them again") from error
            names = dataset.classes
            images, targets = np.asarray(dataset.data), np.asarray(dataset.targets)
        if len(images) != len(targets) or targets.max(initial=0) >= len(names):
            text = f"the {split} images of {name} in {folder} don't have a class each"
            raise ValueError(f"{text}; copy the files again")
        pixels.append(images)
        labels += [names[target] for target in targets.tolist()]
        ids += [f"{split}/{number:0{width}d}" for number in range(len(images))]
        splits += [split] * len(images)
    return Listing(
        labels=labels,
        reader=ArrayReader(np.concatenate(pixels), ids),
        splits=splits,
        class_names=names,
    )


def _read_idx(folder: Path, pattern: str) -> np.ndarray:
    """Read an idx file of bytes, plain or .gz: 0, 0, 8, the number of dimensions, each dimension,
    the values. Raises ValueError for a damaged one."""
    path = min(folder.glob(pattern), default=folder / pattern)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MAX_UNPACKED)
        start = 4 + 4 * content[3]
        shape = np.frombuffer(content[4:start], ">u4")
        return np.frombuffer(content[start:], np.uint8).reshape(shape)
    # gzip raises EOFError for a file that is cut short
    except (ValueError, OSError, EOFError, IndexError, zlib.error) as error:
        raise ValueError(f"{path} can't be read ({first_line(error)}); copy it again") from error
