"""What may be wrong with labelled images: labels, duplicates, odd images, classes that can't be told
apart. Nothing is trained but a linear classifier on the features of a model."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.data.dataset import ImageDataset, printable
from vit.data.duplicates import find_pairs
from vit.evaluation.examples import find_label_errors
from vit.evaluation.metrics import score_logits
from vit.prediction.neighbours import convert_to_distances, find_nearest
from vit.prediction.probabilities import Floats, Ints

AUDIT_FILE = "audit.json"
NUM_FOLDS = 5
NUM_NEIGHBOURS = 5
# C of the linear classifier, on features of unit variance; the one of the least loss is taken, since
# label errors are found by probabilities that mean what they say
_REGULARISATIONS = (0.01, 1.0)
# images of one class of a pair taken for the other, of the images of both
_CONFUSED = 0.1
_MIN_CONFUSED = 3
# Tukey's fence of "far out" values: so many interquartile ranges beyond the quartiles
_FENCE = 3.0
# pixels of the longer side on which brightness and sharpness are measured
_SIDE = 128


@dataclass(frozen=True)
class LabelError:
    """An image whose label is probably wrong."""

    path: str
    given: str
    suggested: str
    # 1 - probability of the given label, by a classifier that did not see the image
    score: float


@dataclass(frozen=True)
class NearDuplicate:
    """Two images that are the same, or nearly."""

    paths: tuple[str, str]
    classes: tuple[str, str]
    # the same pixels; otherwise a similar perceptual hash
    exact: bool


@dataclass(frozen=True)
class Outlier:
    """An image that is unlike all others."""

    path: str
    given: str
    # to its 5th nearest image, of features of length one: 0 to 2
    distance: float


@dataclass(frozen=True)
class OddImage:
    """An image one of whose properties is far from those of the others."""

    path: str
    given: str
    value: float
    # "low" or "high"
    side: str


@dataclass(frozen=True)
class ImageProperty:
    """A property of the pixels, and the images in which it is odd."""

    # share of its variance that lies between the classes: near 1, it alone tells them apart
    between_classes: float
    odd: list[OddImage]


@dataclass(frozen=True)
class ConfusedPair:
    """Two classes that the classifier can't tell apart."""

    classes: tuple[str, str]
    # images of one taken for the other, of those of both
    confused: int
    count: int


@dataclass(frozen=True, repr=False)
class Audit:
    """What may be wrong, the most likely first."""

    label_errors: list[LabelError]
    near_duplicates: list[NearDuplicate]
    outliers: list[Outlier]
    properties: Mapping[str, ImageProperty]
    confused_classes: list[ConfusedPair]
    # of the linear classifier, out of fold: what the features are worth
    top1: float
    num_images: int
    class_names: tuple[str, ...]
    unreadable: list[tuple[str, str]]
    data: str
    fingerprint: str
    model: str
    model_sha256: str
    # for the page: path → the 5 nearest images of other pixels, as (path, class)
    neighbours: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: notebooks show a result that ends a cell."""
        return (
            f"Audit({self.num_images} images of {self.data}: {len(self.label_errors)} likely label"
            f" errors, {len(self.near_duplicates)} pairs of near-duplicates,"
            f" {len(self.outliers)} outliers)"
        )


def audit_images(
    dataset: ImageDataset, features: NDArray[np.float32], *, model: str, model_sha256: str
) -> Audit:
    """Look for what may be wrong with labelled images.

    Args:
        dataset: decoded images, whose hashes are known.
        features: [n, D], of these images.
        model: that the features are of, and the SHA-256 of its file.
        model_sha256: see `model`.

    Raises:
        ValueError: fewer than two classes have images.
    """
    labels = dataset.labels
    names = dataset.class_names
    paths = [printable(image_id) for image_id in dataset.ids]
    assert dataset.hashes is not None
    probabilities = predict_out_of_fold(features, labels, dataset.digests, num_classes=len(names))
    suspects, suggested = find_suspects(probabilities, labels)
    nearest, cosines = find_nearest(features, features, NUM_NEIGHBOURS, skip_self=True)
    distances = convert_to_distances(cosines[:, -1])

    label_errors = []
    for index, label in zip(suspects.tolist(), suggested.tolist(), strict=True):
        score = 1 - float(probabilities[index, labels[index]])
        label_errors.append(LabelError(paths[index], names[labels[index]], names[label], score))

    near_duplicates = []
    for first, second, exact in find_pairs(dataset.hashes):
        pair = (names[labels[first]], names[labels[second]])
        near_duplicates.append(NearDuplicate((paths[first], paths[second]), pair, exact))
    # of two classes first: one of the labels is wrong
    near_duplicates.sort(key=lambda pair: (pair.classes[0] == pair.classes[1], not pair.exact))

    _, is_far = _find_odd(distances)
    farthest_first = np.argsort(-distances, kind="stable")
    outliers = [
        Outlier(paths[index], names[labels[index]], float(distances[index]))
        for index in farthest_first.tolist()
        if is_far[index]
    ]
    return Audit(
        label_errors=label_errors,
        near_duplicates=near_duplicates,
        outliers=outliers,
        properties=_describe_properties(dataset, paths),
        confused_classes=find_confused(probabilities, labels, names),
        top1=float((probabilities.argmax(axis=1) == labels).mean()),
        num_images=len(dataset),
        class_names=names,
        unreadable=[(printable(name), printable(text)) for name, text in dataset.unreadable],
        data=dataset.name,
        fingerprint=dataset.fingerprint,
        model=model,
        model_sha256=model_sha256,
        neighbours={
            paths[index]: [(paths[other], names[labels[other]]) for other in nearest[index]]
            for index in suspects.tolist()
        },
    )


def predict_out_of_fold(
    features: NDArray[np.float32], labels: Ints, digests: NDArray[np.uint64], *, num_classes: int
) -> Floats:
    """Class probabilities by a multinomial logistic regression that did not see the image.

    The folds are stratified by class and drawn by the images' hashes: names and order don't matter,
    and copies of an image are in one fold.

    Args:
        features: [n, D].
        labels: [n].
        digests: [n], hashes of the pixels.
        num_classes: C.

    Returns:
        [n, C]; of a class that the other folds lack, 0.

    Raises:
        ValueError: the images of a fold's rest are of one class.
    """
    # takes a second, which other commands don't need
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    folds = _draw_folds(labels, digests)
    inputs = StandardScaler().fit_transform(features.astype(np.float64))
    # each fit starts from the one of the strength before, which is near it
    classifiers = [LogisticRegression(max_iter=500, warm_start=True) for _ in np.unique(folds)]
    best = np.zeros((len(labels), num_classes))
    least_loss = np.inf
    for strength in _REGULARISATIONS:
        probabilities = np.zeros((len(labels), num_classes))
        for fold, classifier in zip(np.unique(folds), classifiers, strict=True):
            is_in_fold = folds == fold
            if len(np.unique(labels[~is_in_fold])) < 2:
                raise ValueError(
                    "an audit needs two classes, each of at least two different images"
                )
            # several threads wait for one another: of 10,000 images two took 20 times as long
            with threadpool_limits(1):
                classifier.set_params(C=strength).fit(inputs[~is_in_fold], labels[~is_in_fold])
            columns = np.ix_(is_in_fold, np.isin(np.arange(num_classes), classifier.classes_))
            probabilities[columns] = classifier.predict_proba(inputs[is_in_fold])
        right = probabilities[np.arange(len(labels)), labels]
        loss = float(-np.log(np.maximum(right, 1e-12)).mean())
        if loss < least_loss:
            least_loss = loss
            best = probabilities
    return best


def _draw_folds(labels: Ints, digests: NDArray[np.uint64]) -> Ints:
    # copies of an image count as one, with the label of the first of them
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    unique_labels = labels[first]
    folds = np.zeros(len(first), dtype=np.int64)
    for label in np.unique(unique_labels):
        # in the order of the hashes, which is as good as random
        members = np.flatnonzero(unique_labels == label)
        folds[members] = np.arange(len(members)) % NUM_FOLDS
    return np.asarray(folds[inverse])


def find_suspects(probabilities: Floats, labels: Ints) -> tuple[Ints, Ints]:
    """Likely label errors: those of confident learning (`find_label_errors`) whose label is not the
    most probable class; and that class.

    Args:
        probabilities: [n, C], out of fold.
        labels: [n].

    Returns:
        Indices of the images, the least plausible label first, and the suggested labels.
    """
    # log softmax of log p is log p
    logits = np.log(np.maximum(probabilities, 1e-12)).astype(np.float32)
    flagged = find_label_errors(logits, score_logits(logits, labels))
    suggested = probabilities.argmax(axis=1)[flagged]
    is_other = suggested != labels[flagged]
    return flagged[is_other], suggested[is_other]


def find_confused(
    probabilities: Floats, labels: Ints, class_names: Sequence[str]
) -> list[ConfusedPair]:
    """Pairs of classes of which at least a tenth of the images, and three, are taken for the other,
    the most confused first."""
    num_classes = len(class_names)
    predicted = probabilities.argmax(axis=1)
    counts = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    confusion = counts.reshape(num_classes, num_classes)
    support = confusion.sum(axis=1)
    both = np.triu(confusion + confusion.T, k=1)
    pairs = []
    for first, second in np.argwhere(both >= _MIN_CONFUSED).tolist():
        count = int(support[first] + support[second])
        confused = int(both[first, second])
        if confused >= _CONFUSED * count:
            names = (class_names[first], class_names[second])
            pairs.append(ConfusedPair(names, confused, count))
    return sorted(pairs, key=lambda pair: -pair.confused / pair.count)


def _find_odd(values: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which values are far below the others, and which far above (Tukey 1977, "far out")."""
    low, high = np.quantile(values, [0.25, 0.75])
    reach = _FENCE * (high - low)
    return values < low - reach, values > high + reach


def _describe_properties(
    dataset: ImageDataset, paths: Sequence[str]
) -> Mapping[str, ImageProperty]:
    with ThreadPoolExecutor() as pool:
        rows = list(
            pool.map(lambda index: measure_image(dataset.image(index)), range(len(dataset)))
        )
    described = {}
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        scale = values if name == "brightness" else np.log(np.maximum(values, 1e-3))
        is_low, is_high = _find_odd(scale)
        odd = []
        for index in np.argsort(-np.abs(scale - np.median(scale)), kind="stable").tolist():
            if is_low[index] or is_high[index]:
                side = "low" if is_low[index] else "high"
                label = dataset.class_names[dataset.labels[index]]
                odd.append(OddImage(paths[index], label, float(values[index]), side))
        described[name] = ImageProperty(_measure_between(scale, dataset.labels), odd)
    return described


def measure_image(image: Image.Image) -> dict[str, float]:
    """Properties of an image that a class should not be known by: mean grey level 0 to 255,
    sharpness (the variance of the Laplacian of the grey image at 128 pixels), number of pixels, and
    width over height."""
    width, height = image.size
    grey = image.convert("L")
    grey.thumbnail((_SIDE, _SIDE))
    values = np.asarray(grey, dtype=np.float64)
    padded = np.pad(values, 1, mode="edge")
    laplacian = (
        padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:] - 4 * values
    )
    return {
        "brightness": float(values.mean()),
        "sharpness": float(laplacian.var()),
        "pixels": float(width * height),
        "aspect": width / height,
    }


def _measure_between(values: Floats, labels: Ints) -> float:
    """The share of the variance that lies between the classes (η², Pearson's correlation ratio)."""
    counts = np.bincount(labels)
    means = np.bincount(labels, values) / np.maximum(counts, 1)
    total = ((values - values.mean()) ** 2).sum()
    # equal but for rounding
    if total < 1e-9:
        return 0.0
    return float((counts * (means - values.mean()) ** 2).sum() / total)
