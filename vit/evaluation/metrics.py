"""From logits and labels to metrics, in float64; the confusion matrix as a figure; and which images
to look at.

Each metric is a function of the images' weights: with weights of one it is the metric itself, with
those of a resample one bootstrap replicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from vit.prediction.probabilities import Floats, Ints, chunk_rows, compute_log_probabilities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_BINS = 15
# a ratio without a denominator is 0
_TINY = np.finfo(float).tiny
# classes whose counts are still legible in the cells
_MAX_NUMBERS = 20
# classes whose names are still legible at the axes
_MAX_NAMES = 40
# of more classes each is several: the picture has 1,400 pixels for them
_MAX_ROWS = 1000


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
class ClassMetrics:
    """One row of the table of classes."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int
    # 95 %
    precision_interval: tuple[float, float]
    recall_interval: tuple[float, float]


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


def compute_confusion(scores: Scores, *, group: int = 1) -> Ints:
    """Compute the confusion matrix.

    Args:
        scores: of n images of C classes.
        group: classes side by side that share a row and a column; of 20,000 classes the whole
            matrix would take 3 GB.

    Returns:
        Counts [C, C]: rows are the true classes, columns the predicted ones.
    """
    size = -(-scores.num_classes // group)
    pairs = scores.labels // group * size + scores.predicted // group
    return np.bincount(pairs, minlength=size**2).reshape(size, size)


def plot_confusion(scores: Scores, *, class_names: tuple[str, ...]) -> Figure:
    """Draw the fraction of each true class (row) that was predicted as each class (column)."""
    # takes half a second, which training doesn't need
    from matplotlib.figure import Figure

    num_classes = len(class_names)
    group = -(-num_classes // _MAX_ROWS)
    confusion = compute_confusion(scores, group=group)
    fractions = confusion / confusion.sum(axis=1, keepdims=True).clip(min=1)

    side = min(3 + 0.45 * num_classes, 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(fractions, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(image, ax=axes, fraction=0.04, label="fraction of the true class")
    axes.set(xlabel="predicted", ylabel="true")
    if group > 1:
        axes.set_ylabel(f"true ({group} classes a row)")
    if num_classes <= _MAX_NAMES:
        places = range(num_classes)
        axes.set_xticks(places, class_names, rotation=60, ha="right", rotation_mode="anchor")
        axes.set_yticks(places, class_names)
    if num_classes <= _MAX_NUMBERS:
        for row, column in np.argwhere(confusion).tolist():
            axes.text(
                column,
                row,
                str(confusion[row, column]),
                ha="center",
                va="center",
                color="white" if fractions[row, column] > 0.5 else "black",
                fontsize=8,
            )
    return figure


def compute_per_class(scores: Scores, class_names: tuple[str, ...]) -> list[ClassMetrics]:
    """Precision, recall, F1 and support of every class of the model, also of those without an
    image."""
    # takes a second, which training doesn't need
    from sklearn.metrics import precision_recall_fscore_support

    *fractions, _ = precision_recall_fscore_support(
        scores.labels, scores.predicted, labels=range(scores.num_classes), zero_division=0
    )
    # scikit-learn's is of floats where no image is predicted correctly
    support = np.bincount(scores.labels, minlength=scores.num_classes)
    predicted = np.bincount(scores.predicted, minlength=scores.num_classes)
    correct = np.bincount(scores.labels[scores.correct], minlength=scores.num_classes)
    rows = zip(
        class_names,
        *(column.tolist() for column in (*fractions, support, predicted)),
        zip(*compute_proportion_interval(correct, predicted), strict=True),
        zip(*compute_proportion_interval(correct, support), strict=True),
        strict=True,
    )
    return [ClassMetrics(*row) for row in rows]


def compute_proportion_interval(successes: Ints, counts: Ints) -> tuple[list[float], list[float]]:
    """95 % intervals of proportions, exact: of any true proportion, at least 95 % of samples have
    an interval that holds it (Clopper & Pearson 1934).

    Args:
        successes: of each sample, [k].
        counts: sizes of the samples, [k]; of none the interval is 0…1.

    Returns:
        The lower and the upper ends, k each.
    """
    tail = (1 - 0.95) / 2
    failures = counts - successes
    # the quantile is defined for positive parameters alone
    low = betaincinv(np.maximum(successes, 1), failures + 1, tail)
    high = betaincinv(successes + 1, np.maximum(failures, 1), 1 - tail)
    return (
        np.where(successes > 0, low, 0.0).tolist(),
        np.where(failures > 0, high, 1.0).tolist(),
    )


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


@dataclass(frozen=True)
class Example:
    """One image and its prediction."""

    path: str
    label: str
    predicted: str
    # of the predicted class
    probability: float
    label_probability: float


@dataclass(frozen=True)
class Examples:
    """Images to look at, the clearest cases of each kind first."""

    most_confident_errors: list[Example]
    least_confident_correct: list[Example]
    label_errors: list[Example]
    # of all images, by confident learning
    num_label_errors: int


def choose_examples(
    logits: NDArray[np.float32],
    scores: Scores,
    *,
    ids: Sequence[str],
    class_names: Sequence[str],
    count: int,
) -> Examples:
    """Choose up to `count` images of each kind; `ids` and `logits` [n, C] are those of the scored
    images."""

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
    return Examples(
        most_confident_errors=describe(surest_first[~scores.correct[surest_first]][:count]),
        least_confident_correct=describe(unsurest_first[scores.correct[unsurest_first]][:count]),
        label_errors=describe(label_errors[:count]),
        num_label_errors=len(label_errors),
    )


def find_label_errors(logits: NDArray[np.float32], scores: Scores) -> Ints:
    """Indices of the images whose label is probably wrong, the least plausible first.

    Confident learning (Northcutt, Jiang & Chuang 2021, section 3): a class's threshold is the mean
    probability it has on the images labelled with it. An image is a likely label error when, of the
    classes that reach their threshold on it, the most probable is not its label; ranked by
    self-confidence, the probability of the given label. It presumes a model that did not see these
    images in training.
    """
    support = np.bincount(scores.labels, minlength=scores.num_classes)
    thresholds = np.bincount(scores.labels, scores.label_probability, minlength=scores.num_classes)
    # a class that no image here has as its label has no threshold
    thresholds = np.where(support > 0, thresholds / np.maximum(support, 1), np.inf)

    flags = []
    for rows in chunk_rows(logits):
        probabilities = np.exp(compute_log_probabilities(logits[rows], scores.temperature))
        reached = np.where(probabilities >= thresholds, probabilities, -1.0)
        is_other_class = reached.argmax(axis=1) != scores.labels[rows]
        flags.append((reached.max(axis=1) > 0) & is_other_class)
    flagged = np.flatnonzero(np.concatenate(flags))
    return flagged[np.argsort(scores.label_probability[flagged], kind="stable")]
