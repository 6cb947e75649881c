"""Look for problems in labelled images: wrong labels, unusual images and near-duplicates.

Only a linear classifier is trained, on the features of a model. Label errors come from cleanlab
(Northcutt et al. 2021, "Confident learning: estimating uncertainty in dataset labels").
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.data.corrections import SEPARATOR
from vit.data.dataset import ImageDataset, printable
from vit.data.duplicates import find_pairs
from vit.data.groups import hash_images, join_duplicates
from vit.prediction.neighbours import compute_distances, find_nearest
from vit.prediction.probabilities import Bools, Float32s, Floats, Ints
from vit.training.folds import assign_folds

_NUM_NEIGHBOURS = 5
# unusual images that are listed even if none is flagged
_MIN_UNUSUAL = 50
# Interquartile ranges above the third quartile from which a distance is unusual, as about 1 % of
# those of CIFAR-10 and Imagenette are.
_FENCE = 2.5

# path of a near image, and the cosine of the features
Neighbours = Sequence[tuple[str, float]]


@dataclass(frozen=True)
class LabelError:
    """An image whose label is probably wrong.

    Attributes:
        path: Name of the image in its data set.
        given: Its label; several are separated by "|".
        suggested: The most probable class; or the labels with each that is probably wrong or
            missing changed.
        score: 1 minus cleanlab's self-confidence, the probability of the given label, or of having
            or lacking the least plausible one.
    """

    path: str
    given: str
    suggested: str
    score: float


@dataclass(frozen=True)
class NearDuplicate:
    """Two images with equal pixels (`exact`) or with similar perceptual hashes."""

    paths: tuple[str, str]
    classes: tuple[str, str]
    exact: bool


@dataclass(frozen=True, repr=False)
class Audit:
    """Possible problems of a data set, the most likely first.

    Attributes:
        unusual: Images that may belong to no class, the `num_unusual` flagged ones and at least 50:
            path, label and distance. See `find_unusual`.
        top1: Out-of-fold accuracy of the linear classifier, which says how good the features are;
            for several labels, the share of images of which all are right.
        not_examined: Classes whose labels are not examined: all their images are copies of one
            another, or one group.
        unreadable: Images that can't be read, with the reason.
        data: Name of the data set: that of its folder for own images.
        model: Model that gave the features, and the SHA-256 of its file.
        neighbours: For the page: the images that are nearest to each likely label error, by its
            path, at most 5 with its "given" and 5 with its "suggested" label.
    """

    label_errors: list[LabelError]
    unusual: list[tuple[str, str, float]]
    num_unusual: int
    near_duplicates: list[NearDuplicate]
    top1: float
    num_images: int
    class_names: tuple[str, ...]
    not_examined: list[str]
    unreadable: list[tuple[str, str]]
    data: str
    fingerprint: str
    model: str
    model_sha256: str
    neighbours: Mapping[str, Mapping[str, Neighbours]]

    def __repr__(self) -> str:
        """One line, because notebooks show a result that ends a cell."""
        return (
            f"Audit({self.num_images} images of {self.data}: {len(self.label_errors)} likely label"
            f" errors, {len(self.near_duplicates)} pairs of near-duplicates)"
        )


def audit_images(
    dataset: ImageDataset, features: Float32s, *, data: str, model: str, model_sha256: str
) -> Audit:
    """Look for problems in decoded images by their features, [n, D]. See `Audit` for the names.

    Raises ValueError if fewer than two classes have two different images, or two groups.
    """
    assert dataset.hashes is not None
    names = dataset.class_names
    paths = [printable(image_id) for image_id in dataset.ids]
    # [n, C]
    marks = dataset.labels
    if not dataset.is_multilabel:
        marks = dataset.labels[:, None] == np.arange(len(names))
    texts = [_join_names(row, names) for row in marks]

    # names and the order of the images don't matter: equal pixels are a group
    own_groups = dataset.groups or [f"{digest:016x}" for digest in dataset.digests.tolist()]
    # with the thumbnails, by which scenes are found
    hashes = np.concatenate([dataset.hashes, hash_images(dataset)[2:]])
    groups, *_ = join_duplicates(own_groups, dataset.strata, hashes, num_splits=2)
    folds = assign_folds(dataset.labels, groups)
    examined = np.flatnonzero(folds >= 0)
    if len(np.unique(dataset.strata[examined])) < 2:
        raise ValueError(
            "an audit needs two classes, each with at least two different images, or two groups"
        )
    probabilities = predict_out_of_fold(
        features[examined],
        marks[examined],
        folds[examined],
        is_multilabel=dataset.is_multilabel,
    )
    # [n, C], as the given marks
    predicted = probabilities >= 0.5
    if not dataset.is_multilabel:
        predicted = probabilities.argmax(axis=1)[:, None] == np.arange(len(names))

    errors, neighbours = [], {}
    for row, suggested, score in find_label_errors(
        probabilities, marks[examined], is_multilabel=dataset.is_multilabel
    ):
        place = int(examined[row])
        error = LabelError(paths[place], texts[place], _join_names(suggested, names), score)
        errors.append(error)
        # a wrong label is seen best between similar images of both
        neighbours[error.path] = {
            side: _find_nearest_with(text, place, texts, features, paths)
            for side, text in (("given", error.given), ("suggested", error.suggested))
        }
    near_duplicates = [
        NearDuplicate((paths[first], paths[second]), (texts[first], texts[second]), exact)
        for first, second, exact in find_pairs(dataset.hashes)
    ]
    # Pairs of two classes come first, because one of the two labels is wrong.
    near_duplicates.sort(key=lambda pair: (pair.classes[0] == pair.classes[1], not pair.exact))
    distances, is_unusual = find_unusual(features)
    num_unusual = int(is_unusual.sum())
    most = np.argsort(-distances, kind="stable")[: max(num_unusual, _MIN_UNUSUAL)]
    return Audit(
        label_errors=errors,
        unusual=[(paths[place], texts[place], distances[place]) for place in most],
        num_unusual=num_unusual,
        near_duplicates=near_duplicates,
        top1=float((predicted == marks[examined]).all(axis=1).mean()),
        num_images=len(dataset),
        class_names=names,
        not_examined=sorted(set(compress(texts, folds < 0))),
        unreadable=[(printable(name), printable(text)) for name, text in dataset.unreadable],
        data=data,
        fingerprint=dataset.fingerprint,
        model=model,
        model_sha256=model_sha256,
        neighbours=neighbours,
    )


def _join_names(row: Bools, names: Sequence[str]) -> str:
    return SEPARATOR.join(names[place] for place in np.flatnonzero(row).tolist())


def predict_out_of_fold(
    features: Float32s, marks: Bools, folds: Ints, *, is_multilabel: bool
) -> Floats:
    """Predict each image by a logistic regression on the features, [n, D], of the other folds, [n];
    for several labels by one for each label against the rest.

    Return the probability of each class or label, [n, C], as the given marks.
    """
    # scikit-learn takes a second to import
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import PredefinedSplit, cross_val_predict
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regression = LogisticRegression(max_iter=500)
    labels = marks.argmax(axis=1)
    if is_multilabel:
        regression, labels = OneVsRestClassifier(regression), marks.astype(np.int64)
    # Small classes aren't in all folds, which scikit-learn warns of. One thread, because several
    # wait for one another: with 10,000 images two took 20 times as long.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        found: Floats = cross_val_predict(
            make_pipeline(StandardScaler(), regression),
            features.astype(np.float64),
            labels,
            cv=PredefinedSplit(folds),
            method="predict_proba",
        )
    if is_multilabel:
        return found
    # a class without images has no column
    probabilities = np.zeros(marks.shape)
    probabilities[:, marks.any(axis=0)] = found
    return probabilities


def find_label_errors(
    probabilities: Floats, marks: Bools, *, is_multilabel: bool
) -> list[tuple[int, Bools, float]]:
    """Find likely label errors by cleanlab's confident learning; for several labels, for each of
    them against the rest. See `predict_out_of_fold` for the probabilities and marks, [n, C].

    Return for each suspect, the least plausible first, its row, the suggested marks, [C], and its
    score. See `LabelError`.
    """
    from cleanlab.filter import find_label_issues
    from cleanlab.multilabel_classification.filter import find_multilabel_issues_per_class

    # cleanlab wants each class to have an image, and each label to be there and to be missing
    known = np.flatnonzero(marks.any(axis=0) & ~marks.all(axis=0))
    given, chosen = marks[:, known], probabilities[:, known]
    options: dict[str, Any] = {"filter_by": "confident_learning", "n_jobs": 1}
    confidence = np.where(given, chosen, 1 - chosen)
    # the given marks, with those changed that are probably wrong
    suggested = given.copy()
    if is_multilabel:
        label_lists = [np.flatnonzero(row).tolist() for row in given]
        wrong = find_multilabel_issues_per_class(label_lists, chosen, **options)
        suggested ^= wrong
        # only the labels that are probably wrong rank an image
        confidence[~wrong] = 1
    else:
        is_suspect = find_label_issues(given.argmax(axis=1), chosen, **options)
        suggested[is_suspect] = chosen[is_suspect].argmax(axis=1)[:, None] == np.arange(len(known))
        confidence[~given] = 1
    lowest = confidence.min(axis=1)
    # a class without images is neither given nor suggested
    whole = marks.copy()
    whole[:, known] = suggested
    order = np.argsort(lowest, kind="stable")
    order = order[(whole != marks)[order].any(axis=1)]
    return [(row, whole[row], float(1 - lowest[row])) for row in order.tolist()]


def find_unusual(features: Float32s) -> tuple[Floats, Bools]:
    """Compute how far each image is from the fourth-nearest other one, 1 minus the cosine, and which
    distances are unusual, [n] each, by the features, [n, D]."""
    # each image is its own nearest
    distances = compute_distances(features, features) ** 2 / 2
    low, high = np.quantile(distances, (0.25, 0.75))
    return distances, distances > high + _FENCE * (high - low)


def _find_nearest_with(
    text: str, place: int, texts: Sequence[str], features: Float32s, paths: Sequence[str]
) -> Neighbours:
    """Find the images with a label that are nearest to the image at `place`."""
    members = [other for other, of_other in enumerate(texts) if of_other == text and other != place]
    (places,), (cosines,) = find_nearest(features[[place]], features[members], _NUM_NEIGHBOURS)
    return [
        (paths[members[near]], cosine)
        for near, cosine in zip(places.tolist(), cosines.tolist(), strict=True)
    ]
