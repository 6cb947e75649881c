"""Sets known by name: scikit-learn's digits, sets of torchvision, Imagenette, an ImageNet folder."""

import gzip
import inspect
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.dataset import Request
from vit.data.sources.base import (
    SPLIT_OF,
    ArrayReader,
    FileReader,
    ImageReader,
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
# largest idx file when it is unpacked; Extended MNIST has 547 million bytes
_MAX_UNPACKED = 2**30
_TORCHVISION = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
}
# splits of torchvision's sets as their `split` calls them, where they aren't train and test
_SPLITS = {
    "Country211": ("train", "valid", "test"),
    **dict.fromkeys(
        ("DTD", "FGVCAircraft", "Flowers102", "RenderedSST2"), ("train", "val", "test")
    ),
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
    """List Imagenette v2: ten easy ImageNet classes, by wnid or name. Its val/ folder is the test
    split."""
    folder = _choose_folder("imagenette", request.root)
    # the folder itself, or the place where the download was unpacked
    copies = filter(is_imagenette, (folder, *sorted(folder.glob("imagenette2*"))))
    copy = next(copies, None)
    if copy is None:
        # takes seconds to import
        from torchvision.datasets import Imagenette

        open_set = partial(Imagenette, folder, size="320px")
        _open_or_download(open_set, "imagenette", folder, download=request.download)
        copy = folder / _IMAGENETTE
    return find_class_folders("imagenette", copy, request.classes)


def is_imagenette(folder: Path) -> bool:
    """Return true for a folder with the splits of Imagenette."""
    return folder.is_dir() and {"train", "validation"} <= find_split_folders(folder).keys()


def find_imagenet(request: Request) -> Listing:
    """List an ImageNet folder, train/<wnid> and val/<wnid>, whose classes have a wnid and a name."""
    folder = check_root(request.place)
    if "train" not in find_split_folders(folder):
        raise ValueError(f"data.root {folder} has no folders train/<wnid> and val/<wnid>")
    return find_class_folders("imagenet", folder, request.classes)


def _choose_folder(name: str, root: Root) -> Path:
    """Return the folder where a published set is, or will be downloaded to."""
    return default_cache_dir() / "downloads" / name if root is None else check_root(root)


def _open_or_download(
    open_set: Callable[..., Any], name: str, folder: Path, *, download: bool
) -> Any:
    """Open torchvision's data set in `folder`; download it (with its checksum) if it is missing.

    Raises:
        OSError: The download failed; the message says how to do it by hand.
    """
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
            f"{name} could not be downloaded ({reason}); put torchvision's files of it into {folder}"
            " and start again, or point data.root at a copy"
        ) from error


def find_torchvision(name: str, request: Request) -> Listing:
    """List a set of torchvision; missing files are downloaded with torchvision's checksums.

    Splits are the published ones. Classes have torchvision's names, or numbers if it has none.

    Args:
        name: The data.name.
        request: Its root is torchvision's `root`, or a folder of idx files; None is the cache.

    Raises:
        OSError: The download failed; the message says how to do it by hand.
        ValueError: Files are damaged, or the set has no splits, or images that can't be listed.
    """
    # takes seconds to import
    from torchvision import datasets

    set_name = _TORCHVISION.get(name, name.partition(":")[2])
    dataset_class: Any = getattr(datasets, set_name, None)
    is_class = inspect.isclass(dataset_class)
    options = inspect.signature(dataset_class).parameters if is_class else {}
    key = next((each for each in ("train", "split") if each in options), None)
    if key is None or "download" not in options:
        raise ValueError(
            f"{name} is not a set of torchvision with splits, such as torchvision:SVHN; pass others"
            " from Python as dataset=…"
        )
    folder = _choose_folder(set_name.lower(), request.root)
    # Debian's packages and hand-made copies have idx files in the folder itself
    has_idx = issubclass(dataset_class, datasets.MNIST) and any(folder.glob("train-images?idx3*"))
    open_set = partial(dataset_class, folder, download=False)
    # a `loader` of torchvision opens an image; this one returns its path
    if "loader" in options:
        open_set = partial(open_set, loader=os.fspath)
    images: list[Any] = []
    numbers: list[int] = []
    splits: list[str] = []
    names: Sequence[str] | None = None
    try:
        for given in _SPLITS.get(set_name, ("train", "test")):
            if has_idx:
                names = dataset_class.classes
                found = _read_idx_pair(folder, {"train": "train", "test": "t10k"}[given])
            else:
                value = given == "train" if key == "train" else given
                dataset = _open_or_download(
                    partial(open_set, **{key: value}), name, folder, download=request.download
                )
                names = getattr(dataset, "classes", None)
                found = _read_published(dataset)
            images += found[0]
            numbers += map(int, found[1])
            splits += [SPLIT_OF[given]] * len(found[1])
        names = list(map(str, names or range(max(numbers) + 1)))
        if not 0 <= min(numbers) <= max(numbers) < len(names):
            raise ValueError(f"labels from {min(numbers)} to {max(numbers)}, {len(names)} classes")
        reader: ImageReader
        if isinstance(images[0], str | os.PathLike):
            reader = FileReader(folder, [relative_path(path, folder) for path in images])
        else:
            width = 5 if has_idx or set_name.startswith("CIFAR") else 6
            counts = Counter(splits)
            ids = [f"{split}/{k:0{width}d}" for split in counts for k in range(counts[split])]
            reader = ArrayReader(np.stack(images), ids)
    except Exception as error:
        # a download failed
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        # for damaged files that it doesn't check, torchvision raises errors of any type
        reason = f"{type(error).__name__}: {shorten(first_line(error))}"
        raise ValueError(
            f"the files of {name} in {folder} can't be read ({reason}); copy them again, or pass"
            " torchvision's sets from Python as dataset=…"
        ) from error
    labels = [names[number] for number in numbers]
    return Listing(
        name=name, origin=name, labels=labels, reader=reader, splits=splits, class_names=names
    )


def _read_published(dataset: Any) -> tuple[Sequence[Any], Sequence[int]]:
    """Return the pixels of a set's images, or their paths, and their labels."""
    if hasattr(dataset, "loader"):
        items = [dataset[index] for index in range(len(dataset))]
        return [image for image, _ in items], [label for _, label in items]
    labels: Any = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if not hasattr(dataset, "data") or labels is None:
        raise ValueError("its images are opened one by one")
    pixels = np.asarray(dataset.data)
    # SVHN and STL-10 have the channels first
    is_first = pixels.ndim == 4 and pixels.shape[1] == 3
    return list(pixels.transpose(0, 2, 3, 1) if is_first else pixels), labels


def _read_idx_pair(folder: Path, prefix: str) -> tuple[Sequence[Any], Sequence[int]]:
    """Read the images and labels of a split in idx files, plain or .gz."""
    images = _read_idx(folder, f"{prefix}-images?idx3-ubyte*", 3)
    labels = _read_idx(folder, f"{prefix}-labels?idx1-ubyte*", 1)
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels in {prefix}")
    return list(images), labels.tolist()


def _read_idx(folder: Path, pattern: str, dimensions: int) -> np.ndarray:
    path = min(folder.glob(pattern), default=folder / pattern)
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        # two zero bytes, 8 for unsigned bytes, the number of dimensions, each dimension
        header = file.read(4 + 4 * dimensions)
        shape = np.frombuffer(header, ">u4", offset=4).tolist()
        is_right = header[:4] == bytes([0, 0, 8, dimensions])
        if not is_right or not 0 < math.prod(shape) <= _MAX_UNPACKED:
            raise ValueError(f"{path} has another header than an idx file")
        # one more, so that a longer file is refused
        content = file.read(math.prod(shape) + 1)
    return np.frombuffer(content, np.uint8).reshape(shape)


NAMED: Mapping[str, Callable[[Request], Listing]] = {
    "digits": find_digits,
    "imagenette": find_imagenette,
    **{name: partial(find_torchvision, name) for name in _TORCHVISION},
}
