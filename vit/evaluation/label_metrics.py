"""Metrics of a model whose images may have several labels: average precision, area under the ROC
curve and F1 of each label, and their averages, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, stdtrit

from vit.evaluation.clusters import TAIL, Interval, compute_clustered_interval, number_clusters
from vit.evaluation.intervals import bound_sum
from vit.evaluation.metrics import MAX_LOSS, NUM_BINS, find_bins
from vit.evaluation.thresholds import ThresholdRates, measure_thresholds
from vit.prediction.decision import THRESHOLD
from vit.prediction.probabilities import Bools, Float32s, Floats, Ints

# Parts of the images, of whole groups, that are left out in turn for the variance of a metric.
_NUM_PARTS = 50
# metrics whose errors add up over the images
_RATES = ("map", "map_micro", "roc_auc", "macro_f1", "micro_f1", "image_f1")


@dataclass(frozen=True, eq=False)
class LabelScores:
    """Contribution of each of n images to the metrics of C labels.

    Attributes:
        labels: Which labels each image has, [n, C].
        probabilities: Probability of each label, [n, C].
        loss: Binary cross-entropy, mean over the labels, nats, [n].
        thresholds: Probability from which a label is predicted, of each, [C], or of all.
    """

    labels: Bools
    probabilities: Floats
    loss: Floats
    thresholds: Floats | float = THRESHOLD

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def predicted(self) -> Bools:
        """The labels that are predicted, [n, C]."""
        return np.greater_equal(self.probabilities, self.thresholds)

    @property
    def correct(self) -> Bools:
        """True for an image of which all labels are right, [n]."""
        correct: Bools = (self.predicted == self.labels).all(axis=1)
        return correct

    @property
    def label_probability(self) -> Floats:
        """Probability of the least probable label that each image has, 1 without labels, [n]."""
        probability: Floats = np.where(self.labels, self.probabilities, 1.0).min(axis=1)
        return probability

    def subset(self, chosen: Bools | Ints) -> LabelScores:
        """Return the scores of some images."""
        return replace(
            self,
            labels=self.labels[chosen],
            probabilities=self.probabilities[chosen],
            loss=self.loss[chosen],
        )


def score_label_logits(
    logits: Float32s,
    labels: Bools,
    *,
    temperature: float = 1.0,
    thresholds: Floats | float = THRESHOLD,
) -> LabelScores:
    """Score logits against labels.

    Args:
        logits: [n, C].
        labels: Which labels each image has, [n, C].
        temperature: Probabilities are sigmoid(logits / temperature).
        thresholds: See `LabelScores`.

    Raises:
        ValueError: The logits hold NaN.
    """
    scaled = logits.astype(np.float64) / temperature
    num_wrong = int(np.isnan(scaled).any(axis=1).sum())
    if num_wrong:
        raise ValueError(
            f"{num_wrong:,} of {len(logits):,} images have NaN among their logits; leave them out, or"
            " compute the logits in float32"
        )
    # log(1 + exp(−z)) where the label is there, log(1 + exp(z)) where it isn't
    losses = np.minimum(np.logaddexp(0, np.where(labels, -scaled, scaled)), MAX_LOSS)
    return LabelScores(labels, expit(scaled), losses.mean(axis=1), thresholds)


def compute_label_metrics(scores: LabelScores) -> dict[str, float]:
    """Compute the metrics by name.

    Macro averages are over the labels that some image has; of the area under the ROC curve, over
    those that some image has and another one lacks. An image without a label that gets none counts
    as right. Metrics without such labels are NaN.
    """
    rates = compute_rates(scores, np.ones((1, len(scores))))
    return {
        **{name: float(values[0]) for name, values in rates.items()},
        "exact_match": float(scores.correct.mean()),
        "loss": float(scores.loss.mean()),
        "ece": compute_label_ece(scores),
    }


def compute_label_ece(scores: LabelScores) -> float:
    """Compute the calibration error of all labels together: |mean probability − frequency| in 15
    bins of equal width, weighted by their numbers of pairs of image and label."""
    bins = find_bins(scores.probabilities.ravel())
    gaps = (scores.probabilities - scores.labels).ravel()
    sums = np.bincount(bins, gaps, minlength=NUM_BINS)
    return float(np.abs(sums).sum() / gaps.size)


def compute_rates(
    scores: LabelScores, weights: Floats, *, names: Sequence[str] = _RATES
) -> dict[str, Floats]:
    """Compute metrics for several weights of the images.

    Args:
        scores: Scores of n images.
        weights: Weights of the images, [k, n].
        names: The metrics. That of all pairs of image and label together takes the longest.

    Returns:
        Name → [k].
    """
    labels, predicted = scores.labels, scores.predicted
    num_labels = labels.shape[1]
    precisions, areas = (np.full((len(weights), num_labels), np.nan) for _ in range(2))
    for place in range(num_labels):
        precisions[:, place], areas[:, place] = _rank(
            labels[:, place], scores.probabilities[:, place], weights
        )
    # numbers of images with the label, with the prediction, and with both, [k, C]
    support, guessed, hits = (
        weights @ columns.astype(np.float64) for columns in (labels, predicted, labels & predicted)
    )
    f1 = np.where(support > 0, 2 * hits / np.maximum(support + guessed, 1e-12), np.nan)
    total = support.sum(axis=1) + guessed.sum(axis=1)
    # F1 of each image, [n]
    num_both = labels.sum(axis=1) + predicted.sum(axis=1)
    num_hits = (labels & predicted).sum(axis=1)
    image_f1 = np.where(num_both > 0, 2 * num_hits / np.maximum(num_both, 1), 1.0)
    rates = {
        "map": _average(precisions),
        "roc_auc": _average(areas),
        "macro_f1": _average(f1),
        "micro_f1": np.where(total > 0, 2 * hits.sum(axis=1) / np.maximum(total, 1e-12), np.nan),
        "image_f1": weights @ image_f1 / weights.sum(axis=1),
    }
    if "map_micro" in names:
        marks, probabilities = labels.ravel(), scores.probabilities.ravel()
        # one row at a time, because all pairs of image and label take much memory
        pairs = (np.repeat(row, num_labels)[None] for row in weights)
        rates["map_micro"] = np.array([_rank(marks, probabilities, each)[0][0] for each in pairs])
    return {name: rates[name] for name in names}


def _average(values: Floats) -> Floats:
    """Return the mean of each row without NaN; NaN for a row of nothing else."""
    known = ~np.isnan(values)
    count = known.sum(axis=1)
    sums = np.where(known, values, 0.0).sum(axis=1)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def _rank(labels: Bools, probabilities: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Compute the average precision and the area under the ROC curve of one label, as scikit-learn
    does, for several weights of the images.

    Args:
        labels: Which images have the label, [n].
        probabilities: [n].
        weights: [k, n].

    Returns:
        Both [k]; NaN where no image has the label, and for the area where every image has it.
    """
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order]
    # the last place of each run of equal probabilities, which have no order among them
    ends = np.flatnonzero(np.append(np.diff(ranked) != 0, True))
    sorted_weights = weights[:, order]
    hits = np.cumsum(sorted_weights * labels[order], axis=1)[:, ends]
    others = np.cumsum(sorted_weights * ~labels[order], axis=1)[:, ends]
    gained = np.diff(hits, axis=1, prepend=0.0)
    total, total_others = hits[:, -1], others[:, -1]
    precision = hits / np.maximum(hits + others, 1e-300)
    # trapezes: each image without the label, times the fraction of labels that rank above it
    heights = (hits + np.pad(hits, ((0, 0), (1, 0)))[:, :-1]) / 2
    area = (heights * np.diff(others, axis=1, prepend=0.0)).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        average_precision = (gained * precision).sum(axis=1) / total
        roc_area = area / (total * total_others)
    return average_precision, np.where(total_others > 0, roc_area, np.nan)


@dataclass(frozen=True)
class LabelMetrics:
    """Metrics of one label, 0 to 1. Those that need an image with the label are None without one.

    Attributes:
        average_precision: Average precision.
        roc_auc: Area under the ROC curve; None also if every image has the label.
        precision, recall, f1: At the threshold of the probability.
        support: Number of images that have the label.
        predicted: Number of images that are predicted to have it.
        average_precision_interval, roc_auc_interval, precision_interval, recall_interval: 95 %
            intervals.
        thresholds: Rates at the threshold, and at those with a given sensitivity or specificity.
    """

    name: str
    average_precision: float | None
    roc_auc: float | None
    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    predicted: int
    average_precision_interval: Interval
    roc_auc_interval: Interval
    precision_interval: Interval
    recall_interval: Interval
    thresholds: list[ThresholdRates] = field(default_factory=list)


def compute_per_label(
    scores: LabelScores, class_names: Sequence[str], groups: Sequence[str] | None = None
) -> list[LabelMetrics]:
    """Compute the metrics of every label.

    Args:
        scores: Scores of the images.
        class_names: Name of each label.
        groups: Group of each image, which widens the intervals. None: each is its own group.
    """
    clusters = number_clusters(groups, len(scores))
    whole = np.ones((1, len(scores)))
    parts = leave_out_parts(clusters)
    thresholds = np.broadcast_to(scores.thresholds, len(class_names)).tolist()
    rows = []
    for place, name in enumerate(class_names):
        has_label, guessed = scores.labels[:, place], scores.predicted[:, place]
        is_hit = has_label & guessed
        support, predicted, hits = (int(mask.sum()) for mask in (has_label, guessed, is_hit))
        ranked = _rank(has_label, scores.probabilities[:, place], whole)
        left_out = _rank(has_label, scores.probabilities[:, place], parts)
        # one more image at the wrong place
        step = 1 / max(min(support, len(scores) - support), 1)
        average_precision, roc_auc = (
            None if np.isnan(value[0]) else float(value[0]) for value in ranked
        )
        precision = recall = f1 = None
        if support:
            precision = hits / max(predicted, 1)
            recall = hits / support
            f1 = 2 * hits / (support + predicted)
        rows.append(
            LabelMetrics(
                name,
                average_precision,
                roc_auc,
                precision,
                recall,
                f1,
                support=support,
                predicted=predicted,
                average_precision_interval=_bound_rate(average_precision, left_out[0], step),
                roc_auc_interval=_bound_rate(roc_auc, left_out[1], step),
                precision_interval=compute_clustered_interval(is_hit[guessed], clusters[guessed]),
                recall_interval=compute_clustered_interval(is_hit[has_label], clusters[has_label]),
                thresholds=measure_thresholds(
                    scores.probabilities[:, place],
                    has_label,
                    clusters,
                    threshold=thresholds[place],
                ),
            )
        )
    return rows


def compute_label_intervals(
    scores: LabelScores, groups: Sequence[str] | None = None
) -> dict[str, Interval]:
    """Compute the 95 % interval of each metric but the calibration error.

    The variance is the jackknife's, over parts of the images that are left out in turn; a part has
    whole groups. One minus the metric then has a gamma interval, as other sums of errors have, see
    `vit.evaluation.intervals`.

    Args:
        scores: Scores of the images.
        groups: Group of each image. None: each is its own group.
    """
    clusters = number_clusters(groups, len(scores))
    metrics = compute_label_metrics(scores)
    left_out = compute_rates(scores, leave_out_parts(clusters))
    step = max(find_largest_error(scores.labels), 1 / len(scores))
    intervals = {name: _bound_rate(metrics[name], left_out[name], step) for name in _RATES}
    intervals["exact_match"] = compute_clustered_interval(scores.correct, clusters)
    parts = leave_out_parts(clusters)
    losses = parts @ scores.loss / parts.sum(axis=1)
    largest = max(float(scores.loss.max()), 1e-12) / len(scores)
    intervals["loss"] = _bound_total(metrics["loss"], losses, largest)
    return intervals


def find_largest_error(labels: Bools) -> float:
    """Return how much one more error counts in a mean over the labels at most.

    Args:
        labels: Which labels each image has, [n, C].
    """
    counts = labels.sum(axis=0)
    counts = np.minimum(counts, len(labels) - counts)
    counts = counts[counts > 0]
    if not len(counts):
        return 1.0
    return float((1 / counts).mean() / len(counts))


def bound_mean(values: Floats, groups: Sequence[str] | None = None) -> Interval:
    """Compute the 95 % interval of a mean of values from 0 to 1.

    Args:
        values: One for each image, [n].
        groups: Group of each image. None: each is its own group.
    """
    parts = leave_out_parts(number_clusters(groups, len(values)))
    left_out = parts @ values / parts.sum(axis=1)
    return _bound_rate(float(values.mean()), left_out, 1 / len(values))


def compare_precision(
    scores: Sequence[LabelScores], groups: Sequence[str] | None = None
) -> tuple[Floats, list[Interval], Floats]:
    """Measure the mean average precision of several predictions of the same images.

    Args:
        scores: Scores of n images by each of P predictions.
        groups: See `compute_label_intervals`.

    Returns:
        The precisions, [P], their 95 % intervals, and the covariance of their errors, [P, P]. Both
        are the jackknife's. See `compute_label_intervals`.
    """
    first = scores[0]
    parts = leave_out_parts(number_clusters(groups, len(first)))
    weights = np.concatenate([np.ones((1, len(first))), parts])
    # [P, 1 + k]
    values = np.stack([compute_rates(each, weights, names=("map",))["map"] for each in scores])
    deviations = values[:, 1:] - values[:, 1:].mean(axis=1, keepdims=True)
    covariance = deviations @ deviations.T * (1 - 1 / max(len(parts), 1))
    step = 1 / len(first)
    intervals = [_bound_rate(float(row[0]), row[1:], step) for row in values]
    return values[:, 0], intervals, covariance


def leave_out_parts(clusters: Ints) -> NDArray[np.float64]:
    """Return weights that leave out parts of the images in turn, [k, n]. A part has whole groups, at
    random; of a single group there are none."""
    numbers = np.unique(clusters, return_inverse=True)[1].reshape(-1)
    num_clusters = int(numbers.max()) + 1
    if num_clusters == 1:
        return np.zeros((0, len(clusters)))
    num_parts = min(num_clusters, _NUM_PARTS)
    part_of = np.random.default_rng(0).permutation(num_clusters) % num_parts
    weights: NDArray[np.float64] = (np.arange(num_parts)[:, None] != part_of[numbers][None]).astype(
        np.float64
    )
    return weights


def _bound_rate(value: float | None, left_out: Floats, step: float) -> Interval:
    """Compute the interval of a metric from 0 to 1, whose errors add up.

    Args:
        value: The metric; None or NaN: nothing is known.
        left_out: The metric without each part of the images; NaN where it isn't defined.
        step: Change of the metric by one more error.
    """
    if value is None or np.isnan(value):
        return 0.0, 1.0
    # without any success, the jackknife knows nothing about the errors
    if value == 0:
        return 0.0, min(_bound_total(0.0, left_out, step)[1], 1.0)
    low, high = _bound_total(1 - value, 1 - left_out, step)
    return max(1 - high, 0.0), 1 - low


def _bound_total(value: float, left_out: Floats, step: float) -> Interval:
    """Compute the interval of a sum of errors. See `_bound_rate`."""
    known = left_out[~np.isnan(left_out)]
    # a single image or group doesn't tell its variance: it counts as two that differ by the value
    count = max(len(known), 2)
    variance = value**2
    if len(known) > 1:
        variance = (count - 1) / count * float(((known - known.mean()) ** 2).sum())
    # the variance of few parts is itself uncertain
    factor = float(stdtrit(count - 1, 1 - TAIL) / stdtrit(1e6, 1 - TAIL))
    low, high = bound_sum(value, variance=variance * factor**2, step=step)
    return min(low, value), max(high, value)
