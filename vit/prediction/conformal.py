"""Prediction sets that include the right class for 95 % of images, and p-values for images unlike
the training images.

Split conformal prediction (Vovk, Gammerman & Shafer 2005; Angelopoulos & Bates 2021) compares the
score of a new image with the scores of n images that were held out of training. If the new image is
exchangeable with them, its rank among the n + 1 scores is uniform. Everything here counts ranks.
"""

import math

import numpy as np

from vit.bundle import Bundle
from vit.prediction.probabilities import (
    Float32s,
    Floats,
    compute_log_probabilities,
)

# how often a set should include the right class
COVERAGE = 0.95
MAX_P_UNUSUAL = 0.05  # largest p-value of an image that is called unusual


def find_threshold(probabilities: Floats, *, coverage: float = COVERAGE) -> float | None:
    """Find the smallest probability with which a class is in the set, by the probability of the right
    class of each held-out image, [n]; None if n is below coverage / (1 - coverage).

    These sets are on average the smallest ones with this coverage (Sadinle, Lei & Wasserman 2019).
    """
    count = len(probabilities)
    # rank among n + 1 scores, rounded because 10 * 0.9 could come out just above 9
    rank = math.ceil(round((count + 1) * coverage, 9))
    if rank > count:
        return None
    # NaN counts as probability 0
    return float(np.sort(np.nan_to_num(probabilities))[count - rank])


def compute_p_values(distances: Floats, calibration: Floats) -> Floats:
    """Compute conformal p-values (Bates, Candès, Lei, Romano & Sesia 2023, equation 2), 1 / (m + 1)
    to 1, by the distances of new images, [n], and held-out ones, [m], to the training images.

    Among images like the held-out ones, at most a fraction p has a p-value of p or less.
    """
    num_closer = np.searchsorted(np.sort(calibration), distances, side="left")
    return np.asarray((len(calibration) - num_closer + 1) / (len(calibration) + 1))


def predict_sets(bundle: Bundle, logits: Float32s) -> list[list[str]] | list[None]:
    """Return the prediction set of each image of the logits [n, C], as names of classes; None for
    each if the model file holds no threshold, and where the thresholds of labels or of an operating
    point decide. The temperature, which may have been fitted after the threshold, doesn't count."""
    threshold = bundle.metadata.get("conformal", {}).get("thresholds", {}).get(str(COVERAGE))
    if threshold is None or bundle.is_multilabel or bundle.operating_point:
        return [None] * len(logits)
    sets = []
    for row in np.exp(compute_log_probabilities(logits, 1.0)):
        chosen = np.argsort(-row, kind="stable")[: np.count_nonzero(row >= threshold)]
        sets.append([bundle.class_names[index] for index in chosen])
    return sets
