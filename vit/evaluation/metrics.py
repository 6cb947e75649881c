"""Metrics from logits and labels, in float64: of all images and of each class, where an image has
one class or several labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import expit

from vit.evaluation.clusters import Interval, compute_clustered_interval, number_clusters
from vit.evaluation.intervals import (
    bound_rate,
    compute_group_size,
    find_largest_error,
    leave_out_parts,
)
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
# averages over classes or labels, whose intervals are the jackknife's
_CLASS_RATES = ("macro_f1", "macro_recall")
_LABEL_RATES = ("map", "roc_auc", "macro_f1", "micro_f1")
# weights of images that are ranked at a time: this bounds the memory
_BLOCK = 1 << 22


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
    def marks(self) -> Bools:
        """Which classes or labels each image has, [n, C]."""
        return self._mark(self.labels)

    @property
    def predicted_marks(self) -> Bools:
        """Which classes or labels are predicted, [n, C]."""
        return self._mark(self.predicted)

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

    def subset(self, chosen: Bools | Ints) -> Scores:
        """Return the scores of some images."""
        names = ("labels", "predicted", "probabilities", "loss", "rank")
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in names}
        return replace(self, **columns)

    def _mark(self, values: Any) -> Bools:
        if self.is_multilabel:
            return np.asarray(values)
        return np.asarray(values[:, None] == np.arange(self.num_classes))


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
    if labels.ndim == 2:
        scaled = logits.astype(np.float64) / temperature
        _check_numbers(np.asarray(np.isnan(scaled).any(axis=1)), "NaN")
        # log(1 + exp(−z)) where the label is there, log(1 + exp(z)) where it isn't
        losses = np.minimum(np.logaddexp(0, np.where(labels, -scaled, scaled)), MAX_LOSS)
        return score_labels(expit(scaled), labels, thresholds, loss=losses.mean(axis=1))

    count, num_classes = logits.shape
    probabilities = np.empty((count, num_classes))
    columns = {name: np.empty(count, np.int64) for name in ("predicted", "rank")}
    loss = np.empty(count)
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
        predicted = chunk.argmax(axis=1)
        rank = num_classes - is_behind.sum(axis=1)
        if threshold is not None:
            predicted = threshold.decide(probabilities[rows])
            was_ahead = ~is_behind[at_label[0], predicted]
            rank = np.where(predicted == labels[rows], 0, rank + 1 - was_ahead)
        columns["predicted"][rows], columns["rank"][rows] = predicted, rank
    # the most probable of two classes is the one above a half; among more, none has a threshold
    decided = np.full(num_classes, THRESHOLD if num_classes == 2 else np.nan)
    if threshold is not None:
        decided = np.full(num_classes, np.nan)
        decided[threshold.place] = threshold.probability
    return Scores(
        labels=labels, probabilities=probabilities, loss=loss, thresholds=decided, **columns
    )


def score_labels(
    probabilities: Floats,
    labels: Bools,
    thresholds: Floats | float = THRESHOLD,
    *,
    loss: Floats | None = None,
) -> Scores:
    """Score probabilities of labels, [n, C], against the labels, [n, C].

    Args:
        probabilities, labels, thresholds: See `Scores`.
        loss: Loss of each image, [n]. None: it isn't known.
    """
    decided = np.broadcast_to(np.asarray(thresholds, dtype=np.float64), probabilities.shape[1:])
    predicted = probabilities >= decided
    # number of labels that are wrong
    rank = (predicted != labels).sum(axis=1)
    loss = np.full(len(labels), np.nan) if loss is None else loss
    return Scores(labels, predicted, probabilities, loss, rank, decided)


def _check_numbers(is_wrong: Bools, what: str) -> None:
    """Raise ValueError if the logits of some images are no numbers."""
    if is_wrong.any():
        raise ValueError(
            f"{int(is_wrong.sum()):,} of {len(is_wrong):,} images have {what} among their logits;"
            " leave them out, or compute the logits in float32"
        )


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
    rates = compute_rates(scores, np.ones((1, len(scores))))
    averages = {name: float(values[0]) for name, values in rates.items()}
    bins = bin_confidence(scores)
    gaps = [bin.count * abs(bin.confidence - bin.accuracy) for bin in bins]
    shared = {
        "loss": float(scores.loss.mean()),
        "ece": sum(gaps) / max(sum(bin.count for bin in bins), 1),
    }
    if scores.is_multilabel:
        return {**averages, "exact_match": float(scores.correct.mean()), **shared}
    squares = (scores.probabilities**2).sum(axis=1)
    return {
        "top1": float(scores.correct.mean()),
        "top5": float((scores.rank < 5).mean()),
        **averages,
        **shared,
        # sum over classes of (p - y)², with y one at the label
        "brier": float((squares - 2 * scores.label_probability + 1).mean()),
    }


def compute_rates(
    scores: Scores, weights: Floats, *, names: Sequence[str] | None = None
) -> dict[str, Floats]:
    """Compute averages over classes or labels for several weights of the images.

    Args:
        scores: Scores of n images.
        weights: Weights of the images, [k, n].
        names: The averages. None: those of `compute_metrics`.

    Returns:
        Name → [k].
    """
    names = names or (_LABEL_RATES if scores.is_multilabel else _CLASS_RATES)
    # weights of the images with the class, with the prediction, and with both, [k, C]
    if scores.is_multilabel:
        columns = (scores.labels, scores.predicted, scores.labels & scores.predicted)
        support, guessed, hits = (weights @ column.astype(np.float64) for column in columns)
    else:
        places = (scores.labels, scores.predicted, scores.labels)
        masks = (np.ones(len(scores)), np.ones(len(scores)), scores.correct)
        support, guessed, hits = (
            np.stack([np.bincount(place, row * mask, scores.num_classes) for row in weights])
            if len(weights)
            else np.zeros((0, scores.num_classes))
            for place, mask in zip(places, masks, strict=True)
        )
    has_images = support > 0
    f1 = np.where(has_images, 2 * hits / np.maximum(support + guessed, 1e-12), np.nan)
    rates = {"macro_f1": _average(f1)}
    if "macro_recall" in names:
        rates["macro_recall"] = _average(
            np.where(has_images, hits / np.maximum(support, 1e-12), np.nan)
        )
    if "micro_f1" in names:
        total = (support + guessed).sum(axis=1)
        micro = 2 * hits.sum(axis=1) / np.maximum(total, 1e-12)
        rates["micro_f1"] = np.where(total > 0, micro, np.nan)
    if "map" in names or "roc_auc" in names:
        ranked = [
            rank_label(scores.labels[:, place], scores.probabilities[:, place], weights)
            for place in range(scores.num_classes)
        ]
        for name, values in zip(("map", "roc_auc"), zip(*ranked, strict=True), strict=True):
            rates[name] = _average(np.stack(values, axis=1))
    return {name: rates[name] for name in names}


def _average(values: Floats) -> Floats:
    """Return the mean of each row without NaN; NaN for a row of nothing else."""
    known = ~np.isnan(values)
    count = known.sum(axis=1)
    sums = np.where(known, values, 0.0).sum(axis=1)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def rank_label(labels: Bools, probabilities: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Compute the average precision and the area under the ROC curve of one label, as scikit-learn
    does, but for many weights of the images at once.

    Args:
        labels: Which images have the label, [n].
        probabilities: [n].
        weights: [k, n].

    Returns:
        Both [k]; NaN where no image has the label, and for the area where every image has it.
    """
    order = np.argsort(-probabilities, kind="stable")
    ranked, is_hit = probabilities[order], labels[order]
    # the last place of each run of equal probabilities, which have no order among them
    ends = np.flatnonzero(np.append(np.diff(ranked) != 0, True))
    results: list[tuple[Floats, Floats]] = []
    rows = max(_BLOCK // len(labels), 1)
    for start in range(0, len(weights), rows):
        sorted_weights = weights[start : start + rows, order]
        hits = np.cumsum(sorted_weights * is_hit, axis=1)[:, ends]
        others = np.cumsum(sorted_weights * ~is_hit, axis=1)[:, ends]
        total, total_others = hits[:, -1], others[:, -1]
        precision = hits / np.maximum(hits + others, 1e-300)
        # trapezes: each image without the label, times the fraction of labels that rank above it
        heights = (hits + np.pad(hits, ((0, 0), (1, 0)))[:, :-1]) / 2
        area = (heights * np.diff(others, axis=1, prepend=0.0)).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            average_precision = (np.diff(hits, axis=1, prepend=0.0) * precision).sum(axis=1) / total
            roc_area = np.where(total_others > 0, area / (total * total_others), np.nan)
        results.append((average_precision, roc_area))
    if not results:
        return np.zeros(0), np.zeros(0)
    precisions, areas = (np.concatenate(parts) for parts in zip(*results, strict=True))
    return precisions, areas


def compute_intervals(scores: Scores, groups: Sequence[str] | None = None) -> dict[str, Interval]:
    """Compute the 95 % interval of each metric but the loss, the calibration error and the Brier
    score. Each interval includes its metric.

    Proportions of images have Clopper and Pearson's exact interval. Averages over classes have the
    jackknife's, see `vit.evaluation.intervals`. A bootstrap fails where there are few errors: it
    can't draw errors that are not in the test set.

    Args:
        scores: Scores of the images.
        groups: Group of each image. Images of one group, such as a burst, are not independent, and
            all intervals are wider for it. None: each image is its own group.
    """
    clusters = number_clusters(groups, len(scores))
    right = {"top1": scores.correct, "top5": scores.rank < 5}
    if scores.is_multilabel:
        right = {"exact_match": scores.correct}
    intervals = {
        name: compute_clustered_interval(values, clusters) for name, values in right.items()
    }
    metrics = compute_rates(scores, np.ones((1, len(scores))))
    left_out = compute_rates(scores, leave_out_parts(clusters))
    # one more group that is wrong; of a rare label, one more image weighs more
    step = compute_group_size(clusters) / len(scores)
    if scores.is_multilabel:
        step = max(find_largest_error(scores.labels.sum(axis=0), len(scores)), 1 / len(scores))
    for name, values in metrics.items():
        intervals[name] = bound_rate(float(values[0]), left_out[name], step)
    return intervals


def compare_precision(
    scores: Sequence[Scores], groups: Sequence[str] | None = None
) -> tuple[Floats, list[Interval], Floats]:
    """Measure the mean average precision of several predictions of the same images.

    Args:
        scores: Scores of n images by each of P predictions.
        groups: See `compute_intervals`.

    Returns:
        The precisions, [P], their 95 % intervals, and the covariance of their errors, [P, P]. Both
        are the jackknife's.
    """
    first = scores[0]
    clusters = number_clusters(groups, len(first))
    parts = leave_out_parts(clusters)
    weights = np.concatenate([np.ones((1, len(first))), parts])
    # [P, 1 + k]
    values = np.stack([compute_rates(each, weights, names=("map",))["map"] for each in scores])
    deviations = values[:, 1:] - values[:, 1:].mean(axis=1, keepdims=True)
    covariance = deviations @ deviations.T * (1 - 1 / max(len(parts), 1))
    step = 1 / len(first)
    intervals = [bound_rate(float(row[0]), row[1:], step) for row in values]
    return values[:, 0], intervals, covariance


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


def compute_per_class(
    scores: Scores, class_names: Sequence[str], groups: Sequence[str] | None = None
) -> list[ClassMetrics]:
    """Compute the metrics of every class or label of the model, also of those without an image.

    Args:
        scores: Scores of the images.
        class_names: Name of each class or label.
        groups: Group of each image, which widens the intervals. None: each is its own group.
    """
    clusters = number_clusters(groups, len(scores))
    parts = leave_out_parts(clusters)
    rows = []
    for place, name in enumerate(class_names):
        has_class, guessed = scores.labels == place, scores.predicted == place
        if scores.is_multilabel:
            has_class, guessed = scores.labels[:, place], scores.predicted[:, place]
        is_hit = has_class & guessed
        support, predicted, hits = (int(mask.sum()) for mask in (has_class, guessed, is_hit))
        curves: dict[str, Any] = {}
        if not np.isnan(scores.thresholds[place]):
            curves = _measure_curves(scores, place, has_class, clusters, parts)
        rows.append(
            ClassMetrics(
                name,
                support,
                predicted,
                precision=hits / max(predicted, 1) if support else None,
                recall=hits / support if support else None,
                f1=2 * hits / (support + predicted) if support else None,
                precision_interval=compute_clustered_interval(is_hit[guessed], clusters[guessed]),
                recall_interval=compute_clustered_interval(is_hit[has_class], clusters[has_class]),
                **curves,
            )
        )
    return rows


def _measure_curves(
    scores: Scores, place: int, has_class: Bools, clusters: Ints, parts: Floats
) -> dict[str, Any]:
    """Return the fields of `ClassMetrics` that one class against the rest has."""
    probabilities = scores.probabilities[:, place]
    # one more image at the wrong place
    num_rarer = min(int(has_class.sum()), int((~has_class).sum()))
    step = 1 / max(num_rarer, 1)
    weights = np.concatenate([np.ones((1, len(scores))), parts])
    found: dict[str, Any] = {}
    ranked = rank_label(has_class, probabilities, weights)
    for name, (value, *left_out) in zip(("average_precision", "roc_auc"), ranked, strict=True):
        found[name] = None if np.isnan(value) else float(value)
        found[f"{name}_interval"] = bound_rate(float(value), np.array(left_out), step)
    found["thresholds"] = measure_thresholds(
        probabilities, has_class, clusters, threshold=float(scores.thresholds[place])
    )
    return found


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
