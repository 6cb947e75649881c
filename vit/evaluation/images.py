"""What is evaluated: names on the command line to images, and their classes to the model's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vit.data.cache import DecodedDataset, decode_dataset
from vit.data.duplicates import find_duplicates
from vit.data.images import Preprocess
from vit.data.open import SOURCES, ImageSource, Split, load_source
from vit.data.sets.folders import find_splits
from vit.data.sets.shards import find_shards
from vit.evaluation.metrics import Ints
from vit.evaluation.predictor import Pixels


def find_source(
    data: str | None, *, root: Path | None, split: str | None, trained_on: Mapping[str, Any]
) -> ImageSource:
    """The images to evaluate on.

    `data` is a data set's name (which is at `root`, where that is given), a folder or WebDataset shards; None
    is what the model was trained on, described by `trained_on`, the data section of its configuration. The
    split is "test" by default, and "all" for a folder or shards without one: as far as we know, the model has
    seen none of it.
    """
    if data is None and not trained_on:
        raise ValueError("this model doesn't say what it was trained on; name the images with --data")
    if data is None or _is_same(data, trained_on):
        return load_source(
            trained_on["name"],
            root=root or trained_on.get("root"),
            split=cast(Split, split or "test"),
            classes=trained_on.get("classes"),
            validation_fraction=trained_on.get("validation_fraction", 0.1),
            split_seed=trained_on.get("split_seed", 0),
        )
    if data in SOURCES and data not in ("folder", "webdataset"):
        return load_source(data, root=root, split=cast(Split, split or "test"))
    path = Path(data).expanduser()
    if data.startswith("pipe:") or ".tar" in data or (path.is_dir() and any(path.rglob("*.tar"))):
        name, splits = "webdataset", find_shards(data, None)
    elif path.is_dir():
        name, splits = "folder", find_splits("folder", path, None)
    else:
        known = ", ".join(name for name in SOURCES if name not in ("folder", "webdataset"))
        raise ValueError(f"--data {data} is no data set ({known}), no folder and no shards (.tar)")
    return load_source(name, root=data, split=cast(Split, split or ("test" if "test" in splits else "all")))


@dataclass(frozen=True)
class Images:
    """Decoded images to evaluate on."""

    dataset: DecodedDataset
    ids: tuple[str, ...]  # the dataset's, as text that any file can hold
    labels: Ints  # indices of the model's classes
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, start: int, stop: int) -> Pixels:
        """Images start … stop-1 as the model sees them, uint8 [B, H, W, 3]."""
        assert self.dataset.images is not None  # only a scan has none
        return self.preprocess.crop(self.dataset.images[start:stop])


def load_images(
    source: ImageSource, *, preprocess: Preprocess, class_names: Sequence[str], progress: bool
) -> Images:
    """Decode `source` (once: the result is cached) and match its classes with the model's `class_names`."""
    # before the decoding, which takes minutes: foreign classes are refused
    map_labels(source.labels, source_classes=source.class_names, model_classes=class_names)
    dataset = decode_dataset(
        source, size=preprocess.resize_size, interpolation=preprocess.interpolation, progress=progress
    )
    labels = map_labels(dataset.labels, source_classes=dataset.class_names, model_classes=class_names)
    return Images(dataset, tuple(printable(name) for name in dataset.ids), labels, preprocess)


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are no UTF-8 become replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@dataclass(frozen=True)
class Duplication:
    """Evaluated images that were in training: figures on them measure memory."""

    exact: int  # the same pixels
    near: int  # the same looks by a perceptual hash: recoded, rescaled or much alike
    examples: list[str]  # up to 20 of them, exact ones first


def count_duplicates(
    images: Images, training_hashes: tuple[NDArray[np.uint64], NDArray[np.uint64]]
) -> Duplication:
    """Look for `images` among those of which the model file holds hashes."""
    found = find_duplicates((images.dataset.digests, images.dataset.perceptual), training_hashes)
    rows = [*found.exact[:, 0].tolist(), *found.near[:, 0].tolist()]
    return Duplication(
        exact=len(found.exact), near=len(found.near), examples=[images.ids[row] for row in rows[:20]]
    )


def map_labels(labels: Ints, *, source_classes: Sequence[str], model_classes: Sequence[str]) -> Ints:
    """Labels of the source as indices of the model's classes, by name.

    A name also fits a list of synonyms that it begins ("tench" fits "tench, Tinca tinca", timm's spelling).
    Raises ValueError naming the classes that occur among the labels and that the model doesn't know.
    """
    first_words = Counter(name.partition(",")[0] for name in model_classes)
    index = {
        name.partition(",")[0]: position
        for position, name in enumerate(model_classes)
        if first_words[name.partition(",")[0]] == 1
    }
    index |= {name: position for position, name in enumerate(model_classes)}
    unknown = [source_classes[label] for label in np.unique(labels) if source_classes[label] not in index]
    if unknown:
        raise ValueError(
            f"the model doesn't know {_shorten(unknown)} of this data; it knows {_shorten(model_classes)}"
        )
    table = np.array([index.get(name, -1) for name in source_classes], dtype=np.int64)
    return table[labels]


def _is_same(data: str, trained_on: Mapping[str, Any]) -> bool:
    if data in SOURCES:
        return data == trained_on.get("name")
    root = trained_on.get("root")
    return root is not None and Path(data).expanduser().resolve() == Path(root).expanduser().resolve()


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
