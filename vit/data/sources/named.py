"""Sets known by name: scikit-learn's digits, those of torchvision, Imagenette, an ImageNet folder."""

import gzip
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
# images of a split (paths, or pixels) and their labels
_Split = tuple[Any, Sequence[int]]
# splits of torchvision's sets, as their class calls them; True and False are the values of `train`
_BY_TRAIN = (True, False)
_THREE = ("train", "val", "test")
_SPLITS: Mapping[str, Sequence[str | bool]] = {
    "CIFAR10": _BY_TRAIN,
    "CIFAR100": _BY_TRAIN,
    "Caltech101": (),
    "Caltech256": (),
    "Country211": ("train", "valid", "test"),
    "DTD": _THREE,
    "EuroSAT": (),
    "FGVCAircraft": _THREE,
    "FashionMNIST": _BY_TRAIN,
    "Flowers102": _THREE,
    "Food101": ("train", "test"),
    "GTSRB": ("train", "test"),
    "KMNIST": _BY_TRAIN,
    "MNIST": _BY_TRAIN,
    "OxfordIIITPet": ("trainval", "test"),
    "QMNIST": _BY_TRAIN,
    "RenderedSST2": _THREE,
    "SEMEION": (),
    "STL10": ("train", "test"),
    "SUN397": (),
    "SVHN": ("train", "test"),
    "StanfordCars": ("train", "test"),
    "USPS": _BY_TRAIN,
}
_SHORT_NAMES = {
    "fashion_mnist": "FashionMNIST",
    "pets": "OxfordIIITPet",
    **{name.lower(): name for name in _SPLITS},
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
        labels=list(map(str, digits.target.tolist())),
        reader=ArrayReader(pixels, "digits/", num_digits=5),
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


def find_torchvision(name: str, request: Request, *, set_name: str) -> Listing:
    """List a set of torchvision; missing files are downloaded with torchvision's checksums.

    Splits are the published ones. Classes have torchvision's names, or numbers if it has none.

    Args:
        name: The data.name.
        request: Its root is torchvision's `root`, or a folder of idx files; None is the cache.
        set_name: Name of torchvision's class.

    Raises:
        OSError: The download failed; the message says how to do it by hand.
        ValueError: Files are damaged.
    """
    # takes seconds to import
    from torchvision import datasets

    dataset_class = getattr(datasets, set_name)
    folder = _choose_folder(set_name.lower(), request.root)
    is_cifar = set_name.startswith("CIFAR")
    title = name if is_cifar else set_name
    # Debian's packages and hand-made copies have idx files in the folder itself
    has_idx = issubclass(dataset_class, datasets.MNIST) and any(folder.glob("train-images?idx3*"))
    open_set = partial(dataset_class, folder, download=False)
    # a `loader` of torchvision opens an image; this one returns its path
    if "loader" in inspect.signature(dataset_class).parameters:
        open_set = partial(open_set, loader=os.fspath)
    found: dict[str, _Split] = {}
    names: Sequence[str] | None = None
    try:
        for given in _SPLITS[set_name] or (None,):
            split = SPLIT_OF.get(str(given), "test" if given is False else "train")
            if has_idx:
                names = dataset_class.classes
                found[split] = _read_idx_pair(folder, "train" if given else "t10k")
                continue
            arguments = {} if given is None else {"train" if given in _BY_TRAIN else "split": given}
            dataset = _open_or_download(
                partial(open_set, **arguments), title, folder, download=request.download
            )
            # Caltech's sets call them categories
            names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)
            found[split] = _read_published(dataset, set_name)
        num_digits = 5 if is_cifar or has_idx else 6
        return _list_published(title, folder, found, names, num_digits=num_digits)
    except Exception as error:
        # a download failed
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        # for damaged files that it doesn't check, torchvision raises errors of any type
        reason = f"{type(error).__name__}: {shorten(first_line(error))}"
        raise ValueError(
            f"the files of {name} in {folder} are damaged ({reason}); copy them again"
        ) from error


def _read_published(dataset: Any, set_name: str) -> _Split:
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    samples: Sequence[tuple[Any, int]] = []
    if set_name in _SAMPLES:
        with suppress(AttributeError, TypeError):
            samples = list(_SAMPLES[set_name](dataset))
    elif not hasattr(dataset, "loader") and hasattr(dataset, "data") and labels is not None:
        pixels = np.asarray(dataset.data)
        # SVHN and STL-10 have the channels first
        is_first = pixels.ndim == 4 and pixels.shape[1] == 3
        return pixels.transpose(0, 2, 3, 1) if is_first else pixels, np.asarray(labels).tolist()
    samples = samples or [dataset[index] for index in range(len(dataset))]
    images = [image for image, _ in samples]
    if not isinstance(images[0], str | os.PathLike):
        images = [np.asarray(image.convert("RGB")) for image in images]
    return images, [int(label) for _, label in samples]


def _list_published(
    name: str,
    folder: Path,
    found: Mapping[str, _Split],
    names: Sequence[str] | None,
    *,
    num_digits: int,
) -> Listing:
    """List the splits of a published set."""
    numbers = [label for _, labels in found.values() for label in labels]
    limit = len(names or numbers)
    if min(numbers) < 0 or max(numbers) >= limit:
        raise ValueError(f"labels from {min(numbers)} to {max(numbers)} for {limit} classes")
    names = list(map(str, names or range(max(numbers) + 1)))
    images = [image for each, _ in found.values() for image in each]
    reader: ImageReader
    if isinstance(images[0], str | os.PathLike):
        reader = FileReader(folder, [relative_path(path, folder) for path in images])
    elif all(isinstance(each, np.ndarray) for each, _ in found.values()):
        reader = ArrayReader(np.concatenate([each for each, _ in found.values()]))
    else:
        # images of several sizes
        pixels = np.empty(len(images), dtype=object)
        for index, image in enumerate(images):
            pixels[index] = image
        reader = ArrayReader(pixels)
    if isinstance(reader, ArrayReader):
        counts = {split: range(len(labels)) for split, (_, labels) in found.items()}
        reader.names = [f"{split}/{k:0{num_digits}d}" for split in counts for k in counts[split]]
    return Listing(
        name=name,
        origin=name,
        labels=[names[number] for number in numbers],
        reader=reader,
        splits=[split for split, (_, labels) in found.items() for _ in labels],
        class_names=names,
    )


def _read_idx_pair(folder: Path, prefix: str) -> _Split:
    """Read the images and labels of a split in idx files, plain or .gz."""
    images = _read_idx(folder, f"{prefix}-images?idx3-ubyte*", 3)
    labels = _read_idx(folder, f"{prefix}-labels?idx1-ubyte*", 1)
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels in {prefix}")
    return images, labels.tolist()


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


_TORCHVISION = {**_SHORT_NAMES, **{f"torchvision:{set_name}": set_name for set_name in _SPLITS}}
NAMED: Mapping[str, Callable[[Request], Listing]] = {
    "digits": find_digits,
    "imagenette": find_imagenette,
    **{
        name: partial(find_torchvision, name, set_name=set_name)
        for name, set_name in _TORCHVISION.items()
    },
}
