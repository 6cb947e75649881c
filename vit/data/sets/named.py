"""Sets known by name: scikit-learn's digits, torchvision's CIFAR and Imagenette, an ImageNet folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.class_names import make_unique, read_words
from vit.data.sets.folders import existing_root, find_splits, split_folders
from vit.data.sets.source import ArrayReader, FindOptions, FoundSplit, FoundSplits, ImageSource
from vit.runtime.files import default_cache_dir

_IMAGENETTE_SIZE = "320px"  # its shorter side: enough to train at 224, a quarter of the full download


def find_digits(options: FindOptions) -> FoundSplits:
    """scikit-learn's 1,797 scanned digits, 8×8 pixels of 0..16, inside the installed package."""

    def load() -> ImageSource:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.round(digits.images[..., None] * (255 / 16)).astype(np.uint8).repeat(3, axis=-1)
        source = _source("digits", "digits", pixels, labels=digits.target, names="0123456789")
        return source.keep_classes(options.classes)

    return {"train": FoundSplit("scikit-learn's digits", load)}


def _source(name: str, prefix: str, pixels: np.ndarray, *, labels: np.ndarray, names: Sequence[str]) -> ImageSource:
    ids, reader = [f"{prefix}/{index:05d}" for index in range(len(pixels))], ArrayReader(pixels)
    return ImageSource(name=name, class_names=tuple(names), labels=labels, ids=ids, reader=reader)


def find_cifar(name: str, options: FindOptions) -> FoundSplits:
    """CIFAR-10 or CIFAR-100 (Krizhevsky 2009) as published, verified by torchvision's checksums."""
    from torchvision import datasets

    dataset = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    folder = _download_root(name, options)

    def load(split: str) -> ImageSource:
        make = partial(dataset, folder, train=split == "train")
        data = _fetch(make, name, folder, f"{dataset.filename} (from {dataset.url})")
        source = _source(name, split, data.data, labels=np.array(data.targets), names=data.classes)
        return source.keep_classes(options.classes)

    published = {"train": "the published training set", "test": "the published test set"}
    return {split: FoundSplit(origin, partial(load, split)) for split, origin in published.items()}


def find_imagenette(options: FindOptions) -> FoundSplits:
    """Imagenette v2: ten easy ImageNet classes, by wnid or name. Its val/ folder is the test split."""
    from torchvision.datasets import Imagenette

    folder = _download_root("imagenette", options, class_folders=True)
    copies = [folder, *sorted(folder.glob("imagenette2*"))]
    unpacked = [copy for copy in copies if {"train", "validation"} <= split_folders(copy).keys()]
    if not unpacked:
        url = Imagenette._ARCHIVES[_IMAGENETTE_SIZE][0]
        _fetch(
            partial(Imagenette, folder, size=_IMAGENETTE_SIZE), "imagenette", folder, f"{Path(url).name} (from {url})"
        )
        unpacked = [folder / Path(url).stem]
    aliases = {wnid: names[0] for wnid, names in Imagenette._WNID_TO_CLASS.items()}
    return find_splits("imagenette", unpacked[0], options.classes, aliases=aliases)


def find_imagenet(options: FindOptions) -> FoundSplits:
    """An ImageNet folder, train/<wnid> and val/<wnid>, cut to the wanted classes by wnid or name.

    Names come from LOC_synset_mapping.txt beside the folders, or, where all 1,000 wnids are there, from torchvision.
    """
    folder = existing_root("imagenet", options)
    splits = split_folders(folder)
    if "train" not in splits:
        raise ValueError(f"data.root {folder} has no train/ folder; ImageNet is read as train/<wnid> and val/<wnid>")
    return find_splits("imagenet", folder, options.classes, aliases=_imagenet_names(folder, splits["train"]))


def _imagenet_names(root: Path, train: Path) -> dict[str, str]:
    wnids = sorted(entry.name for entry in train.iterdir() if entry.is_dir())
    mapping = root / "LOC_synset_mapping.txt"
    if mapping.is_file():
        names = read_words(mapping)
    elif len(wnids) == 1000:
        from torchvision.models import ResNet18_Weights

        names = dict(zip(wnids, ResNet18_Weights.IMAGENET1K_V1.meta["categories"], strict=True))
    else:
        return {}
    return dict(zip(names, make_unique(names), strict=True))


def _download_root(name: str, options: FindOptions, *, class_folders: bool = False) -> Path:
    """Where a set is or will be; refuses an image folder in place of a published archive."""
    if options.root is None:
        return default_cache_dir() / "downloads" / name
    folder = existing_root(name, options)
    if not class_folders and "train" in split_folders(folder):
        what = f"data.root {folder} is an image folder (train/<class>/…), not the published {name}"
        raise ValueError(f"{what}; read it with data.name=folder")
    return folder


def _fetch(make: Callable[..., Any], name: str, folder: Path, archive: str) -> Any:
    """torchvision's data set from `folder`, downloaded (with its checksum) where it isn't there yet."""
    with contextlib.suppress(RuntimeError, OSError):
        return make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return make(download=True)
    except (RuntimeError, OSError) as error:
        cure = f"by hand: put {archive} into {folder} and start again, or point data.root at a copy"
        raise OSError(f"{name} could not be downloaded ({error}); {cure}") from error
