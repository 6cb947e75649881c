"""Sets known by name: scikit-learn's digits, torchvision's CIFAR and Imagenette, an ImageNet
folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.class_names import deduplicate, read_words
from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.sources.base import ArrayReader, Root, find_split_folders
from vit.data.sources.folders import check_root, find_class_folders, list_classes
from vit.data.sources.source import Request, Source, root_exists
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

    dataset_class = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    folder = choose_folder(name, request.root)
    # a folder of images would be taken for a download that broke off
    if request.root is not None and "train" in find_split_folders(folder):
        text = f"data.root {folder} is an image folder (train/<class>/…), not the published {name}"
        raise ValueError(f"{text}; read it with data.name=folder")

    def load(split: str) -> ImageDataset:
        open_published = partial(dataset_class, folder, train=split == "train")
        archive = f"{dataset_class.filename} (from {dataset_class.url})"
        published = open_or_download(open_published, name, folder, archive)
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
    assert request.root is not None
    folder = check_root(request.root)
    splits = find_split_folders(folder)
    if "train" not in splits:
        hint = "ImageNet is read as train/<wnid> and val/<wnid>"
        raise ValueError(f"data.root {folder} has no train/ folder; {hint}")

    words = {}
    mapping = folder / "LOC_synset_mapping.txt"
    if mapping.is_file():
        words = read_words(mapping)
    elif len(wnids := list_classes(splits["train"])) == 1000:
        # takes seconds to import
        from torchvision.models import ResNet18_Weights

        words = dict(zip(wnids, ResNet18_Weights.IMAGENET1K_V1.meta["categories"], strict=True))
    aliases = dict(zip(words, deduplicate(words), strict=True))
    return find_class_folders("imagenet", folder, request.classes, aliases=aliases)


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
)


def choose_folder(name: str, root: Root) -> Path:
    """Return the folder where a published set is, or will be downloaded to."""
    if root is None:
        return default_cache_dir() / "downloads" / name
    return check_root(root)


def open_or_download(
    open_published: Callable[..., Any], name: str, folder: Path, archive: str
) -> Any:
    """Open torchvision's data set in `folder`; download it (with its checksum) if it is missing.

    Args:
        open_published: torchvision's class with its arguments.
        name: Name of the set, for messages.
        folder: The folder.
        archive: Files to download by hand, for messages.

    Raises:
        OSError: The download failed; the message says how to do it by hand.
    """
    # without download=True no network is used
    with suppress(RuntimeError, OSError):
        return open_published()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open_published(download=True)
    # torchvision raises ValueError for a set that has no address any more
    except (RuntimeError, OSError, ValueError) as error:
        hint = f"by hand: put {archive} into {folder} and start again, or point data.root at a copy"
        # torchvision's message has a line for each mirror
        reason = " ".join(str(error).split())
        raise OSError(f"{name} could not be downloaded ({reason}); {hint}") from error
