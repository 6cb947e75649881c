"""Metrics from logits and labels, in float64: of all images, of each class and each pair of
classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vit.evaluation.clusters import Interval, compute_clustered_interval, number_clusters
from vit.prediction.decision import ClassThreshold
from vit.prediction.probabilities import (
    Bools,
    Float32s,
    Floats,
    Ints,
    chunk_rows,
    compute_log_probabilities,
)

NUM_BINS = 15
# largest loss of an image, so that a logit of −∞ leaves the mean finite: of the least probability
# that a float64 holds
MAX_LOSS = 708.0


@dataclass(frozen=True)
class Scores:
    """Contribution of each of n images to the metrics.

    Attributes:
        labels: Index of the label.
        predicted: Index of the predicted class.
        confidence: Probability of the predicted class.
        label_probability: Probability of the label.
        loss: Cross-entropy without the temperature, nats.
        nll: Cross-entropy with the temperature, nats.
        brier: Squared difference of probabilities and one-hot label, summed over classes, 0…2.
        rank: Number of classes ahead of the label, 0 if the prediction is correct. Of equal logits
            the first class is ahead, and the predicted class is ahead of all.
        num_classes: Number of classes.
        temperature: Temperature of the probabilities.
    """

    labels: Ints
    predicted: Ints
    confidence: Floats
    label_probability: Floats
    loss: Floats
    nll: Floats
    brier: Floats
    rank: Ints
    num_classes: int
    temperature: float

    @property
    def correct(self) -> Bools:
        return np.equal(self.rank, 0)

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: Bools) -> Scores:
        """Return the scores of the images for which `chosen` is true, [n]."""
        columns: dict[str, Any] = {
            name: values[chosen]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray)
        }
        return replace(self, **columns)


@dataclass(frozen=True)
class Bin:
    """A bar of the reliability diagram: mean confidence and accuracy of its images, 0 to 1."""

    lower: float
    upper: float
    count: int
    confidence: float
    accuracy: float


def score_logits(
    logits: Float32s,
    labels: Ints,
    *,
    temperature: float = 1.0,
    threshold: ClassThreshold | None = None,
) -> Scores:
    """Score logits against labels.

    Args:
        logits: [n, C].
        labels: [n], 0…C-1.
        temperature: Probabilities are softmax(logits / temperature).
        threshold: The operating point. None: the class of the highest logit is predicted.
    """
    chunks = []
    for rows in chunk_rows(logits):
        chunk = logits[rows].astype(np.float64)
        log_probabilities = compute_log_probabilities(chunk, temperature)
        probabilities = np.exp(log_probabilities)
        at_label = (np.arange(len(chunk)), labels[rows])

        # classes behind the label are counted, so that an image with NaN in its logits is wrong
        label_logits = chunk[at_label][:, None]
        is_later_class = np.arange(chunk.shape[1]) >= labels[rows, None]
        is_behind = (chunk < label_logits) | ((chunk == label_logits) & is_later_class)
        predicted = chunk.argmax(axis=1)
        rank = chunk.shape[1] - is_behind.sum(axis=1)
        if threshold is not None:
            predicted = threshold.decide(probabilities)
            was_ahead = ~is_behind[at_label[0], predicted]
            rank = np.where(predicted == labels[rows], 0, rank + 1 - was_ahead)
        chunks.append(
            {
                "predicted": predicted,
                "confidence": probabilities[at_label[0], predicted],
                "label_probability": probabilities[at_label],
                "loss": np.minimum(-compute_log_probabilities(chunk, 1.0)[at_label], MAX_LOSS),
                "nll": np.minimum(-log_probabilities[at_label], MAX_LOSS),
                # sum over classes of (p - y)^2, with y one at the label
                "brier": (probabilities**2).sum(axis=1) - 2 * probabilities[at_label] + 1,
                "rank": rank,
            }
        )
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return Scores(labels=labels, num_classes=logits.shape[1], temperature=temperature, **columns)


def compute_metrics(scores: Scores) -> dict[str, float]:
    """Compute the metrics of `Evaluation` by name.

    Macro averages are over the classes that have images, with 0 for the precision of a class that
    is never predicted: scikit-learn's with `labels=np.unique(y_true)`. ECE is Guo et al. (2017),
    equation 3.

    Raises:
        ValueError: The logits hold NaN or infinity.
    """
    count = len(scores)
    # a dot product rounds in another way than a mean, and recorded metrics stay equal
    ones = np.ones(count)

    # for each class that has images: how many have it as label, as prediction, and as both
    class_counts = count_classes(scores)
    support, predicted, correct = class_counts[:, class_counts[0] > 0]

    # |mean confidence - accuracy| of a bin times its fraction of the images; its count cancels
    gaps = scores.confidence - scores.correct
    bin_gaps = np.bincount(find_bins(scores.confidence), gaps, minlength=NUM_BINS)
    return {
        "top1": float(scores.correct.mean()),
        "top5": float((scores.rank < 5).mean()),
        "loss": float(ones @ scores.loss / count),
        "macro_f1": float((2 * correct / (support + predicted)).mean()),
        "macro_precision": float((correct / np.maximum(predicted, 1)).mean()),
        "macro_recall": float((correct / support).mean()),
        "ece": float(np.abs(bin_gaps).sum() / count),
        "brier": float(ones @ scores.brier / count),
        "nll": float(ones @ scores.nll / count),
    }


def count_classes(scores: Scores) -> Ints:
    """Count the images of each class, [3, C]: by label, by prediction, and by both at once."""
    columns = (scores.labels, scores.predicted, scores.labels[scores.correct])
    return np.array([np.bincount(column, minlength=scores.num_classes) for column in columns])


def bin_confidence(confidence: Floats, correct: Bools) -> list[Bin]:
    """Compute mean confidence and accuracy of predictions in 15 bins of confidence; both are 0 for
    an empty bin."""
    bins = find_bins(confidence)
    counts = np.bincount(bins, minlength=NUM_BINS)
    divisors = np.maximum(counts, 1)
    confidence = np.bincount(bins, confidence, minlength=NUM_BINS) / divisors
    accuracy = np.bincount(bins, correct, minlength=NUM_BINS) / divisors
    edges = np.arange(NUM_BINS + 1) / NUM_BINS
    columns = (edges[:-1], edges[1:], counts, confidence, accuracy)
    return [Bin(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def find_bins(confidence: Floats) -> Ints:
    """Return the bin of each confidence, out of 15 of equal width. Raises ValueError for NaN."""
    num_wrong = int(np.isnan(confidence).sum())
    if num_wrong:
        raise ValueError(
            f"{num_wrong:,} of {len(confidence):,} images have NaN or infinity among their logits;"
            " leave them out, or compute the logits in float32"
        )
    return np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class, 0 to 1, with 95 % intervals. Of a class without images they are None.

    Attributes:
        support: Number of images with this label.
        predicted: Number of images predicted as this class.
    """

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    predicted: int
    precision_interval: Interval
    recall_interval: Interval


def compute_per_class(
    scores: Scores, class_names: tuple[str, ...], groups: Sequence[str] | None = None
) -> list[ClassMetrics]:
    """Compute the metrics of every class of the model, including classes without an image.

    Args:
        scores: Scores of the images.
        class_names: Names of the classes.
        groups: Group of each image, which widens the intervals. None: each is its own group.
    """
    support, predicted, correct = count_classes(scores)
    counts = support.tolist()
    columns = (
        correct / np.maximum(predicted, 1),
        correct / np.maximum(support, 1),
        2 * correct / np.maximum(support + predicted, 1),
    )
    # precision is a proportion of the predicted images, recall of the labelled ones
    clusters = number_clusters(groups, len(scores))
    intervals = [
        _compute_clustered_intervals(scores.correct, clusters, classes, scores.num_classes)
        for classes in (scores.predicted, scores.labels)
    ]
    rows = zip(
        class_names,
        *(
            [value if count else None for value, count in zip(column.tolist(), counts, strict=True)]
            for column in columns
        ),
        counts,
        predicted.tolist(),
        *intervals,
        strict=True,
    )
    return [ClassMetrics(*row) for row in rows]


def _compute_clustered_intervals(
    correct: Bools, clusters: Ints, classes: Ints, num_classes: int
) -> list[Interval]:
    """Compute the interval of the accuracy on the images of each class."""
    order = np.argsort(classes, kind="stable")
    ends = np.cumsum(np.bincount(classes, minlength=num_classes))[:-1]
    return [
        compute_clustered_interval(correct[members], clusters[members])
        for members in np.split(order, ends)
    ]


@dataclass(frozen=True)
class ConfusedPair:
    """Images of one class that are predicted as another.

    Attributes:
        label: Index of their class.
        predicted: Index of the predicted class.
        count: Number of images.
    """

    label: int
    predicted: int
    count: int


def count_confusions(labels: Ints, predicted: Ints, *, num_classes: int) -> list[ConfusedPair]:
    """Count the wrong predictions of each pair of classes, the most frequent pair first.

    With many classes the whole matrix would not fit into memory.
    """
    is_wrong = labels != predicted
    cells, counts = np.unique(
        labels[is_wrong] * num_classes + predicted[is_wrong], return_counts=True
    )
    pairs = [
        ConfusedPair(cell // num_classes, cell % num_classes, count)
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True)
    ]
    return sorted(pairs, key=lambda pair: -pair.count)
