"""Curves of one label or one class against the rest: sensitivity, specificity and precision at each
threshold of its probability."""

from dataclasses import dataclass

import numpy as np

from vit.evaluation.clusters import (
    Interval,
    compute_clustered_interval,
    compute_design_effect,
    compute_proportion_interval,
)
from vit.prediction.probabilities import Bools, Floats, Ints

# the rates at which the other one is given
LEVELS = (0.9, 0.95)
_NUM_POINTS = 200

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Errors:
    """Errors at each threshold that makes a difference, the lowest first.

    Attributes:
        thresholds: Halfway between two neighbouring probabilities, [k].
        missed: Images with the label below it, [k].
        alarms: Images without the label from it on, [k].
        num_positive, num_negative: Images with and without the label.
    """

    thresholds: Floats
    missed: Floats
    alarms: Floats
    num_positive: int
    num_negative: int


@dataclass(frozen=True)
class Curve:
    """The points of both curves, at most 200 each.

    Attributes:
        roc: False-positive rate and sensitivity, from (0, 0) to (1, 1).
        precision_recall: Recall and precision, from the highest probability down.
    """

    roc: Points
    precision_recall: Points


@dataclass(frozen=True)
class ThresholdRates:
    """Sensitivity and specificity at one threshold, 0 to 1, with 95 % intervals.

    Attributes:
        rule: How the threshold is chosen, as `vit evaluate --operating-point` takes it; empty for
            the one that decides what is predicted.
        sensitivity_interval, specificity_interval: None for the rate that the rule sets on these
            images.
    """

    rule: str
    threshold: float
    sensitivity: float
    specificity: float
    sensitivity_interval: Interval | None
    specificity_interval: Interval | None


def count_errors(probabilities: Floats, is_positive: Bools) -> Errors:
    """Count the errors at each threshold of a probability.

    Args:
        probabilities: [n]. NaN counts as 0.
        is_positive: Which images have the label, [n].
    """
    values, places = np.unique(np.nan_to_num(probabilities), return_inverse=True)
    lower, upper = np.concatenate([[0.0], values]), np.append(values, 1.0)
    middle = (lower + upper) / 2
    # there may be no number between two neighbours
    thresholds = np.where(middle > lower, middle, upper)
    missed = np.append(0.0, np.cumsum(np.bincount(places, is_positive)))
    alarms = np.append(0.0, np.cumsum(np.bincount(places, ~is_positive)))
    num_positive, num_negative = int(missed[-1]), int(alarms[-1])
    # no threshold excludes an image of 100 %
    count = len(thresholds) - int(values[-1] >= 1)
    return Errors(
        thresholds[:count],
        missed[:count],
        num_negative - alarms[:count],
        num_positive,
        num_negative,
    )


def compute_curve(probabilities: Floats, is_positive: Bools) -> Curve | None:
    """Compute the ROC and the precision-recall curve of one label, as scikit-learn does; None unless
    some images have it and others don't.

    Args:
        probabilities: Probability of the label, [n].
        is_positive: Which images have it, [n].
    """
    errors = count_errors(probabilities, is_positive)
    if not errors.num_positive or not errors.num_negative:
        return None
    # from the highest threshold down
    hits = errors.num_positive - errors.missed[::-1]
    alarms = errors.alarms[::-1]
    rates, recall = alarms / errors.num_negative, hits / errors.num_positive
    if hits[0] + alarms[0] > 0:
        rates, recall = np.append(0.0, rates), np.append(0.0, recall)
    precision = hits / np.maximum(hits + alarms, 1)
    is_predicted = hits + alarms > 0
    return Curve(
        _thin(rates, recall), _thin(recall[-len(hits) :][is_predicted], precision[is_predicted])
    )


def _thin(x: Floats, y: Floats) -> Points:
    """Return points of a curve that lie evenly along it, with both ends."""
    length = np.append(0.0, np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y))))
    if len(x) > _NUM_POINTS:
        wanted = np.linspace(0, length[-1], _NUM_POINTS)
        chosen = np.unique(np.searchsorted(length, wanted).clip(max=len(x) - 1))
        x, y = x[chosen], y[chosen]
    return list(zip(x.tolist(), y.tolist(), strict=True))


def measure_thresholds(
    probabilities: Floats, is_positive: Bools, clusters: Ints, *, threshold: float
) -> list[ThresholdRates]:
    """Measure one label at its threshold, and at those with a sensitivity or specificity of 90 and
    95 %; nothing unless some images have it and others don't.

    The interval of a sensitivity at a given specificity combines two, by the distances of their
    ends from the estimate (MOVER; Zou & Donner 2008): that of the sensitivity at this threshold,
    and that of the threshold, which is itself from a sample.

    Args:
        probabilities: Probability of the label, [n].
        is_positive: Which images have it, [n].
        clusters: Number of each image's group, [n].
        threshold: Probability from which the label is predicted.
    """
    errors = count_errors(probabilities, is_positive)
    if not errors.num_positive or not errors.num_negative:
        return []
    is_found = probabilities >= threshold
    found, left = is_found[is_positive], ~is_found[~is_positive]
    rows = [
        ThresholdRates(
            "",
            threshold,
            float(found.mean()),
            float(left.mean()),
            compute_clustered_interval(found, clusters[is_positive]),
            compute_clustered_interval(left, clusters[~is_positive]),
        )
    ]
    for name in ("specificity", "sensitivity"):
        for level in LEVELS:
            place = _find_threshold(errors, name, level)
            if place is None:
                continue
            rates = (
                1 - float(errors.missed[place]) / errors.num_positive,
                1 - float(errors.alarms[place]) / errors.num_negative,
            )
            is_right = (probabilities >= errors.thresholds[place]) == is_positive
            interval = _bound_other_rate(
                errors, name, level, is_right=is_right, is_positive=is_positive, clusters=clusters
            )
            # the rate that the rule sets has none
            intervals: tuple[Interval | None, Interval | None] = (interval, None)
            if name == "sensitivity":
                intervals = (None, interval)
            threshold = float(errors.thresholds[place])
            rows.append(ThresholdRates(f"{name}={level}", threshold, *rates, *intervals))
    return rows


def _find_threshold(errors: Errors, name: str, level: float) -> int | None:
    """Return the place of the threshold with the best other rate; None where none reaches the
    level."""
    if name == "sensitivity":
        allowed = round((1 - level) * errors.num_positive, 9)
        return int(np.searchsorted(errors.missed, allowed, side="right")) - 1
    allowed = round((1 - level) * errors.num_negative, 9)
    reached = errors.alarms <= allowed
    return int(reached.argmax()) if reached.any() else None


def _bound_other_rate(
    errors: Errors, name: str, level: float, *, is_right: Bools, is_positive: Bools, clusters: Ints
) -> Interval:
    """Compute the interval of the specificity at a given sensitivity, or the other way round.

    Args:
        errors: Errors at each threshold.
        name: The given rate.
        level: Its value.
        is_right: Which images are on the right side of the threshold, [n].
        is_positive: Which images have the label, [n].
        clusters: Number of each image's group, [n].
    """
    is_given = is_positive if name == "sensitivity" else ~is_positive
    other = is_right[~is_given]
    rate = float(other.mean())
    low, high = compute_clustered_interval(other, clusters[~is_given])
    # levels that the true threshold may have on these images
    given = is_right[is_given]
    count = len(given) / compute_design_effect(given - given.mean(), clusters[is_given], given)
    lowest, highest = compute_proportion_interval(level * count, count)

    def measure(reached: float) -> float:
        place = _find_threshold(errors, name, reached)
        assert place is not None, "a lower level is reached, too"
        if name == "sensitivity":
            return 1 - float(errors.alarms[place]) / errors.num_negative
        return 1 - float(errors.missed[place]) / errors.num_positive

    worst = 0.0
    # beyond the outermost of these images nothing is known
    if (1 - highest) * len(given) >= 0.5:
        worst = min(measure(highest), rate)
    best = max(measure(lowest), rate)
    return (
        max(rate - float(np.hypot(rate - low, rate - worst)), 0.0),
        min(rate + float(np.hypot(high - rate, best - rate)), 1.0),
    )
