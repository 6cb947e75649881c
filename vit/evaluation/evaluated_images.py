"""Images to evaluate on, with their labels as the model's classes, and which of them were in training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.data.dataset import DecodedDataset
from vit.data.duplicates import find_duplicates
from vit.data.images import Preprocess
from vit.data.open import ImageDataset
from vit.evaluation.metrics import Ints
from vit.evaluation.predictor import Pixels


@dataclass(frozen=True)
class Images:
    """Decoded images to evaluate on."""

    dataset: DecodedDataset
    ids: tuple[str, ...]  # the dataset's, as text that any file can hold
    labels: Ints  # indices of the model's classes
    preprocess: Preprocess
    title: str = ""  # of the data set, for readers

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, start: int, stop: int) -> Pixels:
        """Images start … stop-1 as the model sees them, uint8 [B, H, W, 3]."""
        assert self.dataset.images is not None  # only a scan has none
        return self.preprocess.crop(self.dataset.images[start:stop])


def load_images(
    dataset: ImageDataset, split: str | None, *, preprocess: Preprocess, class_names: Sequence[str], progress: bool
) -> Images:
    """Decode a split (None: the default one), and match its classes with the model's `class_names`."""
    source = dataset.split(split)
    # before the decoding, which takes minutes: foreign classes are refused
    map_labels(source.labels, source_classes=source.class_names, model_classes=class_names)
    decoded = dataset.decode(split, preprocess, progress=progress)
    labels = map_labels(decoded.labels, source_classes=decoded.class_names, model_classes=class_names)
    ids = tuple(printable(name) for name in decoded.ids)
    return Images(decoded, ids, labels, preprocess, printable(dataset.title))


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are no UTF-8 become replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@dataclass(frozen=True)
class Duplication:
    """Evaluated images that were in training: metrics on them don't measure generalisation."""

    exact: int  # the same pixels
    near: int  # a similar perceptual hash: recoded, rescaled or much alike
    examples: list[str]  # up to 20 of them, exact ones first


def count_duplicates(images: Images, training_hashes: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> Duplication:
    """Look for `images` among those of which the model file holds hashes."""
    found = find_duplicates((images.dataset.digests, images.dataset.perceptual), training_hashes)
    indices = [*found.exact[:, 0].tolist(), *found.near[:, 0].tolist()]
    return Duplication(len(found.exact), len(found.near), [images.ids[index] for index in indices[:20]])


def map_labels(labels: Ints, *, source_classes: Sequence[str], model_classes: Sequence[str]) -> Ints:
    """Labels of the source as indices of the model's classes, by name.

    A name also fits a list of synonyms that it begins ("tench" fits "tench, Tinca tinca", timm's spelling).
    Raises ValueError naming the classes that occur among the labels and that the model doesn't know.
    """
    first_words = [name.partition(",")[0] for name in model_classes]
    counts = Counter(first_words)
    index = {word: position for position, word in enumerate(first_words) if counts[word] == 1}
    index |= {name: position for position, name in enumerate(model_classes)}
    unknown = [source_classes[label] for label in np.unique(labels) if source_classes[label] not in index]
    if unknown:
        raise ValueError(f"the model doesn't know {_shorten(unknown)} of this data; it knows {_shorten(model_classes)}")
    return np.array([index.get(name, -1) for name in source_classes], dtype=np.int64)[labels]


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
