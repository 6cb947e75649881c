"""Precision, recall and F1 of each class."""

from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from vit.evaluation.metrics import Scores
from vit.prediction.probabilities import Ints


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class, 0 to 1, with 95 % intervals.

    Attributes:
        support: Number of images with this label.
        predicted: Number of images predicted as this class.
    """

    name: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int
    precision_interval: tuple[float, float]
    recall_interval: tuple[float, float]


def compute_per_class(scores: Scores, class_names: tuple[str, ...]) -> list[ClassMetrics]:
    """Compute the metrics of every class of the model, including classes without an image."""
    # a second to import
    from sklearn.metrics import precision_recall_fscore_support

    *fractions, _ = precision_recall_fscore_support(
        scores.labels, scores.predicted, labels=range(scores.num_classes), zero_division=0
    )
    # scikit-learn returns floats if no image is predicted correctly
    support = np.bincount(scores.labels, minlength=scores.num_classes)
    predicted = np.bincount(scores.predicted, minlength=scores.num_classes)
    correct = np.bincount(scores.labels[scores.correct], minlength=scores.num_classes)
    # precision is a proportion of the predicted images, recall of the labelled ones
    rows = zip(
        class_names,
        *(column.tolist() for column in (*fractions, support, predicted)),
        zip(*compute_proportion_interval(correct, predicted), strict=True),
        zip(*compute_proportion_interval(correct, support), strict=True),
        strict=True,
    )
    return [ClassMetrics(*row) for row in rows]


def compute_proportion_interval(successes: Ints, counts: Ints) -> tuple[list[float], list[float]]:
    """Compute exact 95 % intervals of proportions (Clopper & Pearson 1934).

    Whatever the true proportion, at least 95 % of samples have an interval that includes it.

    Args:
        successes: Successes in each sample, [k].
        counts: Sizes of the samples, [k]; for 0 the interval is 0…1.

    Returns:
        The lower and the upper ends, k each.
    """
    tail = (1 - 0.95) / 2
    failures = counts - successes
    # the quantile is defined only for positive parameters
    low = betaincinv(np.maximum(successes, 1), failures + 1, tail)
    high = betaincinv(successes + 1, np.maximum(failures, 1), 1 - tail)
    return (
        np.where(successes > 0, low, 0.0).tolist(),
        np.where(failures > 0, high, 1.0).tolist(),
    )
