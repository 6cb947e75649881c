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
from vit.prediction.neighbours import compute_distances
from vit.prediction.probabilities import Floats, compute_log_probabilities

# how often a set is to hold the right class
LEVELS = (0.9, 0.95)


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
