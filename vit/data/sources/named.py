"""Sets known by name: scikit-learn's digits, four of torchvision, Imagenette, an ImageNet
folder."""

import gzip
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.dataset import Request
from vit.data.sources.base import ArrayReader, Listing, Root, find_split_folders
from vit.data.sources.folders import check_root, find_class_folders
from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import default_cache_dir

# 320 pixels of the shorter side are enough to train at 224, in a quarter of the full download
_IMAGENETTE = "imagenette2-320"
# largest idx file when it is unpacked, bytes
_MAX_UNPACKED = 2**30
_TORCHVISION = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
}


def find_digits(request: Request) -> Listing:
    """List scikit-learn's 1,797 scanned digits, 8×8 pixels of 0..16, in the installed package."""
    # takes a second to import
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images[..., None] * (255 / 16)).astype(np.uint8).repeat(3, axis=-1)
    return Listing(
        name="digits",
        origin="scikit-learn's digits",
        labels=list(map(str, digits.target.tolist())),
        reader=ArrayReader(pixels, [f"digits/{number:05d}" for number in range(len(pixels))]),
    )


def find_imagenette(request: Request) -> Listing:
    """List Imagenette v2: ten easy ImageNet classes, by wnid or name."""
    folder = _choose_folder("imagenette", request.root)
    # the folder itself, or the place where the download was unpacked
    places = filter(Path.is_dir, (folder, *sorted(folder.glob("imagenette2*"))))
    wanted = {"train", "validation"}
    copy = next((each for each in places if wanted <= set(find_split_folders(each).values())), None)
    if copy is None:
        # takes seconds to import
        from torchvision.datasets import Imagenette

        open_set = partial(Imagenette, folder, size="320px")
        _open_or_download(open_set, "imagenette", folder, download=request.download)
        copy = folder / _IMAGENETTE
    return find_class_folders("imagenette", copy, request.classes)


def find_imagenet(request: Request) -> Listing:
    """List an ImageNet folder, train/<wnid> and val/<wnid>."""
    return find_class_folders("imagenet", check_root(request.place), request.classes)


def _choose_folder(name: str, root: Root) -> Path:
    """Return the folder where a published set is, or will be downloaded to."""
    return default_cache_dir() / "downloads" / name if root is None else check_root(root)


def _open_or_download(
    open_set: Callable[..., Any], name: str, folder: Path, *, download: bool
) -> Any:
    """Open torchvision's data set in `folder`; download it (with its checksum) if it is missing.
    Raises OSError if that fails; the message says how to do it by hand."""
    # without download=True no network is used
    with suppress(RuntimeError, OSError):
        return open_set()
    # a file is missing, or has another checksum
    if not download:
        raise OSError(f"{name} is not on this machine; to download it, name it (--data {name})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open_set(download=True)
    # torchvision raises ValueError for a set that has no address any more
    except (RuntimeError, OSError, ValueError) as error:
        # torchvision's message has a line for each mirror
        reason = " ".join(str(error).split())
        raise OSError(
            f"{name} could not be downloaded ({reason}); put torchvision's files of it into"
            f" {folder} and start again, or point data.root at a copy"
        ) from error


def find_torchvision(name: str, request: Request) -> Listing:
    """List CIFAR-10, CIFAR-100, MNIST or Fashion-MNIST in torchvision's files, or in idx files in
    the root itself. Raises OSError if a download fails, and ValueError for other sets and damaged
    files."""
    set_name = _TORCHVISION.get(name, name.partition(":")[2])
    if set_name not in _TORCHVISION.values():
        raise ValueError(
            f"{name} is not known by name; pass torchvision's sets from Python, as"
            ' dataset={"train": SVHN(…), "test": SVHN(…)}'
        )
    # takes seconds to import
    from torchvision import datasets

    dataset_class: Any = getattr(datasets, set_name)
    folder = _choose_folder(set_name.lower(), request.root)
    # Debian's packages and hand-made copies
    has_idx = any(folder.glob("train-images?idx3*"))
    # drawn splits depend on the ids
    width = 5 if has_idx or set_name.startswith("CIFAR") else 6
    pixels: list[np.ndarray] = []
    labels: list[str] = []
    ids: list[str] = []
    splits: list[str] = []
    try:
        for split, prefix in (("train", "train"), ("test", "t10k")):
            if has_idx:
                names = dataset_class.classes
                images = _read_idx(folder, f"{prefix}-images?idx3-ubyte*")
                targets = _read_idx(folder, f"{prefix}-labels?idx1-ubyte*")
            else:
                open_set = partial(dataset_class, folder, train=split == "train")
                dataset = _open_or_download(open_set, name, folder, download=request.download)
                names = dataset.classes
                images, targets = np.asarray(dataset.data), np.asarray(dataset.targets)
            if len(images) != len(targets):
                raise ValueError(f"{len(images)} images and {len(targets)} labels")
            pixels.append(images)
            labels += [names[target] for target in targets.tolist()]
            ids += [f"{split}/{number:0{width}d}" for number in range(len(images))]
            splits += [split] * len(images)
        reader = ArrayReader(np.concatenate(pixels), ids)
    except Exception as error:
        # a download failed
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        # damaged files that have no checksum raise errors of any type
        reason = f"{type(error).__name__}: {shorten(first_line(error))}"
        text = f"the files of {name} in {folder} can't be read ({reason}); copy them again"
        raise ValueError(text) from error
    return Listing(
        name=name, origin=name, labels=labels, reader=reader, splits=splits, class_names=names
    )


def _read_idx(folder: Path, pattern: str) -> np.ndarray:
    """Read an idx file of bytes, plain or .gz: 0, 0, 8, the number of dimensions, each dimension,
    the values. Raises ValueError for another number of values."""
    path = min(folder.glob(pattern), default=folder / pattern)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read(_MAX_UNPACKED)
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], ">u4")
    return np.frombuffer(content[start:], np.uint8).reshape(shape)


NAMED: Mapping[str, Callable[[Request], Listing]] = {
    "digits": find_digits,
    "imagenette": find_imagenette,
    **{name: partial(find_torchvision, name) for name in _TORCHVISION},
}
