"""Sets known by name: scikit-learn's digits, those of torchvision, Imagenette, an ImageNet folder."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.class_names import deduplicate, read_words
from vit.data.dataset import ImageDataset, Request, Source, SourceSplits, root_exists
from vit.data.sources.base import ArrayReader, FileReader, Root, find_split_folders, relative_path
from vit.data.sources.folders import check_root, find_class_folders, list_classes
from vit.data.sources.idx import find_idx, list_idx
from vit.data.sources.python_objects import read_map_style
from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import default_cache_dir

# 320 pixels of the shorter side are enough to train at 224, in a quarter of the full download
_IMAGENETTE = "imagenette2-320"
_IMAGENETTE_URL = f"https://s3.amazonaws.com/fast-ai-imageclas/{_IMAGENETTE}.tgz"
_IMAGENETTE_CLASSES = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}

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
# would be decoded to list them. tests/data/sources/test_torchvision_sets.py tests them.
_SAMPLES: Mapping[str, Callable[[Any], Iterable[tuple[Any, int]]]] = {
    "GTSRB": lambda dataset: dataset._samples,
    "OxfordIIITPet": lambda dataset: zip(dataset._images, dataset._labels, strict=True),
}


def find_digits(request: Request) -> SourceSplits:
    """Find scikit-learn's 1,797 scanned digits, 8×8 pixels of 0..16, in the installed package."""

    def load(split: str) -> ImageDataset:
        # takes a second to import
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.round(digits.images[..., None] * (255 / 16)).astype(np.uint8).repeat(3, axis=-1)
        dataset = _make_dataset("digits", "digits", pixels, digits.target, "0123456789")
        return dataset.keep_classes(request.classes)

    return SourceSplits({"train": "scikit-learn's digits"}, load)


def find_cifar(name: str, request: Request) -> SourceSplits:
    """Find CIFAR-10 or CIFAR-100 (Krizhevsky 2009), verified by torchvision's checksums."""
    # takes seconds to import
    from torchvision import datasets

    dataset_class = getattr(datasets, name.upper())
    folder = choose_folder(name, request.root)
    # a folder of images would be taken for a download that broke off
    if request.root is not None and "train" in find_split_folders(folder):
        raise ValueError(
            f"data.root {folder} is an image folder (train/<class>/…), not the published {name}"
            "; read it with data.name=folder"
        )

    def load(split: str) -> ImageDataset:
        open_published = partial(dataset_class, folder, train=split == "train")
        archive = f"{dataset_class.filename} (from {dataset_class.url})"
        published = open_or_download(
            open_published, name, folder, archive, download=request.download
        )
        labels = np.array(published.targets)
        dataset = _make_dataset(name, split, published.data, labels, published.classes)
        return dataset.keep_classes(request.classes)

    return SourceSplits(
        {"train": "the published training set", "test": "the published test set"}, load
    )


def find_imagenette(request: Request) -> SourceSplits:
    """Find Imagenette v2: ten easy ImageNet classes, by wnid or name. Its val/ folder is the test
    split."""
    folder = choose_folder("imagenette", request.root)
    # the folder itself, or the place where the download was unpacked
    for copy in (folder, *sorted(folder.glob("imagenette2*"))):
        if _is_imagenette(copy):
            break
    else:
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
    return find_class_folders("imagenette", copy, request.classes, aliases=_IMAGENETTE_CLASSES)


def _is_imagenette(folder: Path) -> bool:
    return folder.is_dir() and {"train", "validation"} <= find_split_folders(folder).keys()


def find_imagenet(request: Request) -> SourceSplits:
    """Find an ImageNet folder, train/<wnid> and val/<wnid>, with the classes named by wnid or name.

    Names come from LOC_synset_mapping.txt beside the folders, or from torchvision if all 1,000
    wnids are there.
    """
    folder = check_root(request.place)
    splits = find_split_folders(folder)
    if "train" not in splits:
        hint = "ImageNet is read as train/<wnid> and val/<wnid>"
        raise ValueError(f"data.root {folder} has no train/ folder; {hint}")

    words = {}
    # it is beside the folders, or above Kaggle's ILSVRC/Data/CLS-LOC
    places = (folder, *folder.absolute().parents[:3])
    mappings = [place / "LOC_synset_mapping.txt" for place in places]
    mapping = next((path for path in mappings if path.is_file()), None)
    if mapping is not None:
        words = read_words(mapping)
    elif len(wnids := list_classes(splits["train"])) == 1000:
        # takes seconds to import
        from torchvision.models import ResNet18_Weights

        words = dict(zip(wnids, ResNet18_Weights.IMAGENET1K_V1.meta["categories"], strict=True))
    return find_class_folders("imagenet", folder, request.classes, aliases=deduplicate(words))


def _make_dataset(
    name: str, prefix: str, pixels: np.ndarray, labels: np.ndarray, class_names: Sequence[str]
) -> ImageDataset:
    return ImageDataset(
        name=name,
        class_names=tuple(class_names),
        labels=labels,
        ids=[f"{prefix}/{index:05d}" for index in range(len(pixels))],
        reader=ArrayReader(pixels),
    )


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


def find_torchvision(set_name: str, request: Request) -> SourceSplits:
    """Find a set of torchvision; missing files are downloaded with torchvision's checksums.

    Splits are the published ones. Classes have torchvision's names, or numbers if it has none.

    Args:
        set_name: Name of torchvision's class.
        request: Its root is torchvision's `root`, or a folder of idx files; None is the cache.

    Raises:
        OSError: The download failed; the message says how to do it by hand.
    """
    # takes seconds to import
    from torchvision import datasets

    dataset_class = getattr(datasets, set_name)
    folder = choose_folder(set_name.lower(), request.root)
    # Debian's packages and hand-made copies have idx files in the folder itself
    if issubclass(dataset_class, datasets.MNIST) and folder.is_dir():
        files, num_digits = list_idx(folder), 5
        raw = folder / set_name / "raw"
        # torchvision would download the packed files again, whose checksums may be others
        if not files and raw.is_dir():
            packed = list_idx(raw)
            are_packed = all(path.suffix == ".gz" for path in packed.values())
            # images have the names that they have when they are unpacked
            files, num_digits = packed if len(packed) == 2 and are_packed else {}, 6
        if files:
            names = dataset_class.classes
            return find_idx(
                set_name, files, request.classes, class_names=names, num_digits=num_digits
            )

    splits = _SPLITS[set_name]

    def load(split: str) -> ImageDataset:
        # the default of SEMEION is True
        open_published = partial(dataset_class, folder, download=False, **splits[split])
        # a `loader` of torchvision opens an image; this one returns its path
        if "loader" in inspect.signature(dataset_class).parameters:
            open_published = partial(open_published, loader=os.fspath)
        archive = f"the files of torchvision's {set_name}"
        dataset = open_or_download(
            open_published, set_name, folder, archive, download=request.download
        )
        try:
            images = _list_images(dataset, set_name, split, folder)
        except Exception as error:
            raise _explain_damage(set_name, folder, error) from error
        return images.keep_classes(request.classes)

    titles = {"train": "training", "validation": "validation", "test": "test"}
    return SourceSplits({split: f"the published {titles[split]} set" for split in splits}, load)


def _list_images(dataset: Any, set_name: str, split: str, folder: Path) -> ImageDataset:
    # Caltech's sets call them categories
    class_names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)

    samples = _read_samples(dataset, set_name)
    if samples is not None:
        pass
    elif hasattr(dataset, "loader"):
        samples = [dataset[index] for index in range(len(dataset))]
    else:
        # SVHN, USPS and SEMEION have digits and no names
        pixels = read_map_style(dataset, split, class_names or tuple("0123456789"))
        return replace(pixels, name=set_name, split="all")

    labels = np.array([label for _, label in samples], dtype=np.int64)
    paths = [relative_path(path, folder) for path, _ in samples]
    # without names, there are at most as many classes as images
    limit = len(class_names or samples)
    if labels.min() < 0 or labels.max() >= limit:
        raise ValueError(f"labels from {labels.min()} to {labels.max()} for {limit} classes")
    names = class_names or [str(number) for number in range(labels.max() + 1)]
    return ImageDataset(
        name=set_name,
        class_names=tuple(names),
        labels=labels,
        ids=paths,
        reader=FileReader(folder, paths),
    )


def _read_samples(dataset: Any, set_name: str) -> list[tuple[Any, int]] | None:
    """List the files and labels of a set by its private attributes; None if it has others."""
    if set_name not in _SAMPLES:
        return None
    # a later torchvision may call them otherwise: then its images are opened
    with suppress(AttributeError, TypeError):
        return list(_SAMPLES[set_name](dataset))
    return None


_TORCHVISION = {**_SHORT_NAMES, **{f"torchvision:{set_name}": set_name for set_name in _SPLITS}}
SOURCES = (
    Source("cifar10", partial(find_cifar, "cifar10")),
    Source("cifar100", partial(find_cifar, "cifar100")),
    Source("digits", find_digits, is_here=lambda root: True),
    Source("imagenet", find_imagenet, needs_root=True, is_here=root_exists, unit="files"),
    Source(
        "imagenette",
        find_imagenette,
        is_here=lambda root: root is not None and _is_imagenette(Path(root)),
    ),
    *(Source(name, partial(find_torchvision, set_name)) for name, set_name in _TORCHVISION.items()),
)
