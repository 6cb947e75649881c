"""Sets known by name: scikit-learn's digits, those of torchvision, Imagenette, an ImageNet folder."""

import gzip
import inspect
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.dataset import Request
from vit.data.sources.base import (
    ArrayReader,
    FileReader,
    Root,
    find_split_folders,
    relative_path,
)
from vit.data.sources.folders import check_root, find_class_folders
from vit.data.sources.listing import Listing
from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import default_cache_dir

# 320 pixels of the shorter side are enough to train at 224, in a quarter of the full download
_IMAGENETTE = "imagenette2-320"
_IMAGENETTE_URL = f"https://s3.amazonaws.com/fast-ai-imageclas/{_IMAGENETTE}.tgz"
# largest idx file when it is unpacked; Extended MNIST has 547 million bytes
_MAX_UNPACKED = 2**30

# images of a split (paths, or pixels), their labels, and the class names
_Published = tuple[Any, np.ndarray, Sequence[str] | None]
# split → the arguments with which torchvision opens it
_Splits = Mapping[str, Mapping[str, Any]]
_ALL: _Splits = {"train": {}}
_BY_TRAIN: _Splits = {"train": {"train": True}, "test": {"train": False}}
_TWO: _Splits = {split: {"split": split} for split in ("train", "test")}
_THREE: _Splits = {**_TWO, "validation": {"split": "val"}}
_SPLITS: Mapping[str, _Splits] = {
    "CIFAR10": _BY_TRAIN,
    "CIFAR100": _BY_TRAIN,
    "Caltech101": _ALL,
    "Caltech256": _ALL,
    "Country211": {**_TWO, "validation": {"split": "valid"}},
    "DTD": _THREE,
    "EuroSAT": _ALL,
    "FGVCAircraft": _THREE,
    "FashionMNIST": _BY_TRAIN,
    "Flowers102": _THREE,
    "Food101": _TWO,
    "GTSRB": _TWO,
    "KMNIST": _BY_TRAIN,
    "MNIST": _BY_TRAIN,
    "OxfordIIITPet": {**_TWO, "train": {"split": "trainval"}},
    "QMNIST": _BY_TRAIN,
    "RenderedSST2": _THREE,
    "SEMEION": _ALL,
    "STL10": _TWO,
    "SUN397": _ALL,
    "SVHN": _TWO,
    "StanfordCars": _TWO,
    "USPS": _BY_TRAIN,
}
_SHORT_NAMES = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "dtd": "DTD",
    "eurosat": "EuroSAT",
    "fashion_mnist": "FashionMNIST",
    "flowers102": "Flowers102",
    "food101": "Food101",
    "gtsrb": "GTSRB",
    "mnist": "MNIST",
    "pets": "OxfordIIITPet",
    "stl10": "STL10",
    "svhn": "SVHN",
}
# Files and labels of sets that give only opened images: without these private attributes each image
# would be decoded to list them. A later torchvision may call them otherwise.
_SAMPLES: Mapping[str, Callable[[Any], Iterable[tuple[Any, int]]]] = {
    "GTSRB": lambda dataset: dataset._samples,
    "OxfordIIITPet": lambda dataset: zip(dataset._images, dataset._labels, strict=True),
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
        ids=[f"digits/{index:05d}" for index in range(len(pixels))],
        labels=list(map(str, digits.target.tolist())),
        reader=ArrayReader(pixels),
    )


def find_imagenette(request: Request) -> Listing:
    """List Imagenette v2: ten easy ImageNet classes, by wnid or name. Its val/ folder is the test
    split."""
    folder = choose_folder("imagenette", request.root)
    # the folder itself, or the place where the download was unpacked
    copies = filter(is_imagenette, (folder, *sorted(folder.glob("imagenette2*"))))
    copy = next(copies, None)
    if copy is None:
        # takes seconds to import
        from torchvision.datasets import Imagenette

        open_or_download(
            partial(Imagenette, folder, size="320px"),
            "imagenette",
            folder,
            f"{_IMAGENETTE}.tgz (from {_IMAGENETTE_URL})",
            download=request.download,
        )
        copy = folder / _IMAGENETTE
    return find_class_folders("imagenette", copy, request.classes)


def is_imagenette(folder: Path) -> bool:
    """Return true for a folder with the splits of Imagenette."""
    return folder.is_dir() and {"train", "validation"} <= find_split_folders(folder).keys()


def find_imagenet(request: Request) -> Listing:
    """List an ImageNet folder, train/<wnid> and val/<wnid>, whose classes have a wnid and a name."""
    folder = check_root(request.place)
    # as Kaggle packs it
    inner = folder / "ILSVRC" / "Data" / "CLS-LOC"
    folder = inner if inner.is_dir() else folder
    if "train" not in find_split_folders(folder):
        hint = "ImageNet is read as train/<wnid> and val/<wnid>"
        raise ValueError(f"data.root {folder} has no train/ folder; {hint}")
    return find_class_folders("imagenet", folder, request.classes)


def choose_folder(name: str, root: Root) -> Path:
    """Return the folder where a published set is, or will be downloaded to."""
    if root is None:
        return default_cache_dir() / "downloads" / name
    return check_root(root)


def open_or_download(
    open_published: Callable[..., Any], name: str, folder: Path, archive: str, *, download: bool
) -> Any:
    """Open torchvision's data set in `folder`; download it (with its checksum) if it is missing.

    Args:
        open_published: torchvision's class with its arguments.
        name: Name of the set, for messages.
        folder: The folder.
        archive: Files to download by hand, for messages.
        download: False raises an error instead of downloading it.

    Raises:
        OSError: The download failed; the message says how to do it by hand.
    """
    try:
        # without download=True no network is used
        return open_published()
    except (RuntimeError, OSError):
        # a file is missing, or has another checksum
        pass
    except Exception as error:
        raise _explain_damage(name, folder, error) from error
    if not download:
        raise OSError(f"{name} is not on this machine; to download it, name it (--data {name})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open_published(download=True)
    # torchvision raises ValueError for a set that has no address any more
    except (RuntimeError, OSError, ValueError) as error:
        hint = f"by hand: put {archive} into {folder} and start again, or point data.root at a copy"
        # torchvision's message has a line for each mirror
        reason = " ".join(str(error).split())
        raise OSError(f"{name} could not be downloaded ({reason}); {hint}") from error


def _explain_damage(name: str, folder: Path, error: Exception) -> ValueError:
    """Describe an error in files that torchvision doesn't check, for which it raises any type."""
    reason = f"{type(error).__name__}: {shorten(first_line(error))}"
    return ValueError(f"the files of {name} in {folder} are damaged ({reason}); copy them again")


def find_torchvision(name: str, request: Request, *, set_name: str) -> Listing:
    """List a set of torchvision; missing files are downloaded with torchvision's checksums.

    Splits are the published ones. Classes have torchvision's names, or numbers if it has none.

    Args:
        name: The data.name.
        request: Its root is torchvision's `root`, or a folder of idx files; None is the cache.
        set_name: Name of torchvision's class.

    Raises:
        OSError: The download failed; the message says how to do it by hand.
    """
    # takes seconds to import
    from torchvision import datasets

    dataset_class = getattr(datasets, set_name)
    is_cifar = set_name.startswith("CIFAR")
    folder = choose_folder(set_name.lower(), request.root)
    # a folder of images would be taken for a download that broke off
    if is_cifar and request.root is not None and "train" in find_split_folders(folder):
        raise ValueError(
            f"data.root {folder} is an image folder (train/<class>/…), not the published {name}"
            "; read it with data.name=folder"
        )
    # Debian's packages and hand-made copies have idx files in the folder itself
    if issubclass(dataset_class, datasets.MNIST) and list(folder.glob("train-images?idx3*")):
        found = {
            split: (*_read_idx_pair(folder, split), dataset_class.classes)
            for split in ("train", "test")
        }
        return _list_published(set_name, folder, found, num_digits=5)

    open_set = partial(dataset_class, folder, download=False)
    # a `loader` of torchvision opens an image; this one returns its path
    if "loader" in inspect.signature(dataset_class).parameters:
        open_set = partial(open_set, loader=os.fspath)
    title = name if is_cifar else set_name
    archive = f"the files of torchvision's {set_name}"
    if is_cifar:
        archive = f"{dataset_class.filename} (from {dataset_class.url})"
    opened = {
        split: open_or_download(
            partial(open_set, **arguments), title, folder, archive, download=request.download
        )
        for split, arguments in _SPLITS[set_name].items()
    }
    try:
        found = {split: _read_published(each, set_name) for split, each in opened.items()}
        return _list_published(title, folder, found, num_digits=5 if is_cifar else 6)
    except Exception as error:
        raise _explain_damage(set_name, folder, error) from error


def _read_published(dataset: Any, set_name: str) -> _Published:
    # Caltech's sets call them categories
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    samples: Sequence[tuple[Any, int]] = []
    if set_name in _SAMPLES:
        with suppress(AttributeError, TypeError):
            samples = list(_SAMPLES[set_name](dataset))
    elif not hasattr(dataset, "loader") and hasattr(dataset, "data") and labels is not None:
        pixels = np.asarray(dataset.data)
        # SVHN and STL-10 have the channels first
        if pixels.ndim == 4 and pixels.shape[1] == 3:
            pixels = pixels.transpose(0, 2, 3, 1)
        return pixels, np.asarray(labels, dtype=np.int64), names
    samples = samples or [dataset[index] for index in range(len(dataset))]
    items = [each for each, _ in samples]
    if not isinstance(items[0], str | os.PathLike):
        items = [np.asarray(each.convert("RGB")) for each in items]
    return items, np.array([label for _, label in samples], dtype=np.int64), names


def _list_published(
    name: str, folder: Path, found: Mapping[str, _Published], *, num_digits: int
) -> Listing:
    """List the splits of a published set."""
    splits = [split for split, (images, _, _) in found.items() for _ in images]
    numbers = np.concatenate([labels for _, labels, _ in found.values()])
    known = next(iter(found.values()))[2]
    # without names, there are at most as many classes as images
    limit = len(known or numbers)
    if numbers.min() < 0 or numbers.max() >= limit:
        raise ValueError(f"labels from {numbers.min()} to {numbers.max()} for {limit} classes")
    names = known or list(map(str, range(int(numbers.max()) + 1)))
    items = [image for images, _, _ in found.values() for image in images]
    reader: ArrayReader | FileReader
    if isinstance(items[0], str | os.PathLike):
        ids = [relative_path(path, folder) for path in items]
        reader = FileReader(folder, ids)
    else:
        ids = [
            f"{split}/{index:0{num_digits}d}"
            for split, (images, _, _) in found.items()
            for index in range(len(images))
        ]
        # images of several sizes are an array of arrays
        pixels = np.empty(len(items), dtype=object)
        if all(isinstance(images, np.ndarray) for images, _, _ in found.values()):
            pixels = np.concatenate([images for images, _, _ in found.values()])
        else:
            for index, image in enumerate(items):
                pixels[index] = image
        reader = ArrayReader(pixels)
    titles = {"train": "training", "validation": "validation", "test": "test"}
    return Listing(
        name=name,
        origin=name,
        ids=ids,
        labels=[str(names[number]) for number in numbers.tolist()],
        reader=reader,
        splits=splits,
        origins={split: f"the published {titles[split]} set" for split in found},
        class_names=tuple(map(str, names)),
    )


def _read_idx_pair(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the images and labels of a split in idx files, plain or .gz."""
    prefix = "train" if split == "train" else "t10k"
    images, labels = (
        _read_idx(folder, f"{prefix}-{kind}?idx{dimensions}-ubyte*", dimensions)
        for kind, dimensions in (("images", 3), ("labels", 1))
    )
    if len(images) != len(labels):
        raise ValueError(f"{folder} holds {len(images)} images and {len(labels)} labels of {split}")
    return images, labels.astype(np.int64)


def _read_idx(folder: Path, pattern: str, dimensions: int) -> np.ndarray:
    path = next(iter(sorted(folder.glob(pattern))), folder / pattern.replace("?", "-"))
    try:
        with open(path, "rb") as stored:
            file = gzip.GzipFile(fileobj=stored) if path.suffix == ".gz" else stored
            header = file.read(4 + 4 * dimensions)
            shape = np.frombuffer(header, ">u4", offset=4).tolist()
            # two zero bytes, 8 for unsigned bytes, the number of dimensions, each dimension
            num_bytes = math.prod(shape)
            is_right = header[:4] == bytes([0, 0, 8, dimensions])
            if not is_right or not 0 < num_bytes <= _MAX_UNPACKED:
                raise ValueError("it has another header")
            content = file.read(num_bytes + 1)
        return np.frombuffer(content, np.uint8).reshape(shape)
    except (EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a complete idx file: {error}; download it again"
        ) from error


_TORCHVISION = {**_SHORT_NAMES, **{f"torchvision:{set_name}": set_name for set_name in _SPLITS}}
NAMED: Mapping[str, Callable[[Request], Listing]] = {
    "digits": find_digits,
    "imagenette": find_imagenette,
    **{
        name: partial(find_torchvision, name, set_name=set_name)
        for name, set_name in _TORCHVISION.items()
    },
}
