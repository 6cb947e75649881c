"""Which images to look at: confident errors, uncertain correct predictions and likely label errors."""

import numpy as np
from numpy.typing import NDArray

from vit.evaluation.metrics import Ints, Scores, chunk_rows, compute_log_probabilities


def find_confident_mistakes(scores: Scores, *, count: int) -> Ints:
    """Indices of the wrong predictions, the most confident first."""
    wrong = np.flatnonzero(~scores.correct)
    return wrong[np.argsort(-scores.confidence[wrong], kind="stable")][:count]


def find_uncertain_hits(scores: Scores, *, count: int) -> Ints:
    """Indices of the correct predictions, the least confident first."""
    right = np.flatnonzero(scores.correct)
    return right[np.argsort(scores.confidence[right], kind="stable")][:count]


def find_label_errors(logits: NDArray[np.float32], scores: Scores, *, count: int) -> tuple[Ints, int]:
    """Indices of the images whose label is probably wrong, the least plausible first, and how many in all.

    Confident learning (Northcutt, Jiang & Chuang 2021, section 3): a class's
    threshold is the mean probability it has on the images labelled with it. An image is a likely label error when,
    of the classes that reach their threshold on it, the most probable is not its label; ranked by self-confidence,
    the probability of the given label. It presumes a model that did not see these images in training.
    """
    support = np.bincount(scores.labels, minlength=scores.num_classes)
    thresholds = np.bincount(scores.labels, scores.label_probability, minlength=scores.num_classes)
    # a class that no image here has as its label has no threshold
    thresholds = np.where(support > 0, thresholds / np.maximum(support, 1), np.inf)
    flagged = []
    for rows in chunk_rows(logits):
        probabilities = np.exp(compute_log_probabilities(logits[rows], scores.temperature))
        reached = np.where(probabilities >= thresholds, probabilities, -1.0)
        wrong = reached.argmax(axis=1) != scores.labels[rows]
        flagged.append((reached.max(axis=1) > 0) & wrong)
    found = np.flatnonzero(np.concatenate(flagged))
    return found[np.argsort(scores.label_probability[found], kind="stable")][:count], len(found)
