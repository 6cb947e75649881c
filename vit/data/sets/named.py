"""Sets known by name: scikit-learn's digits, torchvision's CIFAR and Imagenette, an ImageNet folder."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.sets.folders import existing_root, find_splits, split_folders
from vit.data.sets.source import ArrayReader, FindOptions, FoundSplit, FoundSplits, ImageSource, keep_classes
from vit.runtime.files import default_cache_dir

_IMAGENETTE_SIZE = "320px"  # its shorter side: enough to train at 224, a quarter of the full download


def find_digits(options: FindOptions) -> FoundSplits:
    """scikit-learn's 1,797 scanned digits, 8×8 pixels of 0..16, inside the installed package."""

    def load() -> ImageSource:
        from sklearn.datasets import load_digits

        digits = load_digits()
        grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
        source = ImageSource(
            name="digits",
            class_names=tuple("0123456789"),
            labels=digits.target,
            ids=[f"digits/{index:05d}" for index in range(len(grey))],
            reader=ArrayReader(np.repeat(grey[..., None], 3, axis=-1)),
        )
        return keep_classes(source, options.classes)

    return {"train": FoundSplit("scikit-learn's digits", load)}


def find_cifar(name: str, options: FindOptions) -> FoundSplits:
    """CIFAR-10 or CIFAR-100 (Krizhevsky 2009) as published, verified by torchvision's checksums."""
    from torchvision import datasets

    dataset = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    folder = _download_root(name, options.root)

    def load(split: str) -> ImageSource:
        make = partial(dataset, folder, train=split == "train")
        archive = f"{dataset.filename} (from {dataset.url})"
        data = _fetch(make, name, folder, archive)
        source = ImageSource(
            name=name,
            class_names=tuple(data.classes),
            labels=np.array(data.targets),
            ids=[f"{split}/{index:05d}" for index in range(len(data.data))],
            reader=ArrayReader(data.data),
        )
        return keep_classes(source, options.classes)

    published = {"train": "the published training set", "test": "the published test set"}
    return {split: FoundSplit(origin, partial(load, split)) for split, origin in published.items()}


def find_imagenette(options: FindOptions) -> FoundSplits:
    """Imagenette v2: ten easy ImageNet classes, by wnid or name. Its val/ folder is the test split."""
    from torchvision.datasets import Imagenette

    folder = _download_root("imagenette", options.root, class_folders=True)
    copies = [folder, *sorted(folder.glob("imagenette2*"))]
    unpacked = [copy for copy in copies if {"train", "validation"} <= split_folders(copy).keys()]
    if not unpacked:
        url = Imagenette._ARCHIVES[_IMAGENETTE_SIZE][0]
        make = partial(Imagenette, folder, size=_IMAGENETTE_SIZE)
        archive = f"{Path(url).name} (from {url})"
        _fetch(make, "imagenette", folder, archive)
        unpacked = [folder / Path(url).stem]
    aliases = {wnid: names[0] for wnid, names in Imagenette._WNID_TO_CLASS.items()}
    return find_splits("imagenette", unpacked[0], options.classes, aliases=aliases)


def find_imagenet(options: FindOptions) -> FoundSplits:
    """An ImageNet folder, train/<wnid> and val/<wnid>, cut to the wanted classes by wnid or name.

    Names come from LOC_synset_mapping.txt beside the folders (it is in the published archive), or, where
    all 1,000 wnids are there, from torchvision's list.
    """
    folder = existing_root("imagenet", options.root)
    splits = split_folders(folder)
    if "train" not in splits:
        raise ValueError(f"data.root {folder} has no train/ folder; ImageNet is read as train/<wnid> and val/<wnid>")
    return find_splits("imagenet", folder, options.classes, aliases=_imagenet_names(folder, splits["train"]))


def _imagenet_names(root: Path, train: Path) -> dict[str, str]:
    wnids = sorted(entry.name for entry in train.iterdir() if entry.is_dir())
    mapping = root / "LOC_synset_mapping.txt"
    if mapping.is_file():
        pairs = [line.split(maxsplit=1) for line in mapping.read_text().splitlines() if line.strip()]
        names = {wnid: text.split(",")[0].strip() for wnid, text in pairs}
    elif len(wnids) == 1000:
        from torchvision.models import ResNet18_Weights

        names = dict(zip(wnids, ResNet18_Weights.IMAGENET1K_V1.meta["categories"], strict=True))
    else:
        return {}
    uses = Counter(names.values())  # "crane" is a bird and a machine
    return {wnid: name if uses[name] == 1 else f"{name} ({wnid})" for wnid, name in names.items()}


def _download_root(name: str, root: Path | str | None, *, class_folders: bool = False) -> Path:
    """Where a set is or will be; refuses an image folder in place of a published archive."""
    if root is None:
        return default_cache_dir() / "downloads" / name
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"data.root {folder} is not a folder")
    if not class_folders and "train" in split_folders(folder):
        raise ValueError(
            f"data.root {folder} is an image folder (train/<class>/…), not the published {name}; "
            "read it with data.name=folder"
        )
    return folder


def _fetch(make: Callable[..., Any], name: str, folder: Path, archive: str) -> Any:
    """torchvision's data set from `folder`, downloaded (with its checksum) where it isn't there yet."""
    with contextlib.suppress(RuntimeError, OSError):
        return make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return make(download=True)
    except (RuntimeError, OSError) as error:
        raise OSError(
            f"{name} could not be downloaded ({error}); by hand: put {archive} into {folder} and start "
            "again, or point data.root at a copy"
        ) from error
