"""From logits and labels to metrics, in float64; the confusion matrix as a figure; and which images
to look at.

Each metric is a function of the images' weights: with weights of one it is the metric itself, with
those of a resample one bootstrap replicate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.prediction.probabilities import Floats, Ints, chunk_rows, compute_log_probabilities

NUM_BINS = 15
# a ratio without a denominator is 0
_TINY = np.finfo(float).tiny


@dataclass(frozen=True)
class Scores:
    """What each of n images contributes to the metrics, in the order of the images."""

    labels: Ints
    predicted: Ints
    # probability of the predicted class
    confidence: Floats
    label_probability: Floats
    # cross-entropy of the logits as they are, nats
    loss: Floats
    # cross-entropy after the temperature, nats
    nll: Floats
    # squared difference of probabilities and one-hot label, summed over classes, 0…2
    brier: Floats
    # classes ahead of the label, 0 if it is correct; of equal logits the first class is ahead
    rank: Ints
    num_classes: int
    temperature: float

    @property
    def correct(self) -> NDArray[np.bool_]:
        return np.equal(self.rank, 0)

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, chosen: NDArray[np.bool_]) -> Scores:
        """Those of the images where `chosen` is true, [n]."""
        columns = {
            name: values[chosen]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray)
        }
        return Scores(num_classes=self.num_classes, temperature=self.temperature, **columns)


@dataclass(frozen=True)
class Bin:
    """One bar of the reliability diagram."""

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
        temperature: probabilities are softmax(logits / temperature).
    """
    chunks = []
    for rows in chunk_rows(logits):
        chunk = logits[rows].astype(np.float64)
        log_probabilities = compute_log_probabilities(chunk, temperature)
        probabilities = np.exp(log_probabilities)
        at_label = (np.arange(len(chunk)), labels[rows])

        # counted from behind, so that an image with NaN among its logits is never correct
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

    Macro averages run over the classes that occur as a label or a prediction, with 0 for an
    undefined ratio, as scikit-learn's do (which takes 20 times as long for a bootstrap). ECE is Guo
    et al. (2017), equation 3.

    Args:
        scores: of n images.
        weights: how many times each image counts, [n]; once by default.

    Returns:
        Each metric by its name.
    """
    if weights is None:
        weights = np.ones(len(scores))
    total = weights.sum()
    correct_weights = weights * scores.correct

    # of each class that occurs: how many images have it as label, prediction, and both
    num_classes = scores.num_classes
    support = np.bincount(scores.labels, weights, minlength=num_classes)
    predicted = np.bincount(scores.predicted, weights, minlength=num_classes)
    correct = np.bincount(scores.labels, correct_weights, minlength=num_classes)
    occurs = support + predicted > 0
    support, predicted, correct = (counts[occurs] for counts in (support, predicted, correct))

    # |mean confidence - accuracy| of a bin times its fraction of the images: its count cancels
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
    """Mean confidence and accuracy of the images in 15 bins of confidence; 0 and 0 for an empty
    bin."""
    bins = find_bins(scores.confidence)
    counts = np.bincount(bins, minlength=NUM_BINS)
    divisors = np.maximum(counts, 1)
    confidence = np.bincount(bins, scores.confidence, minlength=NUM_BINS) / divisors
    accuracy = np.bincount(bins, scores.correct, minlength=NUM_BINS) / divisors
    edges = np.arange(NUM_BINS + 1) / NUM_BINS
    columns = (edges[:-1], edges[1:], counts, confidence, accuracy)
    return [Bin(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def find_bins(confidence: Floats) -> Ints:
    """The bin of each confidence, of 15 of equal width."""
    return np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
