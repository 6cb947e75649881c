"""Precision, recall and F1 of each class."""

from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from vit.evaluation.metrics import Scores
from vit.prediction.probabilities import Ints


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
