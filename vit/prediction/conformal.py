"""Prediction sets that include the right class for 95 % of images, and p-values for images unlike
the training images.

Split conformal prediction (Vovk, Gammerman & Shafer 2005; Angelopoulos & Bates 2021) compares the
score of a new image with the scores of n images that were held out of training. If the new image is
exchangeable with them, its rank among the n + 1 scores is uniform. Everything here counts ranks.
"""

import math
from dataclasses import dataclass

import numpy as np

from vit.bundle import Bundle
from vit.prediction.probabilities import (
    Float32s,
    Floats,
    Ints,
    chunk_rows,
    compute_log_probabilities,
)

# how often a set should include the right class
COVERAGE = 0.95
MAX_P_UNUSUAL = 0.05  # largest p-value of an image that is called unusual


def find_threshold(probabilities: Floats, *, coverage: float = COVERAGE) -> float | None:
    """Find the smallest probability with which a class is in the set.

    These sets are on average the smallest ones with this coverage (Sadinle, Lei & Wasserman 2019).

    Args:
        probabilities: Probability of the right class of each held-out image, [n].
        coverage: Fraction of the sets that should include the right class, above 0 and below 1.

    Returns:
        The threshold; None if n is below coverage / (1 - coverage), too few for this coverage.
    """
    count = len(probabilities)
    # rank among n + 1 scores, rounded because 10 * 0.9 could come out just above 9
    rank = math.ceil(round((count + 1) * coverage, 9))
    if rank > count:
        return None
    # NaN counts as probability 0
    return float(np.sort(np.nan_to_num(probabilities))[count - rank])


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
    sets = []
    for row in probabilities:
        chosen = np.flatnonzero(row >= threshold)
        sets.append(chosen[np.argsort(-row[chosen], kind="stable")].tolist())
    return sets


def predict_sets(bundle: Bundle, logits: Float32s) -> list[list[str]] | list[None]:
    """Return the prediction set of each image, as names of classes; None for each if the model file
    holds no threshold, and where the thresholds of labels or of an operating point decide.

    Args:
        bundle: The model. Its temperature, which may have been fitted after the threshold, doesn't
            count.
        logits: [n, C].
    """
    threshold = bundle.metadata.get("conformal", {}).get("thresholds", {}).get(str(COVERAGE))
    if threshold is None or bundle.is_multilabel or bundle.operating_point:
        return [None] * len(logits)
    sets = []
    for rows in chunk_rows(logits):
        sets += build_sets(np.exp(compute_log_probabilities(logits[rows], 1.0)), threshold)
    return [[bundle.class_names[index] for index in chosen] for chosen in sets]


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


def measure_sets(bundle: Bundle, logits: Float32s, labels: Ints) -> SetMetrics | None:
    """Measure the prediction sets of `predict_sets` by the labels, [n]."""
    sets = [chosen for chosen in predict_sets(bundle, logits) if chosen is not None]
    if not sets:
        return None
    names = [bundle.class_names[label] for label in labels]
    is_right = np.array([name in chosen for name, chosen in zip(names, sets, strict=True)])
    size = np.array(list(map(len, sets)))
    is_single = size == 1
    return SetMetrics(
        coverage=COVERAGE,
        num_images=bundle.metadata["conformal"]["num_images"],
        measured=float(is_right.mean()),
        single=float(is_single.mean()),
        single_correct=float(is_right[is_single].mean()) if is_single.any() else None,
        mean_size=float(size.mean()),
    )
