"""Images to look at: clear errors, unsure correct predictions and likely label errors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit.evaluation.clusters import number_clusters
from vit.evaluation.metrics import Scores
from vit.prediction.probabilities import (
    Bools,
    Float32s,
    Ints,
    chunk_rows,
    compute_log_probabilities,
)

# A group with so many errors, which are half of its images, is one that the model doesn't know.
_MIN_UNKNOWN = 3


@dataclass(frozen=True)
class Example:
    """One image and its prediction; `probability` is that of the predicted class."""

    path: str
    label: str
    predicted: str
    probability: float
    label_probability: float


@dataclass(frozen=True)
class Examples:
    """Images to look at, the clearest cases of each kind first."""

    most_confident_errors: list[Example]
    least_confident_correct: list[Example]
    label_errors: list[Example]
    # among all images, by confident learning
    num_label_errors: int


def choose_examples(
    logits: Float32s,
    scores: Scores,
    *,
    ids: Sequence[str],
    class_names: Sequence[str],
    groups: Sequence[str] | None = None,
    count: int,
) -> Examples:
    """Choose up to `count` images of each kind.

    Args:
        logits: [n, C].
        scores: Scores of these images.
        ids: Names of these images.
        class_names: Names of the classes.
        groups: Group of each image; None: each is its own.
        count: Largest number of each kind.
    """

    def describe(indices: Ints) -> list[Example]:
        return [
            Example(
                path=ids[index],
                label=class_names[scores.labels[index]],
                predicted=class_names[scores.predicted[index]],
                probability=float(scores.confidence[index]),
                label_probability=float(scores.label_probability[index]),
            )
            for index in indices.tolist()
        ]

    surest_first = np.argsort(-scores.confidence, kind="stable")
    unsurest_first = np.argsort(scores.confidence, kind="stable")
    label_errors = find_label_errors(logits, scores)
    is_known = find_known(scores.correct, scores.labels, groups)
    label_errors = label_errors[is_known[label_errors]]
    return Examples(
        most_confident_errors=describe(surest_first[~scores.correct[surest_first]][:count]),
        least_confident_correct=describe(unsurest_first[scores.correct[unsurest_first]][:count]),
        label_errors=describe(label_errors[:count]),
        num_label_errors=len(label_errors),
    )


def find_label_errors(logits: Float32s, scores: Scores) -> Ints:
    """Return the indices of the images whose label is probably wrong, the least plausible first.

    Confident learning (Northcutt, Jiang & Chuang 2021, section 3): the threshold of a class is its
    mean probability on the images with that label. Among the classes that reach their threshold on
    an image, the most probable one should be its label; otherwise the label is a likely error. They
    are ranked by self-confidence, the probability of the label. The images must be held out of
    training.
    """
    support = np.bincount(scores.labels, minlength=scores.num_classes)
    thresholds = np.bincount(scores.labels, scores.label_probability, minlength=scores.num_classes)
    # a class without images has no threshold
    thresholds = np.where(support > 0, thresholds / np.maximum(support, 1), np.inf)

    flags = []
    for rows in chunk_rows(logits):
        probabilities = np.exp(compute_log_probabilities(logits[rows], scores.temperature))
        reached = np.where(probabilities >= thresholds, probabilities, -1.0)
        is_other_class = reached.argmax(axis=1) != scores.labels[rows]
        flags.append((reached.max(axis=1) > 0) & is_other_class)
    flagged = np.flatnonzero(np.concatenate(flags))
    return flagged[np.argsort(scores.label_probability[flagged], kind="stable")]


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
