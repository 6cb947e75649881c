"""Metrics from logits and labels, in float64.

Each metric is a function of the images' weights: weights of one give the metric itself, the weights
of a resample give one bootstrap replicate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.prediction.probabilities import Floats, Ints, chunk_rows, compute_log_probabilities

NUM_BINS = 15
# makes a ratio with denominator 0 equal to 0
_TINY = np.finfo(float).tiny


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
            the first class is ahead.
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
    def correct(self) -> NDArray[np.bool_]:
        return np.equal(self.rank, 0)

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: NDArray[np.bool_]) -> Scores:
        """Return the scores of the images for which `chosen` is true, [n]."""
        columns = {
            name: values[chosen]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray)
        }
        return Scores(num_classes=self.num_classes, temperature=self.temperature, **columns)


@dataclass(frozen=True)
class Bin:
    """A bar of the reliability diagram: mean confidence and accuracy of its images, 0 to 1."""

    lower: float
    upper: float
    count: int
    confidence: float
    accuracy: float


def score_logits(logits: NDArray[np.float32], labels: Ints, *, temperature: float = 1.0) -> Scores:
    """Score logits against labels.

    Args:
        logits: [n, C].
        labels: [n], 0…C-1.
        temperature: Probabilities are softmax(logits / temperature).
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
        chunks.append(
            {
                "predicted": predicted,
                "confidence": probabilities[at_label[0], predicted],
                "label_probability": probabilities[at_label],
                "loss": -compute_log_probabilities(chunk, 1.0)[at_label],
                "nll": -log_probabilities[at_label],
                # sum over classes of (p - y)^2, with y one at the label
                "brier": (probabilities**2).sum(axis=1) - 2 * probabilities[at_label] + 1,
                "rank": chunk.shape[1] - is_behind.sum(axis=1),
            }
        )
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return Scores(labels=labels, num_classes=logits.shape[1], temperature=temperature, **columns)


def compute_metrics(scores: Scores, weights: Floats | None = None) -> dict[str, float]:
    """Compute the metrics of `Evaluation`.

    Macro averages are over the classes that occur as a label or a prediction, with 0 for an
    undefined ratio, as in scikit-learn, which takes 20 times as long for a bootstrap. ECE is Guo et
    al. (2017), equation 3.

    Args:
        scores: Scores of n images.
        weights: How many times each image counts, [n]; None: once.

    Returns:
        The metrics by name.
    """
    if weights is None:
        weights = np.ones(len(scores))
    total = weights.sum()
    correct_weights = weights * scores.correct

    # for each class that occurs: how many images have it as label, as prediction, and as both
    num_classes = scores.num_classes
    support = np.bincount(scores.labels, weights, minlength=num_classes)
    predicted = np.bincount(scores.predicted, weights, minlength=num_classes)
    correct = np.bincount(scores.labels, correct_weights, minlength=num_classes)
    occurs = support + predicted > 0
    support, predicted, correct = (counts[occurs] for counts in (support, predicted, correct))

    # |mean confidence - accuracy| of a bin times its fraction of the images; its count cancels
    gaps = weights * (scores.confidence - scores.correct)
    bin_gaps = np.bincount(find_bins(scores.confidence), gaps, minlength=NUM_BINS)
    return {
        "top1": float(correct_weights.sum() / total),
        "top5": float(weights @ (scores.rank < 5) / total),
        "loss": float(weights @ scores.loss / total),
        "macro_f1": float((2 * correct / (support + predicted)).mean()),
        "macro_precision": float((correct / np.maximum(predicted, _TINY)).mean()),
        "macro_recall": float((correct / np.maximum(support, _TINY)).mean()),
        "ece": float(np.abs(bin_gaps).sum() / total),
        "brier": float(weights @ scores.brier / total),
        "nll": float(weights @ scores.nll / total),
    }


def compute_reliability(scores: Scores) -> list[Bin]:
    """Compute mean confidence and accuracy of the images in 15 bins of confidence; both are 0 for
    an empty bin."""
    bins = find_bins(scores.confidence)
    counts = np.bincount(bins, minlength=NUM_BINS)
    divisors = np.maximum(counts, 1)
    confidence = np.bincount(bins, scores.confidence, minlength=NUM_BINS) / divisors
    accuracy = np.bincount(bins, scores.correct, minlength=NUM_BINS) / divisors
    edges = np.arange(NUM_BINS + 1) / NUM_BINS
    columns = (edges[:-1], edges[1:], counts, confidence, accuracy)
    return [Bin(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def find_bins(confidence: Floats) -> Ints:
    """Return the bin of each confidence, out of 15 of equal width."""
    return np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
