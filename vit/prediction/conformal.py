"""Prediction sets that include the right class as often as promised, and p-values for images unlike
the training images.

Split conformal prediction (Vovk, Gammerman & Shafer 2005; Angelopoulos & Bates 2021) compares the
score of a new image with the scores of n images that were held out of training. If the new image is
exchangeable with them, its rank among the n + 1 scores is uniform. Everything here counts ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vit.bundle import Bundle
from vit.prediction.neighbours import compute_distances
from vit.prediction.probabilities import (
    Bools,
    Float32s,
    Floats,
    Ints,
    chunk_rows,
    compute_log_probabilities,
    compute_sigmoid,
)

# how often a set should include the right class
LEVELS = (0.9, 0.95)
MAX_P_UNUSUAL = 0.05  # largest p-value of an image that is called unusual


def find_threshold(probabilities: Floats, *, coverage: float) -> float | None:
    """Find the smallest probability with which a class is in the set.

    These sets are on average the smallest ones with this coverage (Sadinle, Lei & Wasserman 2019).

    Args:
        probabilities: Probability of the right class of each held-out image, [n].
        coverage: Fraction of the sets that should include the right class, above 0 and below 1.

    Returns:
        The threshold; None if n is below coverage / (1 - coverage), too few for this coverage.
    """
    count = len(probabilities)
    rank = _find_rank(count, coverage)
    if rank > count:
        return None
    # NaN counts as probability 0
    return float(np.sort(np.nan_to_num(probabilities))[count - rank])


def find_label_threshold(
    probabilities: Floats, labels: Bools, *, coverage: float
) -> tuple[float | None, int]:
    """Find the smallest probability with which a label is in the set of an image.

    Of a new image that has labels, on average at least the fraction `coverage` of its labels is in
    its set: conformal risk control (Angelopoulos, Bates, Fisch, Lei & Schuster 2024, theorem 1),
    whose risk is the fraction of an image's labels that are missed.

    Args:
        probabilities: Probability of each label of held-out images, [n, C].
        labels: Which labels each of them has, [n, C].
        coverage: Fraction of an image's labels that should be in its set.

    Returns:
        The threshold, None if there are too few images that have labels; and their number.
    """
    counts = labels.sum(axis=1)
    num_images = int((counts > 0).sum())
    allowed = round((1 - coverage) * (num_images + 1) - 1, 9)
    if allowed < 0:
        return None, num_images
    # NaN counts as probability 0
    values = np.nan_to_num(probabilities)[labels]
    order = np.argsort(values, kind="stable")
    values = values[order]
    shares = np.repeat(1 / np.maximum(counts, 1), counts)[order]
    # for each label the risk of a threshold at its own probability, in images
    missed = np.append(0.0, np.cumsum(shares))[np.searchsorted(values, values)]
    return float(values[np.flatnonzero(missed <= allowed + 1e-9)[-1]]), num_images


def _find_rank(count: int, coverage: float) -> int:
    """Return the rank, among n + 1 scores from the best, up to which a set may go."""
    # rounded because 10 * 0.9 could come out just above 9
    return math.ceil(round((count + 1) * coverage, 9))


def count_needed(coverage: float) -> int:
    """Return the smallest number of images that gives a threshold for this coverage."""
    return math.ceil(round(coverage / (1 - coverage), 9))


def is_unusual(p_value: float | None) -> bool:
    """Tell if an image is unlike the training images, by its p-value."""
    return p_value is not None and p_value <= MAX_P_UNUSUAL


def compute_p_values(distances: Floats, calibration: Floats) -> Floats:
    """Compute conformal p-values (Bates, Candès, Lei, Romano & Sesia 2023, equation 2).

    Among images like the held-out ones, at most a fraction p has a p-value of p or less.

    Args:
        distances: Distances of the new images to the training images, [n].
        calibration: Distances of held-out images to the training images, [m].

    Returns:
        [n], 1 / (m + 1) to 1.
    """
    num_closer = np.searchsorted(np.sort(calibration), distances, side="left")
    return np.asarray((len(calibration) - num_closer + 1) / (len(calibration) + 1))


def build_sets(probabilities: Floats, threshold: float) -> list[list[int]]:
    """Return the classes that reach the threshold for each row of [n, C], most probable first."""
    return [
        [index for index in np.argsort(-row, kind="stable").tolist() if row[index] >= threshold]
        for row in probabilities
    ]


def predict_sets(bundle: Bundle, logits: Float32s, *, coverage: float) -> list[list[int]] | None:
    """Return the prediction set of each image, as indices of classes; None without a threshold, and
    where the thresholds of labels or of an operating point decide.

    Args:
        bundle: The model, with the thresholds that `vit train` wrote into its file.
        logits: [n, C].
        coverage: See `read_threshold`.
    """
    threshold = read_threshold(bundle.metadata, coverage)
    if threshold is None or bundle.is_multilabel or bundle.operating_point:
        return None
    return build_sets(_compute_probabilities(bundle, logits), threshold)


def mark_sets(bundle: Bundle, logits: Float32s, *, coverage: float) -> Bools | None:
    """Return which classes or labels are in the set of each image, [n, C]; None without a threshold.
    See `predict_sets`."""
    threshold = read_threshold(bundle.metadata, coverage)
    return None if threshold is None else _compute_probabilities(bundle, logits) >= threshold


def _compute_probabilities(bundle: Bundle, logits: Float32s) -> Floats:
    """Compute probabilities [n, C] without the temperature, which may have been fitted after the
    threshold."""
    if bundle.is_multilabel:
        return compute_sigmoid(logits.astype(np.float64))
    return np.exp(compute_log_probabilities(logits, 1.0))


def predict_p_values(bundle: Bundle, features: Float32s | None) -> list[float] | None:
    """Return the p-value of each image; None if the model file can't tell.

    Args:
        bundle: The model, with the features that `vit train` wrote into its file.
        features: [n, D]; None for a model that has none.
    """
    if bundle.likeness is None or features is None:
        return None
    distances = compute_distances(features, bundle.likeness.training_features)
    p_values = compute_p_values(distances, bundle.likeness.distances.astype(float))
    return list(p_values.tolist())


def read_threshold(metadata: Mapping[str, Any], coverage: float) -> float | None:
    """Return the threshold in the metadata of a model file; None if there is none.

    Raises:
        ValueError: Model files hold no thresholds for this coverage.
    """
    if coverage not in LEVELS:
        levels = " and ".join(map(str, LEVELS))
        raise ValueError(f"coverage {coverage} is not one of those that model files hold: {levels}")
    thresholds = metadata.get("conformal", {}).get("thresholds", {})
    threshold = thresholds.get(str(coverage))
    return None if threshold is None else float(threshold)


def explain_missing(bundle: Bundle, coverage: float) -> str | None:
    """Return a sentence on why there are no sets or no p-values; None if there are both."""
    recorded = bundle.metadata.get("conformal")
    if recorded is None:
        return (
            f"{bundle.name} holds no thresholds of prediction sets; `vit train` writes them into"
            " the model file if there are validation images"
        )
    sentences = []
    if read_threshold(bundle.metadata, coverage) is None:
        sentences.append(
            f"no prediction sets at {100 * coverage:.0f} %: {recorded['num_images']} validation images,"
            f" {count_needed(coverage)} are needed"
        )
    if bundle.likeness is None:
        sentences.append(f"no p-values: {recorded.get('no_likeness') or 'no training features'}")
    return "; ".join(sentences) or None


@dataclass(frozen=True)
class SetMetrics:
    """Prediction sets on labelled images.

    Attributes:
        coverage: Fraction of the sets that should include the label.
        num_images: Number of validation images that the threshold is from.
        measured: Fraction of the sets that include the label.
        single: Fraction of the sets that have one class.
        single_correct: Fraction of these that are correct; null if there are none.
        mean_size: Mean number of classes.
    """

    coverage: float
    num_images: int
    measured: float
    single: float
    single_correct: float | None
    mean_size: float


def measure_sets(bundle: Bundle, logits: Float32s, labels: Ints) -> list[SetMetrics] | None:
    """Measure a model's prediction sets for each coverage; None if its file holds no threshold, and
    for several labels an image.

    Args:
        bundle: The model.
        logits: [n, C].
        labels: [n].
    """
    measured = []
    for coverage in () if bundle.is_multilabel else LEVELS:
        if read_threshold(bundle.metadata, coverage) is None:
            continue
        size = np.zeros(len(labels))
        is_right = np.zeros(len(labels), dtype=bool)
        for rows in chunk_rows(logits):
            in_set = mark_sets(bundle, logits[rows], coverage=coverage)
            assert in_set is not None, "there is a threshold"
            size[rows] = in_set.sum(axis=1)
            is_right[rows] = in_set[np.arange(len(in_set)), labels[rows]]
        is_single = size == 1
        measured.append(
            SetMetrics(
                coverage=coverage,
                num_images=bundle.metadata["conformal"]["num_images"],
                measured=float(is_right.mean()),
                single=float(is_single.mean()),
                single_correct=float(is_right[is_single].mean()) if is_single.any() else None,
                mean_size=float(size.mean()),
            )
        )
    return measured or None
