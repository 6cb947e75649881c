"""Look for problems in labelled images: labels, duplicates, odd images, confused classes.

Only a linear classifier is trained, on the features of a model. Label errors come from cleanlab.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.special import expit
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.data.dataset import ImageDataset, printable
from vit.data.duplicates import find_pairs
from vit.data.groups import join_duplicates
from vit.evaluation.clusters import number_clusters, select_groups
from vit.evaluation.metrics import compute_metrics, count_confusions, score_labels
from vit.prediction.neighbours import convert_to_distances, find_nearest
from vit.prediction.probabilities import Bools, Floats, Ints
from vit.training.folds import assign_folds
from vit.training.linear_probe import fit_path

_NUM_FOLDS = 5
_NUM_NEIGHBOURS = 5
# C of the linear classifier on standardised features. The one with the lower loss is used, because
# A group with so many errors, which are half of its images, is one that the model doesn't know.
_MIN_UNKNOWN = 3
# label errors are found by probabilities, which should be calibrated.
_STRENGTHS = (0.01, 1.0)
# share of the images of two classes that are taken for the other class, and their number
_MIN_CONFUSED_SHARE = 0.1
_MIN_CONFUSED = 3
# interquartile ranges beyond the quartiles: the fence of Tukey's "far out" values
_FENCE = 3.0
# longer side, in pixels, on which brightness and sharpness are measured
_SIDE = 128


@dataclass(frozen=True)
class LabelError:
    """An image whose label is probably wrong.

    Attributes:
        path: Name of the image in its data set.
        given: Its label; of several the one that is probably wrong, "" if one is missing.
        suggested: The most probable class; of several labels the missing one, "" if one is wrong.
        score: 1 minus cleanlab's self-confidence, the probability of the given label, or of having
            or lacking this one.
        labels: All labels of an image that may have several; None for classes.
    """

    path: str
    given: str
    suggested: str
    score: float
    labels: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """Name of the error: the path, and of several labels the label, too."""
        return self.path if self.labels is None else f"{self.path}\n{self.given or self.suggested}"

    def describe(self) -> str:
        """Say what is given and what is probable."""
        if self.labels is None:
            return f"{self.given}, probably {self.suggested}"
        if self.given:
            return f"has {self.given}, probably not"
        return f"lacks {self.suggested}, probably there"


@dataclass(frozen=True)
class NearDuplicate:
    """Two images with equal pixels (`exact`) or with similar perceptual hashes."""

    paths: tuple[str, str]
    classes: tuple[str, str]
    exact: bool


@dataclass(frozen=True)
class Outlier:
    """An image that is far from all others: its distance to the 5th nearest image, 0 to 2."""

    path: str
    given: str
    distance: float


@dataclass(frozen=True)
class OddImage:
    """An image with a property far below ("low") or above ("high") that of the others."""

    path: str
    given: str
    value: float
    side: str


@dataclass(frozen=True)
class ImageProperty:
    """A property of the pixels.

    Attributes:
        between_classes: Share of its variance that lies between the classes: 0 if there is no more
            than chance gives, near 1 if the property alone tells the classes apart.
        odd: Images far from the others.
    """

    between_classes: float
    odd: list[OddImage]


@dataclass(frozen=True)
class ConfusedClasses:
    """Two classes that the classifier confuses: `confused` of their `count` images."""

    classes: tuple[str, str]
    confused: int
    count: int


@dataclass(frozen=True, repr=False)
class Audit:
    """Possible problems of a data set, the most likely first.

    Attributes:
        top1: Out-of-fold accuracy of the linear classifier, which says how good the features are;
            of several labels the fraction of images of which all are right.
        map: Its mean average precision, where images may have several labels; None for classes.
        num_judged: Images whose labels it can judge. See `find_known`.
        unreadable: Images that can't be read, with the reason.
        always_trained: Classes whose labels are not examined: their images are one group.
        model: Model that gave the features.
        data: Name of the data set: that of its folder for own images.
        neighbours: For the page: the images that are nearest to each likely label error, by its
            key, at most 5 of its "given" and 5 of its "suggested" class, as (path, cosine of the
            features).
        warnings: Problems of all images together, a sentence each.
    """

    label_errors: list[LabelError]
    near_duplicates: list[NearDuplicate]
    outliers: list[Outlier]
    properties: Mapping[str, ImageProperty]
    confused_classes: list[ConfusedClasses]
    top1: float
    num_judged: int
    num_images: int
    class_names: tuple[str, ...]
    unreadable: list[tuple[str, str]]
    data: str
    fingerprint: str
    model: str
    model_sha256: str
    neighbours: Mapping[str, Mapping[str, Sequence[tuple[str, float]]]] = field(
        default_factory=dict
    )
    warnings: list[str] = field(default_factory=list)
    always_trained: tuple[str, ...] = ()
    map: float | None = None

    def __repr__(self) -> str:
        """One line, because notebooks show a result that ends a cell."""
        return (
            f"Audit({self.num_images} images of {self.data}: {len(self.label_errors)} likely label"
            f" errors, {len(self.near_duplicates)} pairs of near-duplicates,"
            f" {len(self.outliers)} outliers)"
        )


def audit_images(
    dataset: ImageDataset,
    features: NDArray[np.float32],
    *,
    data: str,
    model: str,
    model_sha256: str,
    convert: Callable[[Image.Image], Image.Image] = lambda image: image,
) -> Audit:
    """Look for problems in labelled images.

    Args:
        dataset: Decoded images, with their hashes.
        features: Features of these images, [n, D].
        data: Name of the data set for readers.
        model: Model that gave the features.
        model_sha256: SHA-256 of its file.
        convert: Function that converts an image of the data set to RGB as the model sees it.

    Raises:
        ValueError: Fewer than two classes have two different images.
    """
    paths = [printable(image_id) for image_id in dataset.ids]
    classes = [dataset.describe_labels(index) for index in range(len(dataset))]
    assert dataset.hashes is not None
    groups = dataset.groups
    if groups is not None:
        # Copies are left out together, too.
        joined = join_duplicates(groups, dataset.strata, dataset.hashes, num_splits=2)
        groups = joined.groups
    errors: dict[str, Any]
    if dataset.is_multilabel:
        errors = _audit_label_sets(dataset, features, paths, groups)
    else:
        errors = _audit_classes(dataset, features, paths, groups)
    _, cosines = find_nearest(features, features, _NUM_NEIGHBOURS, skip_self=True)
    distances = convert_to_distances(cosines[:, -1])

    near_duplicates = [
        NearDuplicate((paths[first], paths[second]), (classes[first], classes[second]), exact)
        for first, second, exact in find_pairs(dataset.hashes)
    ]
    # Pairs of two classes come first, because one of the two labels is wrong.
    near_duplicates.sort(key=lambda pair: (pair.classes[0] == pair.classes[1], not pair.exact))

    _, is_far = _find_odd(distances)
    outliers = [
        Outlier(paths[index], classes[index], float(distances[index]))
        for index in np.argsort(-distances, kind="stable").tolist()
        if is_far[index]
    ]
    properties: Mapping[str, ImageProperty] = {}
    # written features come without pixels
    if dataset.pixels is not None:
        properties = _describe_properties(dataset, paths, classes, convert)
    return Audit(
        **errors,
        near_duplicates=near_duplicates,
        outliers=outliers,
        properties=properties,
        num_images=len(dataset),
        class_names=dataset.class_names,
        unreadable=[(printable(name), printable(text)) for name, text in dataset.unreadable],
        data=data,
        fingerprint=dataset.fingerprint,
        model=model,
        model_sha256=model_sha256,
    )


def _audit_classes(
    dataset: ImageDataset,
    features: NDArray[np.float32],
    paths: Sequence[str],
    groups: Sequence[str] | None,
) -> dict[str, Any]:
    """Find likely wrong classes; return the fields of `Audit` about them."""
    labels = dataset.labels
    classes = [dataset.class_names[label] for label in labels]
    probabilities = predict_out_of_fold(
        features, labels, dataset.digests, num_classes=len(dataset.class_names), groups=groups
    )
    # the others are always trained on, so that nothing is known about their labels
    left_out = np.flatnonzero(~np.isnan(probabilities[:, 0]))
    probabilities, out_labels = probabilities[left_out], labels[left_out]

    correct = probabilities.argmax(axis=1) == out_labels
    is_known = find_known(correct, out_labels, select_groups(dataset.groups, left_out))
    places, suggestions = np.array(find_suspects(probabilities, out_labels), dtype=np.int64)
    places, suggestions = places[is_known[places]], suggestions[is_known[places]]
    indices = left_out[places]
    scores = 1 - probabilities[places, out_labels[places]]
    label_errors = [
        LabelError(paths[index], classes[index], dataset.class_names[suggested], score)
        for index, suggested, score in zip(
            indices.tolist(), suggestions.tolist(), scores.tolist(), strict=True
        )
    ]
    # a wrong label is seen best between similar images of both classes
    given = _find_nearest_of_class(features, labels, indices, labels[indices], paths)
    suggested = _find_nearest_of_class(features, labels, indices, suggestions, paths)
    neighbours = {
        error.path: {"given": near_given, "suggested": near_suggested}
        for error, near_given, near_suggested in zip(label_errors, given, suggested, strict=True)
    }
    return {
        "label_errors": label_errors,
        "neighbours": neighbours,
        "confused_classes": find_confused(probabilities, out_labels, dataset.class_names),
        "top1": float(correct.mean()),
        "num_judged": int(is_known.sum()),
        "always_trained": tuple(
            np.array(dataset.class_names)[np.setdiff1d(labels, out_labels)].tolist()
        ),
    }


def _audit_label_sets(
    dataset: ImageDataset,
    features: NDArray[np.float32],
    paths: Sequence[str],
    groups: Sequence[str] | None,
) -> dict[str, Any]:
    """Find likely wrong and missing labels of images that may have several; return the fields of
    `Audit` about them."""
    labels, class_names = dataset.labels, dataset.class_names
    probabilities = predict_labels_out_of_fold(features, labels, dataset.digests, groups=groups)
    correct = (probabilities >= 0.5) == labels
    is_known = np.stack(
        [
            find_known(right, marks.astype(np.int64), dataset.groups)
            for right, marks in zip(correct.T, labels.T, strict=True)
        ],
        axis=1,
    )
    label_errors = []
    neighbours = {}
    for index, label in find_suspect_pairs(probabilities, labels):
        if not is_known[index, label]:
            continue
        has_label = bool(labels[index, label])
        name = class_names[label]
        names = tuple(compress(class_names, labels[index]))
        probability = float(probabilities[index, label])
        error = LabelError(paths[index], "", name, probability, names)
        if has_label:
            error = LabelError(paths[index], name, "", 1 - probability, names)
        label_errors.append(error)
        marks = labels[:, label].astype(np.int64)
        sides = (("given", int(has_label)), ("suggested", int(not has_label)))
        neighbours[error.key] = {
            side: _find_nearest_of_class(
                features, marks, np.array([index]), np.array([mark]), paths
            )[0]
            for side, mark in sides
        }
    scores = score_labels(probabilities, labels)
    return {
        "label_errors": label_errors,
        "neighbours": neighbours,
        "confused_classes": _find_confused_labels(probabilities >= 0.5, labels, class_names),
        "top1": float(correct.all(axis=1).mean()),
        "map": compute_metrics(scores)["map"],
        "num_judged": int(is_known.any(axis=1).sum()),
    }


def predict_labels_out_of_fold(
    features: NDArray[np.float32],
    labels: Bools,
    digests: NDArray[np.uint64],
    *,
    groups: Sequence[str] | None = None,
) -> Floats:
    """Predict each image by logistic regressions, one for each label, that have seen neither it nor
    a copy of it.

    Args:
        features: See `predict_out_of_fold`.
        labels: Which labels each image has, [n, C].
        digests: See `predict_out_of_fold`.
        groups: See `predict_out_of_fold`.

    Returns:
        Probability of each label, [n, C].

    Raises:
        ValueError: There are fewer than two different images, or groups.
    """
    # Copies of an image count once, with the labels of the first of them.
    _, first, copies = np.unique(digests, return_index=True, return_inverse=True)
    folds = assign_folds(labels[first], num_folds=_NUM_FOLDS)[copies]
    if groups is not None:
        folds = assign_folds(labels, groups, num_folds=_NUM_FOLDS)
    if folds.max() < 1:
        raise ValueError("an audit needs at least two different images, of two groups")
    values = features.astype(np.float64)
    logits = np.zeros((len(_STRENGTHS), *labels.shape))
    with threadpool_limits(1):
        for fold in range(folds.max() + 1):
            is_out = folds == fold
            path = fit_path(values[~is_out], labels[~is_out], _STRENGTHS, balanced=False)
            for place, (weight, bias, _) in enumerate(path):
                logits[place, is_out] = values[is_out] @ weight.T + bias
    losses = np.logaddexp(0, np.where(labels, -logits, logits)).mean(axis=(1, 2))
    probabilities: Floats = expit(logits[losses.argmin()])
    return probabilities


def find_suspect_pairs(probabilities: Floats, labels: Bools) -> list[tuple[int, int]]:
    """Find likely errors among several labels by cleanlab's confident learning, for each label
    against the rest.

    Args:
        probabilities: Out-of-fold probability of each label, [n, C].
        labels: Which labels each image has, [n, C].

    Returns:
        (image, label), the least plausible first.
    """
    from cleanlab.multilabel_classification.filter import find_multilabel_issues_per_class

    # cleanlab wants images with each label, and without it
    varies = np.flatnonzero(labels.any(axis=0) & ~labels.all(axis=0))
    marks, chosen = labels[:, varies], probabilities[:, varies]
    is_suspect = find_multilabel_issues_per_class(
        [np.flatnonzero(row).tolist() for row in marks],
        chosen,
        filter_by="confident_learning",
        n_jobs=1,
    )
    confidence = np.where(marks, chosen, 1 - chosen)
    images, places = np.nonzero(is_suspect)
    order = np.argsort(confidence[images, places], kind="stable")
    return list(zip(images[order].tolist(), varies[places[order]].tolist(), strict=True))


def _find_confused_labels(
    predicted: Bools, labels: Bools, class_names: Sequence[str]
) -> list[ConfusedClasses]:
    """Find pairs of labels of which one is missed and the other falsely found, see `find_confused`."""
    missed = (labels & ~predicted).astype(np.int64)
    found = (~labels & predicted).astype(np.int64)
    one_way = missed.T @ found
    alone = labels.T.astype(np.int64) @ ~labels
    return _keep_confused(
        ConfusedClasses(
            (class_names[first], class_names[second]),
            int(one_way[first, second] + one_way[second, first]),
            int(alone[first, second] + alone[second, first]),
        )
        for first, second in combinations(range(len(class_names)), 2)
    )


def _keep_confused(pairs: Iterable[ConfusedClasses]) -> list[ConfusedClasses]:
    """Return the pairs that are confused often enough, the most confused pair first."""
    found = [
        pair
        for pair in pairs
        if pair.confused >= max(_MIN_CONFUSED, _MIN_CONFUSED_SHARE * pair.count)
    ]
    return sorted(found, key=lambda pair: -pair.confused / pair.count)


def predict_out_of_fold(
    features: NDArray[np.float32],
    labels: Ints,
    digests: NDArray[np.uint64],
    *,
    num_classes: int,
    groups: Sequence[str] | None = None,
) -> Floats:
    """Predict each image by a logistic regression that has seen neither it nor a copy of it.

    Args:
        features: Features of the images, [n, D].
        labels: Their labels, [n].
        digests: Hashes of their pixels, [n]. They decide the folds, so that names and the order of
            the images don't matter.
        num_classes: Number of classes C.
        groups: Group of each image, with the copies of an image in one group. They decide the folds
            instead, see `assign_folds`.

    Returns:
        Class probabilities, [n, C]; 0 for a class that the other folds lack, NaN for an image that
        is always trained on.

    Raises:
        ValueError: Fewer than two classes have two different images, or two groups.
    """
    # scikit-learn takes a second to import
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold
    from sklearn.preprocessing import StandardScaler

    # Copies of an image count once, with the label of the first of them.
    _, first, copies = np.unique(digests, return_index=True, return_inverse=True)
    class_sizes = np.sort(np.bincount(labels[first], minlength=num_classes))
    if num_classes < 2 or class_sizes[-2] < 2:
        raise ValueError("an audit needs two classes, each with at least two different images")
    # the strengths of regularisation are meant for features of this scale
    inputs = StandardScaler().fit_transform(features.astype(np.float64))
    left_out = np.ones(len(labels), dtype=bool)
    candidates = []
    # Small classes aren't in all folds, which scikit-learn warns of. One thread, because several
    # wait for one another: with 10,000 images two took 20 times as long.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        if groups is None:
            splitter = StratifiedKFold(min(_NUM_FOLDS, class_sizes[-1]))
            folds_of_first = np.zeros(len(first), dtype=np.int64)
            for fold, (_, is_out) in enumerate(splitter.split(first, labels[first])):
                folds_of_first[is_out] = fold
            folds = folds_of_first[copies]
        else:
            folds = assign_folds(labels, groups, num_folds=_NUM_FOLDS)
            left_out = folds >= 0
            if len(np.unique(labels[left_out])) < 2:
                raise ValueError("an audit by group needs two classes, each of at least two groups")
        for strength in _STRENGTHS:
            candidate = np.where(left_out[:, None], 0.0, np.full(num_classes, np.nan))
            for fold in range(folds.max() + 1):
                is_out = folds == fold
                model = LogisticRegression(C=strength, max_iter=500)
                model.fit(inputs[~is_out], labels[~is_out])
                candidate[np.ix_(is_out, model.classes_)] = model.predict_proba(inputs[is_out])
            candidates.append(candidate)
    present = np.unique(labels)
    return min(
        candidates,
        key=lambda candidate: log_loss(
            labels[left_out], candidate[np.ix_(left_out, present)], labels=present
        ),
    )


def find_suspects(probabilities: Floats, labels: Ints) -> tuple[list[int], list[int]]:
    """Find likely label errors by cleanlab's confident learning (Northcutt et al. 2021).

    Args:
        probabilities: Out-of-fold class probabilities, [n, C].
        labels: Labels, [n].

    Returns:
        Indices of the images, the least plausible label first, and their most probable classes.
    """
    from cleanlab.filter import find_label_issues

    # cleanlab wants each class to have an image
    present, encoded = np.unique(labels, return_inverse=True)
    indices = find_label_issues(
        encoded,
        probabilities[:, present],
        filter_by="confident_learning",
        return_indices_ranked_by="self_confidence",
        n_jobs=1,
    )
    return indices.tolist(), probabilities[indices].argmax(axis=1).tolist()


def find_known(correct: Bools, labels: Ints, groups: Sequence[str] | None) -> Bools:
    """Return the images whose labels a model can judge, [n].

    A model that is no better than always predicting the most frequent class can judge none. Where
    it is wrong on half of a group, it doesn't know this site, patient or animal.

    Args:
        correct: True for each image whose prediction is its label, [n].
        labels: [n].
        groups: Group of each image; None: each is its own.
    """
    if correct.sum() <= np.bincount(labels).max():
        return np.zeros(len(labels), dtype=bool)
    clusters = number_clusters(groups, len(labels))
    num_errors = np.bincount(clusters, ~correct)
    is_unknown = (num_errors >= _MIN_UNKNOWN) & (2 * num_errors >= np.bincount(clusters))
    return ~is_unknown[clusters]


def find_confused(
    probabilities: Floats, labels: Ints, class_names: Sequence[str]
) -> list[ConfusedClasses]:
    """Find pairs of classes with at least 3 images, and a tenth of them, taken for the other class.

    The most confused pair comes first.
    """
    predicted = probabilities.argmax(axis=1)
    num_confused: Counter[tuple[int, int]] = Counter()
    for pair in count_confusions(labels, predicted, num_classes=len(class_names)):
        first, second = sorted((pair.label, pair.predicted))
        num_confused[first, second] += pair.count
    support = np.bincount(labels, minlength=len(class_names))
    return _keep_confused(
        ConfusedClasses(
            (class_names[first], class_names[second]),
            confused,
            int(support[first] + support[second]),
        )
        for (first, second), confused in sorted(num_confused.items())
    )


def _find_nearest_of_class(
    features: NDArray[np.float32],
    labels: Ints,
    indices: Ints,
    classes: Ints,
    paths: Sequence[str],
) -> list[list[tuple[str, float]]]:
    """Find for each of some images the nearest others of one class: their paths and cosines.

    Args:
        features: Features of all images, [n, D].
        labels: Their labels, [n].
        indices: The images, [m].
        classes: The class for each of them, [m].
        paths: Path of each image.
    """
    nearest: list[list[tuple[str, float]]] = [[] for _ in indices]
    for label in np.unique(classes):
        rows = np.flatnonzero(classes == label)
        members = np.flatnonzero(labels == label)
        # one more, because an image is the nearest of its own class
        places, cosines = find_nearest(
            features[indices[rows]], features[members], _NUM_NEIGHBOURS + 1
        )
        for row, others, similarities in zip(rows, members[places], cosines, strict=True):
            found = zip(others.tolist(), similarities.tolist(), strict=True)
            kept = [(paths[other], cosine) for other, cosine in found if other != indices[row]]
            nearest[row] = kept[:_NUM_NEIGHBOURS]
    return nearest


def _find_odd(values: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Find values far below and far above the others (Tukey 1977, "far out")."""
    low, high = np.quantile(values, [0.25, 0.75])
    reach = _FENCE * (high - low)
    return values < low - reach, values > high + reach


def _describe_properties(
    dataset: ImageDataset,
    paths: Sequence[str],
    classes: Sequence[str],
    convert: Callable[[Image.Image], Image.Image],
) -> Mapping[str, ImageProperty]:
    def measure(index: int) -> dict[str, float]:
        return measure_image(convert(dataset.image(index)))

    with ThreadPoolExecutor() as pool:
        rows = list(pool.map(measure, range(len(dataset))))
    described = {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        # sizes and sharpness differ by factors, brightness by steps
        scale = values
        if name != "brightness":
            scale = np.log(np.maximum(values, 1e-3))
        is_low, is_high = _find_odd(scale)
        farthest_first = np.argsort(-np.abs(scale - np.median(scale)), kind="stable").tolist()
        sides = np.select([is_low, is_high], ["low", "high"], "").tolist()
        odd = [
            OddImage(paths[index], classes[index], float(values[index]), sides[index])
            for index in farthest_first
            if sides[index]
        ]
        described[name] = ImageProperty(measure_between(scale, dataset.strata), odd)
    return described


def measure_image(image: Image.Image) -> dict[str, float]:
    """Measure properties of an image that shouldn't tell its class.

    Returns:
        Mean grey level (0 to 255), sharpness (variance of the Laplacian of the grey image, 128
        pixels long), number of pixels, and width over height.
    """
    from scipy.ndimage import laplace

    grey = image.convert("L")
    grey.thumbnail((_SIDE, _SIDE))
    values = np.asarray(grey, dtype=np.float64)
    return {
        "brightness": float(values.mean()),
        "sharpness": float(laplace(values, mode="nearest").var()),
        "pixels": float(image.width * image.height),
        "aspect": image.width / image.height,
    }


def measure_between(values: Floats, labels: Ints) -> float:
    """Compute the share of the variance that lies between the classes, without bias (Kelley's ε²,
    1935). Chance makes it negative as often as positive; a negative one is returned as 0."""
    _, labels = np.unique(labels, return_inverse=True)
    counts = np.bincount(labels)
    means = np.bincount(labels, values) / counts
    total = ((values - values.mean()) ** 2).sum()
    # the values are equal, except for rounding; or each class has a single image
    if total < 1e-9 or len(values) == len(counts):
        return 0.0
    within = ((values - means[labels]) ** 2).sum()
    share = 1 - within / total * (len(values) - 1) / (len(values) - len(counts))
    return max(float(share), 0.0)
