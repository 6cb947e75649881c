"""Metrics from logits and labels, in float64: of all images and of each class, where an image has
one class or several labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from vit.evaluation.clusters import Interval, compute_clustered_interval, number_clusters
from vit.evaluation.intervals import bound_rate, find_step, leave_out_parts
from vit.evaluation.thresholds import ThresholdRates, measure_thresholds
from vit.prediction.decision import THRESHOLD, ClassThreshold
from vit.prediction.probabilities import (
    Bools,
    Float32s,
    Floats,
    Ints,
    chunk_rows,
    compute_log_probabilities,
)

NUM_BINS = 15
# Largest loss of an image, that of the least probability which a float64 holds: a logit of −∞ leaves
# the mean finite.
MAX_LOSS = 708.0
# averages over classes, and over labels → what of each class they average
_CLASS_AVERAGES = {"macro_f1": "f1", "macro_recall": "recall"}
_LABEL_AVERAGES = {"map": "average_precision", "roc_auc": "roc_auc", "macro_f1": "f1"}


@dataclass(frozen=True, eq=False)
class Scores:
    """Predictions of n images of C classes or labels, and their contributions to the metrics.

    Attributes:
        labels: Index of each image's class, [n]; or which labels it has, bool [n, C].
        predicted: Index of the predicted class, [n]; or which labels are predicted, bool [n, C].
        probabilities: Probability of each class or label, [n, C].
        loss: Cross-entropy of these probabilities, of several labels the mean over them, nats, [n].
        rank: Number of classes ahead of the image's class, or number of labels that are wrong, [n].
            Among equal logits the first class is ahead, and the predicted class is ahead of all.
        thresholds: Probability from which each class or label is predicted, [C]; NaN for a class
            that has none.
    """

    labels: Any
    predicted: Any
    probabilities: Floats
    loss: Floats
    rank: Ints
    thresholds: Floats

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_multilabel(self) -> bool:
        return bool(self.labels.ndim == 2)

    @property
    def num_classes(self) -> int:
        return int(self.probabilities.shape[1])

    @property
    def correct(self) -> Bools:
        """True for an image whose class, or of which every label, is right, [n]."""
        return np.equal(self.rank, 0)

    @property
    def confidence(self) -> Floats:
        """Probability of the predicted class, [n]."""
        return np.asarray(self.probabilities[np.arange(len(self)), self.predicted])

    @property
    def label_probability(self) -> Floats:
        """Probability of the image's class, or of the least probable label that it has, [n]."""
        if self.is_multilabel:
            return np.asarray(np.where(self.labels, self.probabilities, 1.0).min(axis=1))
        return np.asarray(self.probabilities[np.arange(len(self)), self.labels])

    def mark(self, place: int) -> tuple[Bools, Bools]:
        """Return which images have a class or label, and for which it is predicted, [n] each."""
        if self.is_multilabel:
            return self.labels[:, place], self.predicted[:, place]
        return np.equal(self.labels, place), np.equal(self.predicted, place)

    def subset(self, chosen: Bools | Ints) -> Scores:
        """Return the scores of some images."""
        names = ("labels", "predicted", "probabilities", "loss", "rank")
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in names}
        return replace(self, **columns)


def score_logits(
    logits: Float32s,
    labels: Any,
    *,
    temperature: float = 1.0,
    thresholds: Floats | float = THRESHOLD,
    threshold: ClassThreshold | None = None,
) -> Scores:
    """Score logits against labels.

    Args:
        logits: [n, C].
        labels: Class of each image, [n], 0…C-1; or which labels it has, bool [n, C].
        temperature: Divisor of the logits before the softmax, or the sigmoid for labels.
        thresholds: Probability from which each label is predicted, [C] or for all.
        threshold: The operating point of one class. None: the class of the highest logit is
            predicted.

    Raises:
        ValueError: The logits of labels hold NaN.
    """
    count, num_classes = logits.shape
    if labels.ndim == 2:
        scaled = logits.astype(np.float64) / temperature
        _check_numbers(np.asarray(np.isnan(scaled).any(axis=1)), "NaN")
        probabilities = expit(scaled)
        decided = np.broadcast_to(np.asarray(thresholds, dtype=np.float64), num_classes)
        predicted = probabilities >= decided
        # log(1 + exp(−z)) where the label is there, log(1 + exp(z)) where it isn't
        losses = np.minimum(np.logaddexp(0, np.where(labels, -scaled, scaled)), MAX_LOSS)
        rank = (predicted != labels).sum(axis=1)
        return Scores(labels, predicted, probabilities, losses.mean(axis=1), rank, decided)

    probabilities, loss = np.empty((count, num_classes)), np.empty(count)
    predicted, rank = np.empty(count, np.int64), np.empty(count, np.int64)
    # in parts, because the copies in float64 take twice the memory of the logits
    for rows in chunk_rows(logits):
        chunk = logits[rows].astype(np.float64)
        log_probabilities = compute_log_probabilities(chunk, temperature)
        probabilities[rows] = np.exp(log_probabilities)
        at_label = (np.arange(len(chunk)), labels[rows])
        loss[rows] = np.minimum(-log_probabilities[at_label], MAX_LOSS)

        # classes behind the label are counted, so that an image with NaN in its logits is wrong
        label_logits = chunk[at_label][:, None]
        is_later_class = np.arange(num_classes) >= labels[rows, None]
        is_behind = (chunk < label_logits) | ((chunk == label_logits) & is_later_class)
        predicted[rows] = chunk.argmax(axis=1)
        rank[rows] = num_classes - is_behind.sum(axis=1)
        if threshold is not None:
            predicted[rows] = threshold.decide(probabilities[rows])
            was_ahead = ~is_behind[at_label[0], predicted[rows]]
            is_right = predicted[rows] == labels[rows]
            rank[rows] = np.where(is_right, 0, rank[rows] + 1 - was_ahead)
    # the most probable of two classes is the one above a half; among more, none has a threshold
    decided = np.full(num_classes, THRESHOLD if num_classes == 2 else np.nan)
    if threshold is not None:
        decided = np.full(num_classes, np.nan)
        decided[threshold.place] = threshold.probability
    return Scores(labels, predicted, probabilities, loss, rank, decided)


def _check_numbers(is_wrong: Bools, what: str) -> None:
    """Raise ValueError if the logits of some images are no numbers."""
    if is_wrong.any():
        raise ValueError(
            f"{int(is_wrong.sum()):,} of {len(is_wrong):,} images have {what} among their logits;"
            " leave them out, or compute the logits in float32"
        )


@dataclass(frozen=True)
class Bin:
    """A bar of the reliability diagram: mean confidence and accuracy of its images, 0 to 1."""

    lower: float
    upper: float
    count: int
    confidence: float
    accuracy: float


def bin_confidence(scores: Scores) -> list[Bin]:
    """Compute mean confidence and accuracy of predictions in 15 bins of confidence; both are 0 for
    an empty bin. With several labels an image, all pairs of image and label are counted.

    Raises:
        ValueError: The logits hold NaN or infinity.
    """
    confidence, correct = scores.probabilities.ravel(), scores.labels.ravel()
    if not scores.is_multilabel:
        confidence, correct = scores.confidence, scores.correct
    _check_numbers(np.isnan(confidence), "NaN or infinity")
    bins = np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    divisors = np.maximum(counts, 1)
    means = np.bincount(bins, confidence, minlength=NUM_BINS) / divisors
    accuracies = np.bincount(bins, correct, minlength=NUM_BINS) / divisors
    edges = np.arange(NUM_BINS + 1) / NUM_BINS
    columns = (edges[:-1], edges[1:], counts, means, accuracies)
    return [Bin(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class or label, 0 to 1, with 95 % intervals. Those that need an image of it
    are None without one.

    Attributes:
        support: Number of images that have it.
        predicted: Number of images that are predicted to have it.
        average_precision, roc_auc: Areas under both curves of a label or of one of two classes;
            otherwise None. That of the ROC curve is None if every image has the label.
        thresholds: Rates at the threshold that decides, and at those with a given sensitivity or
            specificity, for a label or one of two classes.
    """

    name: str
    support: int
    predicted: int
    precision: float | None
    recall: float | None
    f1: float | None
    precision_interval: Interval
    recall_interval: Interval
    average_precision: float | None = None
    roc_auc: float | None = None
    average_precision_interval: Interval = (0.0, 1.0)
    roc_auc_interval: Interval = (0.0, 1.0)
    thresholds: list[ThresholdRates] = field(default_factory=list)


class Measures(NamedTuple):
    """The metrics of `compute_metrics`; 95 % intervals of all but the loss, the calibration error
    and the Brier score, each of which includes its metric; and a row for each class or label."""

    metrics: dict[str, float]
    intervals: dict[str, Interval]
    per_class: list[ClassMetrics]


def compute_metrics(scores: Scores) -> dict[str, float]:
    """Compute the metrics of `Evaluation` by name; NaN where no image has a label that one needs.

    Averages over classes are over those that some image has; of the area under the ROC curve, over
    those that another image lacks, too. They are scikit-learn's with `labels=np.unique(y_true)` and
    0 for the F1 of a class that is never predicted. An image without a label that gets none counts
    as right. The calibration error is that of Guo et al. (2017), equation 3, over classes that are
    predicted, or over all pairs of image and label.

    Raises:
        ValueError: The logits hold NaN or infinity.
    """
    bins = bin_confidence(scores)
    gaps = sum(bin.count * abs(bin.confidence - bin.accuracy) for bin in bins)
    averages = _average(scores, _measure_classes(scores, slice(None), ranks=scores.is_multilabel))
    accuracy = float(scores.correct.mean())
    shared = {
        "loss": float(scores.loss.mean()),
        "ece": gaps / max(sum(bin.count for bin in bins), 1),
    }
    if scores.is_multilabel:
        return {**averages, "exact_match": accuracy, **shared}
    # with many classes, a one-hot matrix of the labels would double the memory
    squares = (scores.probabilities**2).sum(axis=1)
    # sum over classes of (p - y)², with y one at the label
    brier = float((squares - 2 * scores.label_probability + 1).mean())
    top5 = float((scores.rank < 5).mean())
    return {"top1": accuracy, "top5": top5, **averages, **shared, "brier": brier}


def measure(
    scores: Scores, groups: Sequence[str] | None = None, class_names: Sequence[str] = ()
) -> Measures:
    """Compute the metrics and their 95 % intervals.

    Proportions of images have Clopper and Pearson's exact interval. Averages over classes, and areas
    under curves, have the jackknife's, see `vit.evaluation.intervals`. A bootstrap fails where there
    are few errors: it can't draw errors that are not in the test set.

    Args:
        scores: Scores of the images.
        groups: Group of each image. Images of one group, such as a burst, are not independent, and
            all intervals are wider for it. None: each image is its own group.
        class_names: Name of each class or label. Without names, classes have no rows.

    Raises:
        ValueError: The logits hold NaN or infinity.
    """
    metrics = compute_metrics(scores)
    clusters = number_clusters(groups, len(scores))
    # each class measured on all images, and without each part of them
    tables = [
        _measure_classes(scores, kept, ranks=scores.is_multilabel or bool(class_names))
        for kept in (np.ones(len(scores), bool), *leave_out_parts(clusters))
    ]
    if scores.is_multilabel:
        right = {"exact_match": scores.correct}
        step = find_step(clusters, scores.labels.sum(axis=0))
    else:
        right = {"top1": scores.correct, "top5": scores.rank < 5}
        step = find_step(clusters)
    intervals = {
        name: compute_clustered_interval(values, clusters) for name, values in right.items()
    }
    averages = [_average(scores, table) for table in tables]
    for name in averages[0]:
        intervals[name] = bound_rate([each[name] for each in averages], step)
    rows = [
        _build_row(scores, place, name, clusters, tables) for place, name in enumerate(class_names)
    ]
    return Measures(metrics, intervals, rows)


def find_known(value: float) -> float | None:
    """Return a metric as files hold it: None for one that isn't defined, whose value is NaN."""
    if np.isnan(value):
        return None
    return float(value)


def _measure_classes(scores: Scores, kept: Bools | slice, *, ranks: bool) -> dict[str, Floats]:
    """Measure each class or label on some of the images.

    Args:
        scores: Scores of n images.
        kept: The images.
        ranks: Compute the areas under the curves, too.

    Returns:
        Name → [C]; NaN where no image has the class. "counts" are the images with it, those that
        are predicted to have it, and those of which both is true, [3, C].
    """
    labels, predicted = scores.labels[kept], scores.predicted[kept]
    if scores.is_multilabel:
        masks = (labels, predicted, labels & predicted)
        counts = np.stack([mask.sum(axis=0) for mask in masks])
    else:
        # counted, because marks for each image and class would take too much memory
        columns = (labels, predicted, labels[labels == predicted])
        counts = np.stack([np.bincount(each, minlength=scores.num_classes) for each in columns])
    support, guessed, hits = counts
    areas = np.full((2, scores.num_classes), np.nan)
    if ranks:
        for place in np.flatnonzero(~np.isnan(scores.thresholds)).tolist():
            is_positive, _ = scores.mark(place)
            areas[:, place] = compute_areas(is_positive[kept], scores.probabilities[kept, place])
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "counts": counts,
            "precision": np.where(support > 0, hits / np.maximum(guessed, 1), np.nan),
            "recall": hits / support,
            "f1": np.where(support > 0, 2 * hits / (support + guessed), np.nan),
            "average_precision": areas[0],
            "roc_auc": areas[1],
        }


def compute_areas(labels: Bools, probabilities: Floats) -> tuple[float, float]:
    """Compute the average precision and the area under the ROC curve of one label, as scikit-learn
    does, but in a tenth of its time: the jackknife needs them 50 times for each label.

    Returns:
        Both; NaN if no image has the label, and for the area also if every image has it.
    """
    # a third of a second to import
    from scipy.stats import rankdata

    num_positive = int(labels.sum())
    num_others = len(labels) - num_positive
    if not num_positive:
        return np.nan, np.nan
    # images of at least the same probability: all of them, and those that have the label
    ranks = rankdata(-probabilities, "max")[labels]
    precision = float((rankdata(-probabilities[labels], "max") / ranks).mean())
    if not num_others:
        return precision, np.nan
    # Mann and Whitney's statistic
    above = rankdata(probabilities)[labels].sum() - num_positive * (num_positive + 1) / 2
    return precision, float(above / (num_positive * num_others))


def _average(scores: Scores, table: dict[str, Floats]) -> dict[str, float]:
    """Return the metrics that are averages over classes or labels. See `_measure_classes`."""
    columns = _CLASS_AVERAGES
    averages = {}
    if scores.is_multilabel:
        columns = _LABEL_AVERAGES
        support, guessed, hits = table["counts"].sum(axis=1).tolist()
        averages["micro_f1"] = np.nan
        if support + guessed:
            averages["micro_f1"] = 2 * hits / (support + guessed)
    for name, column in columns.items():
        known = table[column][~np.isnan(table[column])]
        averages[name] = np.nan
        if len(known):
            averages[name] = float(known.mean())
    return averages


def _build_row(
    scores: Scores,
    place: int,
    name: str,
    clusters: Ints,
    tables: Sequence[dict[str, Floats]],
) -> ClassMetrics:
    """Return the metrics of one class or label, measured on all images and without each part."""
    has_class, guessed = scores.mark(place)
    is_hit = has_class & guessed
    support = int(has_class.sum())
    values: dict[str, Any] = {}
    for key in ("precision", "recall", "f1", "average_precision", "roc_auc"):
        values[key] = find_known(tables[0][key][place])
    threshold = float(scores.thresholds[place])
    if not np.isnan(threshold):
        # one more image at the wrong place
        step = 1 / max(min(support, len(scores) - support), 1)
        for key in ("average_precision", "roc_auc"):
            values[f"{key}_interval"] = bound_rate([table[key][place] for table in tables], step)
        values["thresholds"] = measure_thresholds(
            scores.probabilities[:, place], has_class, clusters, threshold=threshold
        )
    return ClassMetrics(
        name,
        support,
        predicted=int(guessed.sum()),
        precision_interval=compute_clustered_interval(is_hit[guessed], clusters[guessed]),
        recall_interval=compute_clustered_interval(is_hit[has_class], clusters[has_class]),
        **values,
    )
