"""Which images to look at: confident errors, uncertain correct predictions and likely label errors."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from vit.evaluation.metrics import Ints, Scores

_CHUNK = 4096


def find_confident_mistakes(scores: Scores, *, count: int) -> Ints:
    """Indices of the wrong predictions, the most confident first."""
    wrong = np.flatnonzero(~scores.correct)
    return wrong[np.argsort(-scores.confidence[wrong], kind="stable")][:count]


def find_uncertain_hits(scores: Scores, *, count: int) -> Ints:
    """Indices of the correct predictions, the least confident first."""
    right = np.flatnonzero(scores.correct)
    return right[np.argsort(scores.confidence[right], kind="stable")][:count]


def find_label_errors(
    logits: NDArray[np.float32], labels: Ints, *, temperature: float, count: int
) -> tuple[Ints, int]:
    """Indices of the images whose label is probably wrong, the least plausible first, and how many in all.

    Confident learning (Northcutt, Jiang & Chuang 2021, section 3): a class's threshold is the mean
    probability it has on the images labelled with it. An image is a likely label error when, of the
    classes that reach their threshold on it, the most probable is not its label; ranked by self-confidence, the
    probability of the given label. It presumes a model that did not see these images in training.
    """
    support = np.bincount(labels, minlength=logits.shape[1])
    own = np.concatenate([p[np.arange(len(p)), y] for p, y in _chunks(logits, labels, temperature)])
    thresholds = np.bincount(labels, own, minlength=logits.shape[1]) / np.maximum(support, 1)
    thresholds[support == 0] = np.inf  # no image here has this class as its label: no threshold is known
    flagged = []
    for probabilities, truth in _chunks(logits, labels, temperature):
        reached = np.where(probabilities >= thresholds, probabilities, -1.0)
        flagged.append((reached.max(axis=1) > 0) & (reached.argmax(axis=1) != truth))
    found = np.flatnonzero(np.concatenate(flagged))
    return found[np.argsort(own[found], kind="stable")][:count], len(found)


def _chunks(
    logits: NDArray[np.float32], labels: Ints, temperature: float
) -> Iterator[tuple[NDArray[np.float64], Ints]]:
    """Probabilities and labels, a few thousand images at a time: float64 of all logits may not fit."""
    for start in range(0, len(labels), _CHUNK):
        part = logits[start : start + _CHUNK].astype(np.float64)
        yield softmax(part / temperature, axis=1), labels[start : start + _CHUNK]
