"""Sets known by name: scikit-learn's digits, four of torchvision, Imagenette, an ImageNet
folder."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.sources.base import ArrayReader, Listing, Root, find_split_folders
from vit.data.sources.folders import check_root, list_folder
from vit.runtime.files import default_cache_dir

# 320 pixels of the shorter side are enough to train at 224, in a quarter of the full download
_IMAGENETTE = "imagenette2-320"
_TORCHVISION = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
}
# torchvision's errors for a file that is missing, or has another checksum or another length
_DAMAGED = (RuntimeError, OSError, AssertionError)
NAMED = ("digits", "imagenette", "imagenet", *_TORCHVISION)


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
    pixels = np.round(digits.images[..., None] * (255 / 16)).astype(np.uint8).repeat(3, axis=-1)
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
    with suppress(*_DAMAGED):
        return open_set()
    if not download:
        raise OSError(f"{name} is not on this machine; to download it, name it (--data {name})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open_set(download=True)
    except _DAMAGED as error:
        # torchvision's message has a line for each mirror
        reason = " ".join(str(error).split())
        raise OSError(
            f"{name} could not be downloaded ({reason}); put torchvision's files of it into"
            f" {folder} and start again, or point data.root at a copy"
        ) from error


def _list_torchvision(name: str, folder: Path, *, download: bool) -> Listing:
    """List CIFAR-10, CIFAR-100, MNIST or Fashion-MNIST in torchvision's files."""
    # takes seconds to import
    from torchvision import datasets

    open_set = partial(getattr(datasets, _TORCHVISION[name]), folder)
    # drawn splits depend on the ids
    width = 5 if name.startswith("cifar") else 6
    pixels: list[np.ndarray] = []
    labels: list[str] = []
    ids: list[str] = []
    splits: list[str] = []
    for split in ("train", "test"):
        open_split = partial(open_set, train=split == "train")
        dataset = _open_or_download(open_split, name, folder, download=download)
        pixels.append(np.asarray(dataset.data))
        labels += [dataset.classes[target] for target in np.asarray(dataset.targets).tolist()]
        ids += [f"{split}/{number:0{width}d}" for number in range(len(dataset.data))]
        splits += [split] * len(dataset.data)
    return Listing(
        labels=labels,
        reader=ArrayReader(np.concatenate(pixels), ids),
        splits=splits,
        class_names=dataset.classes,
    )
