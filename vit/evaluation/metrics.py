"""From logits and labels to figures, in float64.

A metric is a function of the images and their weights. With weight one each it is the figure; with the counts
of a draw with replacement it is one bootstrap replicate (`intervals.py`): both come from the same lines.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax
from torchmetrics.functional.classification import multiclass_confusion_matrix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_BINS = 15
_CHUNK = 4096  # images scored at a time: bounds the float64 copy of the logits


@dataclass(frozen=True)
class Scores:
    """What each of n images contributes, in the order of the source."""

    labels: Ints
    predicted: Ints
    confidence: Floats  # probability of the predicted class
    label_probability: Floats
    loss: Floats  # cross-entropy of the logits as they are, nats
    nll: Floats  # cross-entropy after the temperature, nats
    brier: Floats  # squared distance of the probabilities from the truth, summed over classes, 0…2
    rank: Ints  # classes ahead of the label: 0 is a hit; of equal logits the first class is ahead
    num_classes: int

    @property
    def correct(self) -> NDArray[np.bool_]:
        return np.equal(self.rank, 0)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ClassFigures:
    """One class's row."""

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
    columns: dict[str, list[NDArray[np.generic]]] = {}
    for start in range(0, len(labels), _CHUNK):
        part, truth = logits[start : start + _CHUNK].astype(np.float64), labels[start : start + _CHUNK]
        rows = np.arange(len(truth))
        log_probabilities = log_softmax(part / temperature, axis=1)
        probabilities = np.exp(log_probabilities)
        own = part[rows, truth][:, None]
        ahead = (part > own) | ((part == own) & (np.arange(part.shape[1]) < truth[:, None]))
        predicted = part.argmax(axis=1)
        scored = {
            "predicted": predicted,
            "confidence": probabilities[rows, predicted],
            "label_probability": probabilities[rows, truth],
            "loss": -log_softmax(part, axis=1)[rows, truth],
            "nll": -log_probabilities[rows, truth],
            # sum over classes of (p - y)^2, with y one at the label
            "brier": (probabilities**2).sum(axis=1) - 2 * probabilities[rows, truth] + 1,
            "rank": ahead.sum(axis=1),
        }
        for name, values in scored.items():
            columns.setdefault(name, []).append(values)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return Scores(labels=labels, num_classes=logits.shape[1], **joined)


def compute_figures(scores: Scores, weights: Floats | None = None) -> dict[str, float]:
    """The headline figures, each image counted `weights` times (once by default).

    Macro averages run over the classes that occur as a label or a prediction, with 0 for an undefined ratio,
    as scikit-learn's do. ECE is Guo et al. (2017), equation 3, over 15 bins of equal width. Brier is the sum
    over classes (0…2). `loss` belongs to the logits, `nll` to the probabilities after the temperature.
    """
    weights = np.ones(len(scores)) if weights is None else weights
    total = weights.sum()
    hits = weights * scores.correct
    classes = scores.num_classes
    precision, recall, f1 = _ratios(
        np.bincount(scores.labels, hits, minlength=classes),
        support=np.bincount(scores.labels, weights, minlength=classes),
        predicted=np.bincount(scores.predicted, weights, minlength=classes),
    )
    # |mean confidence - accuracy| of a bin times its share of the images: the bin's count cancels
    gaps = np.bincount(
        _bins(scores.confidence), weights * (scores.confidence - scores.correct), minlength=NUM_BINS
    )
    return {
        "top1": float(hits.sum() / total),
        "top5": float(weights @ (scores.rank < 5) / total),
        "loss": float(weights @ scores.loss / total),
        "macro_f1": float(f1.mean()),
        "macro_precision": float(precision.mean()),
        "macro_recall": float(recall.mean()),
        "ece": float(np.abs(gaps).sum() / total),
        "brier": float(weights @ scores.brier / total),
        "nll": float(weights @ scores.nll / total),
    }


def compute_confusion(scores: Scores) -> Ints:
    """Counts [C, C]: row the true class, column the predicted one."""
    counts = multiclass_confusion_matrix(
        torch.from_numpy(scores.predicted), torch.from_numpy(scores.labels), num_classes=scores.num_classes
    )
    return counts.numpy()


def compute_per_class(confusion: Ints, class_names: tuple[str, ...]) -> list[ClassFigures]:
    """Precision, recall, F1 and support of every class of the model, also of those without an image."""
    support, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
    # torchmetrics' own ratios are float32: only its counts are taken
    ratios = _ratios(confusion.diagonal(), support=support, predicted=predicted, keep_empty=True)
    return [
        ClassFigures(name=name, precision=p, recall=r, f1=f, support=s, predicted=q)
        for name, p, r, f, s, q in zip(
            class_names,
            *(ratio.tolist() for ratio in ratios),
            support.tolist(),
            predicted.tolist(),
            strict=True,
        )
    ]


def compute_reliability(scores: Scores) -> list[Bin]:
    """Mean confidence and accuracy of the images in 15 bins of confidence; 0 and 0 for an empty bin."""
    bins = _bins(scores.confidence)
    count = np.bincount(bins, minlength=NUM_BINS)
    confidence = np.bincount(bins, scores.confidence, minlength=NUM_BINS) / np.maximum(count, 1)
    accuracy = np.bincount(bins, scores.correct, minlength=NUM_BINS) / np.maximum(count, 1)
    return [
        Bin(
            lower=index / NUM_BINS,
            upper=(index + 1) / NUM_BINS,
            count=int(count[index]),
            confidence=float(confidence[index]),
            accuracy=float(accuracy[index]),
        )
        for index in range(NUM_BINS)
    ]


def _bins(confidence: Floats) -> Ints:
    return np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)


def _ratios(
    hits: NDArray[np.generic],
    *,
    support: NDArray[np.generic],
    predicted: NDArray[np.generic],
    keep_empty: bool = False,
) -> tuple[Floats, Floats, Floats]:
    """Precision, recall and F1 of the classes that occur (of all with `keep_empty`), 0 where undefined."""
    counts = np.array([hits, support, predicted], dtype=np.float64)
    if not keep_empty:
        counts = counts[:, counts[1] + counts[2] > 0]
    hit, true, found = counts
    return (
        hit / np.maximum(found, np.finfo(float).tiny),
        hit / np.maximum(true, np.finfo(float).tiny),
        2 * hit / np.maximum(true + found, np.finfo(float).tiny),
    )
