"""Answers that may be several classes, or none: sets of classes that hold the right one as often as
promised, and p-values of being like the training images.

Split conformal prediction (Vovk, Gammerman & Shafer 2005; Angelopoulos & Bates 2021): a new image's
score is compared with the scores of n images that were not trained on. Where it is exchangeable
with them, its rank among the n + 1 is equally likely to be any; all that follows counts ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit.bundle import Bundle
from vit.evaluation.metrics import Floats, Ints, chunk_rows, compute_log_probabilities
from vit.model.model_file import NUM_NEIGHBOURS

# how often a set is to hold the right class
LEVELS = (0.9, 0.95)
# distances computed at once: 32 MiB
_BLOCK = 1 << 23


@dataclass(frozen=True)
class Answer:
    """What is said of one image beside its probabilities.

    Args:
        prediction_set: indices of the classes, the most probable first; None where the model file
            holds no threshold.
        p_value: of being like the training images; None where the model file holds none of them.
    """

    prediction_set: list[int] | None
    p_value: float | None


@dataclass(frozen=True)
class Similar:
    """A training image that is like an image.

    Args:
        path: its name, within the data set.
        class_name: its label.
        similarity: the cosine of the features, -1 to 1.
    """

    path: str
    class_name: str
    similarity: float


@dataclass(frozen=True)
class SetMetrics:
    """Prediction sets of one coverage, on labelled images."""

    coverage: float
    # validation images that the threshold is of
    num_images: int
    # share of the sets that hold the label
    measured: float
    # share of the sets that have one class, and share of those that are right; null where none has
    single: float
    single_correct: float | None
    mean_size: float


def find_threshold(probabilities: Floats, *, coverage: float) -> float | None:
    """The least probability that puts a class into the set (Sadinle, Lei & Wasserman 2019, whose
    sets are the smallest on average of all that have this coverage).

    Args:
        probabilities: [n], of the right class of each image; of images that were not trained on.
        coverage: the share of the sets that is to hold the right class, above 0 and below 1.

    Returns:
        The threshold; None where n is below coverage / (1 - coverage), too few for this coverage.
    """
    count = len(probabilities)
    # the rank, among n + 1 scores from the best, up to which a set may go; without the rounding
    # 0.9 * 10 would be above 9
    rank = math.ceil(round((count + 1) * coverage, 9))
    if rank > count:
        return None
    # of a model that gives NaN, nothing is likely
    return float(np.sort(np.nan_to_num(probabilities))[count - rank])


def count_needed(coverage: float) -> int:
    """The least number of images for a threshold of this coverage."""
    return math.ceil(round(coverage / (1 - coverage), 9))


def compute_p_values(distances: Floats, calibration: Floats) -> Floats:
    """Conformal p-values: among images like those of `calibration`, at most the share p has a
    p-value of p or less (Bates, Candès, Lei, Romano & Sesia 2023, equation 2).

    Args:
        distances: [n], of the new images to the training images.
        calibration: [m], of images that were not trained on.

    Returns:
        [n], 1 / (m + 1) to 1.
    """
    # how many of the calibration images are as far away, or farther
    num_closer = np.searchsorted(np.sort(calibration), distances, side="left")
    return np.asarray((len(calibration) - num_closer + 1) / (len(calibration) + 1))


def compute_distances(
    features: NDArray[np.floating[Any]], training_features: NDArray[np.floating[Any]]
) -> Floats:
    """The distance of each image to its k-th nearest training image, of features of length one
    (Sun, Ming, Zhu & Li 2022, "Out-of-distribution detection with deep nearest neighbors").

    Args:
        features: [n, D].
        training_features: [m, D].

    Returns:
        [n], 0 to 2.
    """
    units = normalize_rows(training_features)
    k = min(NUM_NEIGHBOURS, len(units))
    rows = max(1, _BLOCK // len(units))
    distances = []
    for start in range(0, len(features), rows):
        cosines = normalize_rows(features[start : start + rows]) @ units.T
        nearest = np.partition(cosines, -k, axis=1)[:, -k]
        # |a - b|² = 2 - 2 a·b of vectors of length one
        distances.append(np.sqrt(np.maximum(2 - 2 * nearest, 0)))
    return np.concatenate(distances).astype(np.float64)


def find_similar(
    bundle: Bundle,
    features: NDArray[np.float32],
    count: int,
    *,
    class_index: int | None = None,
) -> list[list[Similar]]:
    """The training images that are most like each image, by the cosine of their features.

    Args:
        bundle: the model; of the training images that its file holds features of, at most 2,000.
        features: [n, D].
        count: of training images for each image.
        class_index: of training images of this class alone. None: of all.

    Returns:
        For each image at most `count`, the most similar first.
    """
    check_similar(bundle)
    assert bundle.likeness is not None
    images = bundle.metadata["conformal"]["training_images"]
    training_features = bundle.likeness.training_features
    if class_index is not None:
        chosen = [index for index, (_, label) in enumerate(images) if label == class_index]
        images = [images[index] for index in chosen]
        training_features = training_features[chosen]
    cosines = normalize_rows(features) @ normalize_rows(training_features).T
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
    return [
        [
            Similar(images[index][0], bundle.class_names[images[index][1]], float(row[index]))
            for index in indices.tolist()
        ]
        for row, indices in zip(cosines, nearest, strict=True)
    ]


def check_similar(bundle: Bundle) -> None:
    """Raise ValueError for a model file that doesn't say which training images are like an image."""
    recorded = bundle.metadata.get("conformal", {})
    names = recorded.get("training_images")
    if bundle.likeness is not None and names:
        is_complete = len(names) == len(bundle.likeness.training_features)
        if not is_complete or max(index for _, index in names) >= len(bundle.class_names):
            raise ValueError(f"{bundle.name} is damaged: its features are of other training images")
        return
    reason = recorded.get("no_likeness")
    if reason is None:
        reason = "`vit train` puts them into the model file where there are validation images"
    elif not reason:
        reason = "its file has features without them"
    raise ValueError(f"{bundle.name} names no training images: {reason}")


def normalize_rows(features: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Rows of length one, float32; of zeros, zeros."""
    rows = features.astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12))


def build_sets(probabilities: Floats, threshold: float) -> list[list[int]]:
    """The indices of the classes that reach the threshold, the most probable first, of each row of
    [n, C]."""
    return [
        [index for index in np.argsort(-row, kind="stable").tolist() if row[index] >= threshold]
        for row in probabilities
    ]


def answer_images(
    bundle: Bundle,
    logits: NDArray[np.float32],
    features: NDArray[np.float32] | None,
    *,
    coverage: float,
) -> list[Answer]:
    """The sets of classes and p-values of images.

    Args:
        bundle: the model, with what `vit train` has put into its file.
        logits: [n, C].
        features: [n, D]; None of a model that gives none.
        coverage: as of `read_threshold`.
    """
    threshold = read_threshold(bundle.metadata, coverage)
    sets: list[list[int]] | list[None] = [None] * len(logits)
    if threshold is not None:
        # a temperature that was fitted later doesn't change them
        sets = build_sets(np.exp(compute_log_probabilities(logits, 1.0)), threshold)
    p_values: list[float] | list[None] = [None] * len(logits)
    if bundle.likeness is not None and features is not None and len(features):
        distances = compute_distances(features, bundle.likeness.training_features)
        p_values = compute_p_values(distances, bundle.likeness.distances.astype(float)).tolist()
    return [Answer(*pair) for pair in zip(sets, p_values, strict=True)]


def measure_sets(
    bundle: Bundle, logits: NDArray[np.float32], labels: Ints
) -> list[SetMetrics] | None:
    """The prediction sets of a model on images with labels, by coverage; None where its file holds
    no threshold.

    Args:
        bundle: the model.
        logits: [n, C].
        labels: [n].
    """
    measured = []
    for coverage in LEVELS:
        threshold = read_threshold(bundle.metadata, coverage)
        if threshold is None:
            continue
        sizes = []
        holds = []
        for rows in chunk_rows(logits):
            in_set = np.exp(compute_log_probabilities(logits[rows], 1.0)) >= threshold
            sizes.append(in_set.sum(axis=1))
            holds.append(in_set[np.arange(len(in_set)), labels[rows]])
        size = np.concatenate(sizes)
        is_right = np.concatenate(holds)
        is_single = size == 1
        single_correct = None
        if is_single.any():
            single_correct = float(is_right[is_single].mean())
        measured.append(
            SetMetrics(
                coverage=coverage,
                num_images=bundle.metadata["conformal"]["num_images"],
                measured=float(is_right.mean()),
                single=float(is_single.mean()),
                single_correct=single_correct,
                mean_size=float(size.mean()),
            )
        )
    return measured or None


def read_threshold(metadata: Mapping[str, Any], coverage: float) -> float | None:
    """The threshold of a model file's metadata; None where there is none.

    Raises:
        ValueError: a coverage of which model files hold no threshold.
    """
    if coverage not in LEVELS:
        levels = " and ".join(map(str, LEVELS))
        raise ValueError(f"coverage {coverage} is not one of those that model files hold: {levels}")
    thresholds = metadata.get("conformal", {}).get("thresholds", {})
    threshold = thresholds.get(str(coverage))
    return None if threshold is None else float(threshold)


def explain_missing(bundle: Bundle, coverage: float) -> str | None:
    """Why there are no sets or no p-values, in a sentence; None where there are both."""
    recorded = bundle.metadata.get("conformal")
    if recorded is None:
        return (
            f"{bundle.name} holds no thresholds of prediction sets; `vit train` puts them into the"
            " model file where there are validation images"
        )
    sentences = []
    if read_threshold(bundle.metadata, coverage) is None:
        sentences.append(
            f"no prediction sets at {coverage:.0%}: {recorded['num_images']} validation images,"
            f" {count_needed(coverage)} are needed"
        )
    if bundle.likeness is None:
        sentences.append(f"no p-values: {recorded['no_likeness']}")
    return "; ".join(sentences) or None
