"""Two models on the same images: what differs, and how sure is that."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import binomtest, chi2

from vit.evaluate.intervals import LEVEL, RESAMPLES, draw_weights
from vit.evaluate.record import (
    EVALUATION_FILE,
    PREDICTIONS_FILE,
    Evaluation,
    Predictions,
    load_evaluation,
    load_predictions,
)

_EXACT_UP_TO = 1000  # discordant images; above, the chi-square form agrees to three digits


@dataclass(frozen=True)
class Arm:
    """One evaluation to compare."""

    name: str
    evaluation: Evaluation
    predictions: Predictions


@dataclass(frozen=True)
class Pair:
    """B against A on the same images."""

    difference: float  # top-1 of B minus top-1 of A
    interval: tuple[float, float]  # 95 %, paired bootstrap
    p_value: float  # McNemar's test
    only_a: list[int]  # indices of images that A alone gets right
    only_b: list[int]


def load_arms(directories: list[Path]) -> list[Arm]:
    """Read evaluations. Raises ValueError where there are fewer than two or their images differ."""
    if len(directories) < 2:
        raise ValueError("vit compare needs two or more evaluations")
    arms = [
        Arm(
            name=str(directory),
            evaluation=load_evaluation(directory / EVALUATION_FILE),
            predictions=load_predictions(directory / PREDICTIONS_FILE),
        )
        for directory in directories
    ]
    first = arms[0].evaluation
    for arm in arms[1:]:
        if arm.evaluation.fingerprint != first.fingerprint:
            raise ValueError(
                f"{arms[0].name} and {arm.name} were evaluated on different images "
                f"({first.data} {first.split} {first.fingerprint[:12]}, {arm.evaluation.data} "
                f"{arm.evaluation.split} {arm.evaluation.fingerprint[:12]}); evaluate both on the same"
            )
    return arms


def compare_pair(a: Arm, b: Arm, *, resamples: int = RESAMPLES, seed: int = 0) -> Pair:
    """Compare B with A image by image."""
    correct_a, correct_b = a.predictions.rank == 0, b.predictions.rank == 0
    change = correct_b.astype(np.float64) - correct_a
    generator = np.random.default_rng(seed)
    draws = [draw_weights(len(change), generator) @ change / len(change) for _ in range(resamples)]
    low, high = np.quantile(draws, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    only_a, only_b = np.flatnonzero(change < 0), np.flatnonzero(change > 0)
    return Pair(
        difference=float(change.mean()),
        interval=(float(low), float(high)),
        p_value=compute_mcnemar(len(only_a), len(only_b)),
        only_a=only_a.tolist(),
        only_b=only_b.tolist(),
    )


def compute_mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p-value of McNemar's test (1947) that both models err equally often.

    Exact binomial up to 1,000 discordant images, chi-square with Edwards' continuity correction above.
    """
    discordant = only_a + only_b
    if discordant == 0:
        return 1.0
    if discordant <= _EXACT_UP_TO:
        return float(binomtest(only_a, discordant).pvalue)
    return float(chi2.sf(max(abs(only_a - only_b) - 1, 0) ** 2 / discordant, df=1))
