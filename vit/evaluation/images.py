"""Images that a model is evaluated on, with their labels as classes of the model, and those of them
that were in training."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.bundle import Bundle
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset, LabelRule, printable
from vit.data.duplicates import find_duplicates
from vit.data.open import open_for_model, open_passed
from vit.data.preprocess import Preprocess
from vit.data.splits import DatasetSplits
from vit.prediction.features import read_dataset
from vit.prediction.predictor import Pixels
from vit.prediction.probabilities import Bools, Ints
from vit.runtime.arguments import check_kind, shorten
from vit.runtime.processes import current_process

_MAX_DUPLICATE_NAMES = 20


@dataclass(frozen=True)
class EvaluationSet:
    """Decoded images with their labels.

    Attributes:
        dataset: The images.
        ids: Their names, as text that any file can hold.
        labels: Indices of the model's classes, [n]; or which labels each image has, bool [n, C].
        preprocess: The model's preprocessing.
        title: Name of the data set for readers.
        splits: The data that the model was trained on, if the images are from it. The report shows
            training photos from here instead of listing the files again.
    """

    dataset: ImageDataset
    ids: tuple[str, ...]
    labels: NDArray[Any]
    preprocess: Preprocess
    title: str = ""
    splits: DatasetSplits | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def groups(self) -> tuple[str, ...] | None:
        """Group of each image, as text that any file can hold; None if each is its own."""
        groups = self.dataset.groups
        return None if groups is None else tuple(map(printable, groups))

    @property
    def files(self) -> tuple[str, ...]:
        """Path of each image from the working directory, as text that any file can hold; empty for
        an image that isn't a file."""
        here = os.path.join(os.getcwd(), "")
        paths = map(self.dataset.reader.path, range(len(self)))
        return tuple(printable(path or "").removeprefix(here) for path in paths)

    def read(self, start: int, stop: int) -> Pixels:
        """Return images start … stop-1 as the model sees them, uint8 [B, H, W, 3]."""
        return read_dataset(self.dataset, self.preprocess, start, stop)


def load_images(bundle: Bundle, dataset: DatasetSplits, split: str | None) -> EvaluationSet:
    """Decode a split and match its classes with the model's.

    Args:
        bundle: The model.
        dataset: The data set.
        split: Name of the split; None: the default one.

    Raises:
        ValueError: A class of the data is not one of the model's.
    """
    source = dataset.split(split)
    if source.is_multilabel != bundle.is_multilabel:
        ours, theirs = "one class", "several labels"
        if bundle.is_multilabel:
            ours, theirs = theirs, ours
        raise ValueError(
            f"the model predicts {ours} an image, and the images of {dataset.title or dataset.name}"
            f" have {theirs}; name others with --data"
        )
    # Unknown classes are refused before the decoding, which may take minutes.
    find_labels(source, bundle.class_names)
    preprocess = bundle.preprocess
    decoded = decode_dataset(
        source,
        size=preprocess.resize_size,
        preprocess=preprocess,
        cache_dir=dataset.cache_dir,
        progress=current_process().is_main,
    )
    return EvaluationSet(
        dataset=decoded,
        ids=tuple(printable(name) for name in decoded.ids),
        labels=find_labels(decoded, bundle.class_names),
        preprocess=preprocess,
        title=printable(dataset.title),
    )


def find_labels(dataset: ImageDataset, model_classes: Sequence[str]) -> Ints | Bools:
    """Return the labels of images as classes of a model, int64 [n] or bool [n, C]. See
    `match_classes`."""
    class_indices = match_classes(
        np.flatnonzero(dataset.class_counts),
        source_classes=dataset.class_names,
        model_classes=model_classes,
    )
    if not dataset.is_multilabel:
        return np.asarray(class_indices[dataset.labels])
    labels = np.zeros((len(dataset), len(model_classes)), dtype=bool)
    known = class_indices >= 0
    labels[:, class_indices[known]] = dataset.labels[:, known]
    return labels


def match_classes(
    labels: Ints, *, source_classes: Sequence[str], model_classes: Sequence[str]
) -> Ints:
    """Return for each class of a data set the index of the model's class of that name, or -1.

    A name also matches a list of synonyms that it begins: "tench" matches "tench, Tinca tinca",
    as timm spells it.

    Raises:
        ValueError: Labels name classes that the model doesn't know.
    """
    first_words = [name.partition(",")[0] for name in model_classes]
    counts = Counter(first_words)
    index = {word: position for position, word in enumerate(first_words) if counts[word] == 1}
    index |= {name: position for position, name in enumerate(model_classes)}
    occurring = [source_classes[label] for label in np.unique(labels)]
    unknown = [name for name in occurring if name not in index]
    if unknown:
        unknown_names = shorten(", ".join(map(repr, unknown)))
        known_names = shorten(", ".join(map(repr, model_classes)))
        hint = ""
        if model_classes[0] == "class 0":
            hint = "; name its classes, in order, by vit.load_bundle(model, class_names=…)"
        raise ValueError(
            f"the model doesn't know {unknown_names} of this data; it knows {known_names}{hint}"
        )
    return np.array([index.get(name, -1) for name in source_classes], dtype=np.int64)


def check_data(data: str | Path | None, dataset: Any) -> None:
    """Check the arguments `data` and `dataset` of a public function before its model is loaded.

    Raises:
        ValueError: `data` is neither a name nor a path, or both are given.
    """
    if data is None:
        return
    expected = "a name or path; pass images from Python as dataset=…"
    check_kind(data, (str, Path), name="data", expected=expected)
    if dataset is not None:
        raise ValueError("data names images and dataset passes others; give one of them")


def check_no_rule(labels: LabelRule, group_by: int | str | None) -> None:
    """Raise ValueError for options that images from Python don't have."""
    if labels != LabelRule() or group_by is not None:
        names = "group_by, label_by and the names of columns"
        raise ValueError(f"{names} are for folders and tables, not for dataset=…; leave them out")


def open_data(
    bundle: Bundle,
    data: str | Path | None,
    root: str | Path | None,
    dataset: Any,
    *,
    labels: LabelRule = LabelRule(),  # noqa: B008 (immutable)
    group_by: int | str | None = None,
) -> DatasetSplits:
    """Open the images that a user names or passes; by default those of the model's training."""
    if dataset is not None:
        check_no_rule(labels, group_by)
        return open_passed(
            dataset,
            model_classes=bundle.class_names,
            task=bundle.recorded_images.task,
        )
    if data is None and bundle.passed_images is not None:
        return bundle.passed_images
    return open_for_model(
        data, root=root, recorded=bundle.recorded_images, labels=labels, group_by=group_by
    )


@dataclass(frozen=True)
class TrainTestOverlap:
    """Evaluated images that were in training: metrics on them don't measure generalisation.

    Attributes:
        exact: Number of images with the same pixels as one in training.
        near: Number of images with a similar perceptual hash: recoded, resized, mirrored or much
            alike.
        examples: Up to 20 of them, exact ones first.
        accuracy_without: Accuracy on the other images, 0 to 1; of several labels the fraction of
            images of which all are right. Null if there are none.
    """

    exact: int
    near: int
    examples: list[str]
    accuracy_without: float | None

    def describe(self) -> str:
        """Return how many images were in training, in a sentence; empty without any."""
        if not self.exact + self.near:
            return ""
        return (
            f"{self.exact} of these images were in training, {self.near} more are near-duplicates"
            f" of one that was: {', '.join(self.examples[:3])}"
        )


def find_overlap(
    bundle: Bundle, images: EvaluationSet, *, is_correct: Bools
) -> TrainTestOverlap | None:
    """Look for images that were in training; None if it isn't known which ones were.

    Args:
        bundle: The model.
        images: The evaluated images.
        is_correct: True for each of them that is predicted correctly, [n].
    """
    # training that decodes its images batch by batch records no hashes
    if bundle.training_hashes is None or images.dataset.hashes is None:
        return None
    exact, near = find_duplicates(images.dataset.hashes, np.stack(bundle.training_hashes))
    indices = [*exact[:, 0].tolist(), *near[:, 0].tolist()]
    # the accuracy on images that the model has not seen
    others = np.delete(is_correct, indices)
    return TrainTestOverlap(
        exact=len(exact),
        near=len(near),
        examples=[images.ids[index] for index in indices[:_MAX_DUPLICATE_NAMES]],
        accuracy_without=float(others.mean()) if len(others) else None,
    )
