"""The classification sets of torchvision, by the names of its classes: torchvision:Flowers102."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.sources.base import FileReader
from vit.data.sources.idx import find_idx, list_idx
from vit.data.sources.named import choose_folder, open_or_download
from vit.data.sources.python_objects import read_map_style
from vit.data.sources.source import Request, Source

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
        idx_files = list_idx(folder)
        if idx_files:
            names = dataset_class.classes
            return find_idx(set_name, idx_files, request.classes, class_names=names)

    splits = _SPLITS[set_name]

    def load(split: str) -> ImageDataset:
        # the default of SEMEION is True
        open_published = partial(dataset_class, folder, download=False, **splits[split])
        # a `loader` of torchvision opens an image; this one returns its path
        if "loader" in inspect.signature(dataset_class).parameters:
            open_published = partial(open_published, loader=os.fspath)
        archive = f"the files of torchvision's {set_name}"
        dataset = open_or_download(open_published, set_name, folder, archive)
        return _list_images(dataset, set_name, split, folder).keep_classes(request.classes)

    titles = {"train": "training", "validation": "validation", "test": "test"}
    return SourceSplits({split: f"the published {titles[split]} set" for split in splits}, load)


def _list_images(dataset: Any, set_name: str, split: str, folder: Path) -> ImageDataset:
    # Caltech's sets call them categories
    class_names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None)

    if set_name in _SAMPLES:
        samples = list(_SAMPLES[set_name](dataset))
    elif hasattr(dataset, "loader"):
        samples = [dataset[index] for index in range(len(dataset))]
    else:
        # SVHN, USPS and SEMEION have digits and no names
        pixels = read_map_style(dataset, split, class_names or tuple("0123456789"))
        return replace(pixels, name=set_name, split="all")

    labels = np.array([label for _, label in samples], dtype=np.int64)
    paths = [os.path.relpath(path, folder) for path, _ in samples]
    names = class_names or [str(number) for number in range(labels.max() + 1)]
    return ImageDataset(
        name=set_name,
        class_names=tuple(names),
        labels=labels,
        ids=paths,
        reader=FileReader(folder, paths),
    )


_NAMES = {**_SHORT_NAMES, **{f"torchvision:{set_name}": set_name for set_name in _SPLITS}}
SOURCES = [Source(name, partial(find_torchvision, set_name)) for name, set_name in _NAMES.items()]
