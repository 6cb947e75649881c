"""From logits and labels to metrics, in float64.

Each is a function of the images' weights: with weights of one it is the metric itself, with the counts of a draw with
replacement one bootstrap replicate (`intervals.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_BINS = 15
_CHUNK, _CHUNK_LOGITS = 4096, 2**22  # images scored at a time, and their logits: bounds the float64 copies
_TINY = np.finfo(float).tiny  # a ratio without a denominator is 0


@dataclass(frozen=True)
class Scores:
    """What each of n images contributes to the metrics, in the order of the images."""

    labels: Ints
    predicted: Ints
    confidence: Floats  # probability of the predicted class
    label_probability: Floats
    loss: Floats  # cross-entropy of the logits as they are, nats
    nll: Floats  # cross-entropy after the temperature, nats
    brier: Floats  # squared difference of probabilities and one-hot label, summed over classes, 0…2
    rank: Ints  # classes ahead of the label, 0 if it is correct; of equal logits the first class is ahead
    num_classes: int
    temperature: float

    @property
    def correct(self) -> NDArray[np.bool_]:
        return np.equal(self.rank, 0)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ClassMetrics:
    name: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


@dataclass(frozen=True)
class Bin:
    """One bar of the reliability diagram."""

    lower: float
    upper: float
    count: int
    confidence: float
    accuracy: float


def score_logits(logits: NDArray[np.float32], labels: Ints, *, temperature: float = 1.0) -> Scores:
    """Score logits [n, C] against labels [n] (0…C-1); probabilities are softmax(logits / temperature)."""
    chunks = [_score_chunk(logits[rows].astype(np.float64), labels[rows], temperature) for rows in chunk_rows(logits)]
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    return Scores(labels=labels, num_classes=logits.shape[1], temperature=temperature, **columns)


def chunk_rows(logits: NDArray[np.float32]) -> Iterator[slice]:
    """Slices of [n, C] that together are all rows: fewer at a time of many classes."""
    size = min(_CHUNK, max(_CHUNK_LOGITS // logits.shape[1], 1))
    return (slice(start, start + size) for start in range(0, len(logits), size))


def compute_log_probabilities(logits: NDArray[np.floating[Any]], temperature: float) -> Floats:
    """log softmax(logits / temperature) of [n, C]."""
    return np.asarray(log_softmax(logits.astype(np.float64, copy=False) / temperature, axis=1))


def _score_chunk(logits: Floats, labels: Ints, temperature: float) -> dict[str, NDArray[Any]]:
    rows = np.arange(len(labels))
    log_probabilities = compute_log_probabilities(logits, temperature)
    probabilities = np.exp(log_probabilities)
    own = logits[rows, labels][:, None]
    # an image with NaN among its logits is never correct
    behind = (logits < own) | ((logits == own) & (np.arange(logits.shape[1]) >= labels[:, None]))
    predicted = logits.argmax(axis=1)
    return {
        "predicted": predicted,
        "confidence": probabilities[rows, predicted],
        "label_probability": probabilities[rows, labels],
        "loss": -compute_log_probabilities(logits, 1.0)[rows, labels],
        "nll": -log_probabilities[rows, labels],
        # sum over classes of (p - y)^2, with y one at the label
        "brier": (probabilities**2).sum(axis=1) - 2 * probabilities[rows, labels] + 1,
        "rank": logits.shape[1] - behind.sum(axis=1),
    }


def compute_metrics(scores: Scores, weights: Floats | None = None) -> dict[str, float]:
    """The metrics of `Evaluation`, each image counted `weights` times (once by default).

    Macro averages run over the classes that occur as a label or a prediction, with 0 for an undefined ratio, as
    scikit-learn's do (which takes 20 times as long for a bootstrap). ECE is Guo et al. (2017), equation 3.
    """
    weights = np.ones(len(scores)) if weights is None else weights
    total, hits = weights.sum(), weights * scores.correct
    support, predicted, correct = (
        np.bincount(classes, weight, minlength=scores.num_classes)
        for classes, weight in ((scores.labels, weights), (scores.predicted, weights), (scores.labels, hits))
    )
    occur = support + predicted > 0
    support, predicted, correct = support[occur], predicted[occur], correct[occur]
    # |mean confidence - accuracy| of a bin times its fraction of the images: the bin's count cancels
    gaps = np.bincount(_bins(scores.confidence), weights * (scores.confidence - scores.correct), minlength=NUM_BINS)
    return {
        "top1": float(hits.sum() / total),
        "top5": float(weights @ (scores.rank < 5) / total),
        "loss": float(weights @ scores.loss / total),
        "macro_f1": float((2 * correct / (support + predicted)).mean()),
        "macro_precision": float((correct / np.maximum(predicted, _TINY)).mean()),
        "macro_recall": float((correct / np.maximum(support, _TINY)).mean()),
        "ece": float(np.abs(gaps).sum() / total),
        "brier": float(weights @ scores.brier / total),
        "nll": float(weights @ scores.nll / total),
    }


def compute_confusion(scores: Scores, *, group: int = 1) -> Ints:
    """Counts [C, C]: rows are the true classes, columns the predicted ones. With `group` each row and column is so many
    classes side by side: of 20,000 classes the whole matrix would take 3 GB."""
    count = -(-scores.num_classes // group)
    pairs = scores.labels // group * count + scores.predicted // group
    return np.bincount(pairs, minlength=count**2).reshape(count, count)


def count_errors(scores: Scores) -> tuple[Ints, Ints]:
    """The entries of the confusion matrix beside its diagonal that are not zero: (row, column) [m, 2] and counts [m],
    the largest first, equal ones by row and column."""
    wrong = scores.labels != scores.predicted
    pairs, counts = np.unique((scores.labels * scores.num_classes + scores.predicted)[wrong], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return np.stack(np.divmod(pairs[order], scores.num_classes), axis=1), counts[order]


def compute_per_class(scores: Scores, class_names: tuple[str, ...]) -> list[ClassMetrics]:
    """Precision, recall, F1 and support of every class of the model, also of those without an image."""
    from sklearn.metrics import precision_recall_fscore_support  # takes a second, which training doesn't need

    classes = range(scores.num_classes)
    columns = precision_recall_fscore_support(scores.labels, scores.predicted, labels=classes, zero_division=0)
    predicted = np.bincount(scores.predicted, minlength=scores.num_classes)
    rows = zip(class_names, *(column.tolist() for column in (*columns, predicted)), strict=True)
    return [ClassMetrics(*row) for row in rows]


def compute_reliability(scores: Scores) -> list[Bin]:
    """Mean confidence and accuracy of the images in 15 bins of confidence; 0 and 0 for an empty bin."""
    bins = _bins(scores.confidence)
    count = np.bincount(bins, minlength=NUM_BINS)
    confidence = np.bincount(bins, scores.confidence, minlength=NUM_BINS) / np.maximum(count, 1)
    accuracy = np.bincount(bins, scores.correct, minlength=NUM_BINS) / np.maximum(count, 1)
    edges = np.arange(NUM_BINS + 1) / NUM_BINS
    columns = (edges[:-1], edges[1:], count, confidence, accuracy)
    return [Bin(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _bins(confidence: Floats) -> Ints:
    return np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
