"""Differences between models whose images may have several labels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit.evaluation.clusters import Interval
from vit.evaluation.label_metrics import (
    LabelMetrics,
    LabelScores,
    compute_rates,
    find_largest_error,
    leave_out_parts,
)
from vit.evaluation.significance import (
    SIGNIFICANCE,
    Outcome,
    compare_by_t,
    compare_models,
    compare_seeds,
)
from vit.prediction.probabilities import Floats, Ints

# the first one is tested
_RATES = ("map", "macro_f1", "micro_f1")


@dataclass(frozen=True)
class MetricDifference:
    """A metric of two models on the same images.

    Attributes:
        metric: Name of the metric.
        value_a, value_b: The metric, mean over the seeds.
        interval: 95 % interval of B minus A.
    """

    metric: str
    value_a: float
    value_b: float
    interval: Interval


@dataclass(frozen=True)
class LabelChange:
    """A label whose average precision differs."""

    name: str
    average_precision_a: float
    average_precision_b: float
    support: int


def compare_labels(
    a: Sequence[LabelScores],
    b: Sequence[LabelScores],
    clusters: Ints,
    *,
    significance: float = SIGNIFICANCE,
) -> tuple[Outcome, list[MetricDifference]]:
    """Compare two recipes by their mean average precision.

    The variance of the difference between images is the jackknife's over parts that are left out of
    both, as in `vit.evaluation.label_metrics`; with several seeds, that between the seeds is added.
    Student's t with Satterthwaite's degrees of freedom gives the intervals and the p-value.

    Args:
        a: Scores of each seed of A.
        b: Scores of each seed of B, on the same images.
        clusters: Number of each image's group, [n].
        significance: See `vit.evaluation.significance.compare_seeds`.

    Returns:
        What `compare_seeds` returns, of the mean average precision; and each metric.
    """
    labels = a[0].labels
    weights = np.concatenate([np.ones((1, len(labels))), leave_out_parts(clusters)])
    # [seeds, 1 + parts] of each metric: of all images, then without each part
    rates_a, rates_b = (
        [compute_rates(scores, weights, names=_RATES) for scores in recipe] for recipe in (a, b)
    )
    step = find_largest_error(labels)
    differences = []
    outcomes = []
    for name in _RATES:
        values_a, values_b = (
            np.array([rates[name] for rates in recipe]) for recipe in (rates_a, rates_b)
        )
        outcome = _compare_values(values_a, values_b, step, significance)
        outcomes.append(outcome)
        mean_a, mean_b = (float(values[:, 0].mean()) for values in (values_a, values_b))
        differences.append(MetricDifference(name, mean_a, mean_b, outcome[1]))

    correct_a, correct_b = (
        np.array([scores.correct for scores in recipe], float) for recipe in (a, b)
    )
    if len(a) == len(b) == 1:
        _, interval, _ = compare_models((correct_b - correct_a)[0], clusters)
    else:
        _, interval, _ = compare_seeds(correct_a, correct_b, clusters)
    exact = MetricDifference(
        "exact_match", float(correct_a.mean()), float(correct_b.mean()), interval
    )
    return outcomes[0], [*differences, exact]


def _compare_values(
    values_a: Floats, values_b: Floats, step: float, significance: float
) -> Outcome:
    """Compare a metric of two recipes. See `compare_labels`.

    Args:
        values_a: The metric of each seed of A on all images, then without each part, [seeds, 1 + k].
        values_b: The same of B.
        step: Change of the metric by one more error.
    """
    difference, *left_out = values_b.mean(axis=0) - values_a.mean(axis=0)
    # a metric may not be defined without some part
    known = np.array(left_out)[~np.isnan(left_out)]
    count = len(known)
    if count < 2:
        return 1.0, (-1.0, 1.0), 1.0
    between_images = (count - 1) / count * float(((known - known.mean()) ** 2).sum()) + step**2
    # (variance of the difference, its degrees of freedom)
    terms = [(between_images, count - 1)]
    has_single_seed = 1 in (len(values_a), len(values_b))
    for values in (values_a, values_b):
        if len(values) > 1:
            # a recipe with one seed is assumed to vary like the other
            share = 1 / len(values) + has_single_seed
            terms.append((share * float(values[:, 0].var(ddof=1)), len(values) - 1))
    return compare_by_t(float(difference), terms, significance)


def find_label_changes(
    a: Sequence[Sequence[LabelMetrics]], b: Sequence[Sequence[LabelMetrics]]
) -> list[LabelChange]:
    """Find the labels whose average precision differs, the largest change first.

    Args:
        a: Metrics of every label, for each seed of A.
        b: The same of B.
    """
    changes = []
    for rows_a, rows_b in zip(zip(*a, strict=True), zip(*b, strict=True), strict=True):
        name, support = rows_a[0].name, rows_a[0].support
        # without images that have the label it is not defined
        if support:
            mean_a, mean_b = (
                float(np.mean([row.average_precision for row in rows])) for rows in (rows_a, rows_b)
            )
            changes.append(LabelChange(name, mean_a, mean_b, support))
    changes.sort(key=lambda row: -abs(row.average_precision_b - row.average_precision_a))
    return [row for row in changes if row.average_precision_a != row.average_precision_b]
