"""Coverage and size of a model's prediction sets."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.bundle import Bundle
from vit.prediction.conformal import LEVELS, read_threshold
from vit.prediction.probabilities import Ints, chunk_rows, compute_log_probabilities


@dataclass(frozen=True)
class SetMetrics:
    """Prediction sets on labelled images.

    Attributes:
        coverage: Fraction of the sets that should include the label.
        num_images: Number of validation images that the threshold is from.
        measured: Fraction of the sets that include the label.
        single: Fraction of the sets that have one class.
        single_correct: Fraction of these that are correct; null if there are none.
        mean_size: Mean number of classes.
    """

    coverage: float
    num_images: int
    measured: float
    single: float
    single_correct: float | None
    mean_size: float


def measure_sets(
    bundle: Bundle, logits: NDArray[np.float32], labels: Ints
) -> list[SetMetrics] | None:
    """Measure a model's prediction sets for each coverage; None if its file holds no threshold.

    Args:
        bundle: The model.
        logits: [n, C].
        labels: [n].
    """
    measured = []
    for coverage in LEVELS:
        threshold = read_threshold(bundle.metadata, coverage)
        if threshold is None:
            continue
        sizes = []
        holds = []
        for rows in chunk_rows(logits):
            in_set = np.exp(compute_log_probabilities(logits[rows], 1.0)) >= threshold
            sizes.append(in_set.sum(axis=1))
            holds.append(in_set[np.arange(len(in_set)), labels[rows]])
        size = np.concatenate(sizes)
        is_right = np.concatenate(holds)
        is_single = size == 1
        single_correct = None
        if is_single.any():
            single_correct = float(is_right[is_single].mean())
        measured.append(
            SetMetrics(
                coverage=coverage,
                num_images=bundle.metadata["conformal"]["num_images"],
                measured=float(is_right.mean()),
                single=float(is_single.mean()),
                single_correct=single_correct,
                mean_size=float(size.mean()),
            )
        )
    return measured or None
