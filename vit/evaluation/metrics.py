"""Metrics from logits and labels, in float64: of all images and of each class, where an image has
one class or several labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from vit.evaluation.intervals import (
    Interval,
    bound_rate,
    compute_clustered_interval,
    find_step,
    leave_out_parts,
    number_clusters,
)
from vit.prediction.decision import THRESHOLD, decide_classes
from vit.prediction.probabilities import (
    Bools,
    Float32s,
    Floats,
    Ints,
    compute_log_probabilities,
)

_NUM_BINS = 15
# Largest loss of an image, that of the least probability of a float64: a logit of −∞ leaves the
# mean finite.
_MAX_LOSS = 708.0
# averages over classes, and over labels → what of each class they average
_AVERAGES = (
    {"macro_f1": "f1", "macro_recall": "recall"},
    {"map": "average_precision", "roc_auc": "roc_auc", "macro_f1": "f1"},
)


@dataclass(frozen=True, eq=False)
class Scores:
    """Predictions of n images of C classes or labels, and their contributions to the metrics.

    Attributes:
        labels, predicted: Index of each image's class and of the predicted one, [n]; or which
            labels it has, and which are predicted, bool [n, C].
        probabilities: Probability of each class or label, [n, C].
        loss: Cross-entropy of these probabilities, of several labels the mean over them, nats, [n].
        rank: Number of classes ahead of the image's class, or number of labels that are wrong, [n].
            Among equal logits the first class is ahead, and the predicted class is ahead of all.
        thresholds: Probability from which each class or label is predicted, [C], or NaN.
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
    def correct(self) -> Bools:
        """True for an image whose class, or of which every label, is right, [n]."""
        return np.equal(self.rank, 0)

    @property
    def confidence(self) -> Floats:
        """Probability of the predicted class, [n]."""
        return np.asarray(self.probabilities[np.arange(len(self)), self.predicted])

    @property
    def label_probability(self) -> Floats:
        """Probability of the image's class, [n]."""
        return np.asarray(self.probabilities[np.arange(len(self)), self.labels])

    def mark(self, place: int) -> tuple[Bools, Bools]:
        """Return which images have a class or label, and for which it is predicted, [n] each."""
        if self.is_multilabel:
            return self.labels[:, place], self.predicted[:, place]
        return np.equal(self.labels, place), np.equal(self.predicted, place)

    def subset(self, chosen: Bools | Ints) -> "Scores":
        """Return the scores of some images."""
        names = ("labels", "predicted", "probabilities", "loss", "rank")
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in names}
        return replace(self, **columns)


def score_logits(
    logits: Float32s,
    labels: Any,
    *,
    temperature: float = 1.0,
    thresholds: Floats | None = None,
) -> Scores:
    """Score logits [n, C] against the class of each image, [n], or its labels, bool [n, C].

    They are divided by the temperature before the softmax, or the sigmoid. A label is predicted
    from its threshold on, 0.5 by default, a class if its logit is the highest, or by the threshold
    of one. See `read_thresholds`.
    """
    count, num_classes = logits.shape
    if labels.ndim == 2:
        scaled = logits.astype(np.float64) / temperature
        probabilities = expit(scaled)
        decided = np.full(num_classes, THRESHOLD) if thresholds is None else thresholds
        predicted = probabilities >= decided
        # log(1 + exp(−z)) where the label is there, log(1 + exp(z)) where it isn't
        with np.errstate(invalid="ignore"):
            losses = np.minimum(np.logaddexp(0, np.where(labels, -scaled, scaled)), _MAX_LOSS)
        rank = (predicted != labels).sum(axis=1)
        return Scores(labels, predicted, probabilities, losses.mean(axis=1), rank, decided)

    log_probabilities = compute_log_probabilities(logits, temperature)
    probabilities = np.exp(log_probabilities)
    at_label = (np.arange(count), labels)
    loss = np.minimum(-log_probabilities[at_label], _MAX_LOSS)
    # classes behind the label are counted, so that an image with NaN in its logits is wrong
    is_later_class = np.arange(num_classes) >= labels[:, None]
    label_logits = logits[at_label][:, None]
    is_behind = (logits < label_logits) | ((logits == label_logits) & is_later_class)
    predicted = logits.argmax(axis=1)
    rank = num_classes - is_behind.sum(axis=1)
    # the most probable of two classes is the one above a half; among more, none has a threshold
    decided = np.full(num_classes, THRESHOLD if num_classes == 2 else np.nan)
    if thresholds is not None and not np.isnan(thresholds).all():
        decided = thresholds
        predicted = decide_classes(thresholds, probabilities)
        was_ahead = ~is_behind[at_label[0], predicted]
        rank = np.where(predicted == labels, 0, rank + 1 - was_ahead)
    return Scores(labels, predicted, probabilities, loss, rank, decided)


def bin_confidence(scores: Scores) -> tuple[Ints, Floats, Floats]:
    """Count predictions in 15 bins of confidence, of several labels all pairs of image and label:
    return the counts, the mean confidences and the accuracies, 0 for an empty bin. Raises
    ValueError for NaN or infinity among the logits."""
    num_wrong = int(np.isnan(scores.probabilities).any(axis=1).sum())
    if num_wrong:
        raise ValueError(
            f"{num_wrong:,} of {len(scores):,} images have NaN or infinity among their logits;"
            " leave them out, or compute the logits in float32"
        )
    confidence, correct = scores.probabilities.ravel(), scores.labels.ravel()
    if not scores.is_multilabel:
        confidence, correct = scores.confidence, scores.correct
    bins = np.minimum((confidence * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    counts = np.bincount(bins, minlength=_NUM_BINS)
    means, accuracies = (
        np.bincount(bins, values, minlength=_NUM_BINS) / np.maximum(counts, 1)
        for values in (confidence, correct)
    )
    return counts, means, accuracies


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class or label, 0 to 1, with 95 % intervals. Those that need an image of it
    are None without one, and those after `threshold` for classes that have no threshold.

    `support` and `predicted` are the numbers of images that have it, and that are predicted to have
    it; `threshold` is the probability from which a label or one of two classes is predicted.
    """

    name: str
    support: int
    predicted: int
    precision: float | None
    recall: float | None
    f1: float | None
    precision_interval: Interval
    recall_interval: Interval
    threshold: float | None = None
    specificity: float | None = None
    average_precision: float | None = None
    roc_auc: float | None = None
    specificity_interval: Interval = (0.0, 1.0)
    average_precision_interval: Interval = (0.0, 1.0)
    roc_auc_interval: Interval = (0.0, 1.0)


class Measures(NamedTuple):
    metrics: dict[str, float]
    intervals: dict[str, Interval]
    per_class: list[ClassMetrics]


def compute_metrics(scores: Scores) -> dict[str, float]:
    """Compute the metrics of `Evaluation` by name; NaN where no image has a label that one needs.

    Averages over classes are over those that some image has; of the area under the ROC curve, over
    those that another image lacks, too. They are scikit-learn's with `labels=np.unique(y_true)` and
    `zero_division=0`. The calibration error is that of Guo et al. (2017), equation 3.
    """
    counts, means, accuracies = bin_confidence(scores)
    calibration_error = float((counts * np.abs(means - accuracies)).sum() / max(counts.sum(), 1))
    averages = _average(scores, _measure_classes(scores, slice(None)))
    rates = {name: float(values.mean()) for name, values in _list_proportions(scores).items()}
    shared = {"loss": float(scores.loss.mean()), "ece": calibration_error}
    if scores.is_multilabel:
        return {**averages, **rates, **shared}
    # with many classes, a one-hot matrix of the labels would double the memory
    squares = (scores.probabilities**2).sum(axis=1)
    # sum over classes of (p - y)², with y one at the label
    brier = float((squares - 2 * scores.label_probability + 1).mean())
    return {**rates, **averages, **shared, "brier": brier}


def _list_proportions(scores: Scores) -> dict[str, Bools]:
    """Return the metrics that are proportions of the images: name → which images count, [n]."""
    if scores.is_multilabel:
        return {"exact_match": scores.correct}
    return {"top1": scores.correct, "top5": scores.rank < 5}


def measure(
    scores: Scores,
    groups: Sequence[str] | None = None,
    class_names: Sequence[str] = (),
    *,
    is_ordered: bool = False,
) -> Measures:
    """Compute the metrics, of ordered classes and numbers also the quadratic weighted kappa (Cohen
    1968), their 95 % intervals, and a row for each class or label.

    The intervals of proportions are Clopper and Pearson's, those of averages over classes and of
    areas under curves the jackknife's. Loss, calibration error and Brier score have none. Without
    `groups` each image is its own, and without `class_names` there are no rows. Raises ValueError
    for NaN or infinity among the logits.
    """
    metrics = compute_metrics(scores)
    clusters = number_clusters(groups, len(scores))
    # each class measured on all images, and without each part of them
    parts = (slice(None), *leave_out_parts(clusters))
    tables = [_measure_classes(scores, kept) for kept in parts]
    intervals = {
        name: compute_clustered_interval(values, clusters)
        for name, values in _list_proportions(scores).items()
    }
    step = find_step(clusters, scores.labels.sum(axis=0) if scores.is_multilabel else None)
    averages = [_average(scores, table) for table in tables]
    for name in averages[0]:
        intervals[name] = bound_rate([each[name] for each in averages], step)
    # ten numbers are digits
    are_grades = 2 < len(class_names) < 10 and all(map(str.isdecimal, class_names))
    if not scores.is_multilabel and (is_ordered or are_grades):
        kappas = np.array([_compute_kappa(scores, kept) for kept in parts])
        metrics["quadratic_kappa"] = kappas[0]
        # as a rate, from 0 to 1
        low, high = bound_rate(((1 + kappas) / 2).tolist(), step)
        intervals["quadratic_kappa"] = (2 * low - 1, 2 * high - 1)
    rows = [
        _build_row(scores, place, name, clusters, tables) for place, name in enumerate(class_names)
    ]
    return Measures(metrics, intervals, rows)


def _compute_kappa(scores: Scores, kept: Bools | slice) -> float:
    """Compute the quadratic weighted kappa; NaN if all images have and get one class."""
    labels, predicted = scores.labels[kept], scores.predicted[kept]
    # mean square of the difference between any image's class and any other's prediction
    by_chance = labels.var() + predicted.var() + (labels.mean() - predicted.mean()) ** 2
    if by_chance == 0:
        return np.nan
    return float(1 - ((labels - predicted) ** 2).mean() / by_chance)


def find_known(value: float) -> float | None:
    """Return a metric as files hold it: None for one that isn't defined, whose value is NaN."""
    return None if np.isnan(value) else float(value)


def _measure_classes(scores: Scores, kept: Bools | slice) -> dict[str, Floats]:
    """Measure each class or label on the images that are kept: name → [C], NaN where it isn't
    defined. "counts" are the images that have the class, are predicted to have it, and both,
    [3, C]."""
    labels, predicted = scores.labels[kept], scores.predicted[kept]
    num_classes = scores.probabilities.shape[1]
    if scores.is_multilabel:
        masks = (labels, predicted, labels & predicted)
        counts = np.stack([mask.sum(axis=0) for mask in masks])
    else:
        # counted, because marks for each image and class would take too much memory
        columns = (labels, predicted, labels[labels == predicted])
        counts = np.stack([np.bincount(each, minlength=num_classes) for each in columns])
    support, guessed, hits = counts
    areas = np.full((2, num_classes), np.nan)
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
    does, but in a tenth of its time: the jackknife needs them 50 times for each label. NaN if no
    image has the label, and for the area if every image has it."""
    others, chosen = np.sort(probabilities[~labels]), np.sort(probabilities[labels])
    if not len(chosen):
        return np.nan, np.nan
    # images of at least the same probability, without and with the label
    alarms = len(others) - np.searchsorted(others, chosen)
    hits = len(chosen) - np.searchsorted(chosen, chosen)
    precision = float((hits / (hits + alarms)).mean())
    if not len(others):
        return precision, np.nan
    # Mann and Whitney's statistic: an equal probability counts as half below
    above = len(others) - np.searchsorted(others, chosen, "right")
    return precision, float(1 - (alarms + above).mean() / (2 * len(others)))


def _average(scores: Scores, table: dict[str, Floats]) -> dict[str, float]:
    """Return the metrics that are averages over classes or labels. See `_measure_classes`."""
    averages = {}
    for name, column in _AVERAGES[scores.is_multilabel].items():
        known = table[column][~np.isnan(table[column])]
        averages[name] = _divide(known.sum(), len(known))
    if scores.is_multilabel:
        support, guessed, hits = table["counts"].sum(axis=1).tolist()
        averages["micro_f1"] = _divide(2 * hits, support + guessed)
    return averages


def _divide(total: float, count: int) -> float:
    return float(total / count) if count else np.nan


def _build_row(
    scores: Scores,
    place: int,
    name: str,
    clusters: Ints,
    tables: Sequence[dict[str, Floats]],
) -> ClassMetrics:
    """Return the metrics of one class or label from tables of all images and without each part."""
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
        is_left = ~guessed[~has_class]
        values["threshold"] = threshold
        values["specificity"] = find_known(_divide(is_left.sum(), len(is_left)))
        values["specificity_interval"] = compute_clustered_interval(is_left, clusters[~has_class])
    return ClassMetrics(
        name,
        support,
        predicted=int(guessed.sum()),
        precision_interval=compute_clustered_interval(is_hit[guessed], clusters[guessed]),
        recall_interval=compute_clustered_interval(is_hit[has_class], clusters[has_class]),
        **values,
    )
