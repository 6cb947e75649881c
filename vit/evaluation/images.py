"""Images that a model is evaluated on, with their labels as classes of the model, and those of them
that were in training."""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.bundle import Bundle
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset, ImageRule, printable
from vit.data.duplicates import find_duplicates
from vit.data.open import open_for_model, open_passed
from vit.data.preprocess import Preprocess
from vit.data.splits import DatasetSplits
from vit.prediction.batch_predictor import Pixels, read_dataset
from vit.prediction.probabilities import Bools, Ints
from vit.runtime.arguments import check_kind, shorten

# names of duplicates in evaluation.json
_MAX_NAMES = 20


@dataclass(frozen=True)
class EvaluationSet:
    """Decoded images with their names, as text that any file can hold, and their labels: indices of
    the model's classes, [n], or which labels each image has, bool [n, C]."""

    dataset: ImageDataset
    ids: tuple[str, ...]
    labels: NDArray[Any]
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_groups(self) -> int:
        """Number of groups; without groups, each image is its own."""
        return len(set(self.dataset.groups or self.ids))

    def read(self, start: int, stop: int) -> Pixels:
        """Return images start … stop-1 as the model sees them, uint8 [B, H, W, 3]."""
        return read_dataset(self.dataset, self.preprocess, start, stop)


def load_images(bundle: Bundle, splits: DatasetSplits, split: str | None) -> EvaluationSet:
    """Decode a split and match its classes with the model's. Raises ValueError if one isn't the
    model's, or only one of both has several labels an image."""
    source = splits.split(split)
    if source.is_multilabel != bundle.is_multilabel:
        kinds = ["one class", "several labels"]
        raise ValueError(
            f"the model predicts {kinds[bundle.is_multilabel]} an image, and the images of"
            f" {splits.title} have {kinds[source.is_multilabel]}; name others with"
            " --data"
        )
    # Unknown classes are refused before the decoding, which may take minutes.
    find_labels(source, bundle.class_names)
    decoded = decode_dataset(source, bundle.preprocess)
    ids = tuple(printable(name) for name in decoded.ids)
    labels = find_labels(decoded, bundle.class_names)
    return EvaluationSet(decoded, ids, labels, bundle.preprocess)


def find_labels(dataset: ImageDataset, model_classes: Sequence[str]) -> Ints | Bools:
    """Return the labels of images as classes of a model, int64 [n] or bool [n, C]. A name also
    matches a list of synonyms that it begins: "tench" matches "tench, Tinca tinca", as timm spells
    it. Raises ValueError for classes that the model doesn't know."""
    synonyms = [name.partition(",")[0] for name in model_classes]
    counts = Counter(synonyms)
    places = {name: place for place, name in enumerate(synonyms) if counts[name] == 1}
    places |= {name: place for place, name in enumerate(model_classes)}
    occurring = [dataset.class_names[label] for label in np.flatnonzero(dataset.class_counts)]
    unknown = [name for name in occurring if name not in places]
    if unknown:
        hint = ""
        if model_classes[0] == "class 0":
            hint = "; name its classes, in order, by vit.load_bundle(model, class_names=…)"
        raise ValueError(
            f"the model doesn't know {shorten(', '.join(map(repr, unknown)))} of this data; it"
            f" knows {shorten(', '.join(map(repr, model_classes)))}{hint}"
        )
    indices = np.array([places.get(name, -1) for name in dataset.class_names], dtype=np.int64)
    if not dataset.is_multilabel:
        return np.asarray(indices[dataset.labels])
    labels = np.zeros((len(dataset), len(model_classes)), dtype=bool)
    known = indices >= 0
    labels[:, indices[known]] = dataset.labels[:, known]
    return labels


def check_data(
    data: str | Path | None,
    dataset: Any,
    rule: ImageRule = ImageRule(),  # noqa: B008 (immutable)
) -> None:
    """Check how a public function is told its images, before its model is loaded."""
    if data is not None:
        expected = "a name or path; pass images from Python as dataset=…"
        check_kind(data, (str, Path), name="data", expected=expected)
    if dataset is not None and (data, rule) != (None, ImageRule()):
        raise ValueError(
            "data, group_by, label_by and the names of columns are for folders and tables, not for"
            " dataset=…; leave them out"
        )


def open_data(
    bundle: Bundle,
    data: str | Path | None,
    root: str | Path | None,
    dataset: Any,
    *,
    rule: ImageRule = ImageRule(),  # noqa: B008 (immutable)
) -> DatasetSplits:
    """Open the images that a user names or passes; by default those of the model's training."""
    recorded = bundle.recorded_images
    if dataset is not None:
        passed = ImageRule(task=recorded.get("task"), validation_fraction=0.0)
        return open_passed(dataset, rule=passed, model_classes=bundle.class_names)
    if data is None and bundle.passed_images is not None:
        return bundle.passed_images
    return open_for_model(data, root=root, recorded=recorded, rule=rule)


@dataclass(frozen=True)
class TrainTestOverlap:
    """Evaluated images that were in training: metrics on them don't measure generalisation.

    `exact` ones have the same pixels, `near` ones are recoded, resized, mirrored or very similar,
    or of the scene or group of one; `examples` names up to 20, exact ones first;
    `accuracy_without` is the top-1 accuracy, or exact match, of the other images, null without any.
    """

    exact: int
    near: int
    examples: list[str]
    accuracy_without: float | None


def find_overlap(
    bundle: Bundle,
    images: EvaluationSet,
    *,
    training_groups: Set[str] = frozenset(),
    is_correct: Bools,
) -> TrainTestOverlap | None:
    """Look for images that were in training, or whose scene or group was; None if it isn't known
    which ones were."""
    # training that decodes its images batch by batch records no hashes
    if bundle.training_hashes is None or images.dataset.hashes is None:
        return None
    exact, near = find_duplicates(images.dataset.hashes, bundle.training_hashes)
    groups = images.dataset.groups or ()
    in_groups = np.flatnonzero([name in training_groups for name in groups])
    seen = np.setdiff1d([*near[:, 0], *in_groups], exact[:, 0])
    indices = [*exact[:, 0].tolist(), *map(int, seen)]
    others = np.delete(is_correct, indices)
    names = [images.ids[index] for index in indices[:_MAX_NAMES]]
    return TrainTestOverlap(
        len(exact), len(seen), names, float(others.mean()) if len(others) else None
    )
