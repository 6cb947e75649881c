"""Models on the same images: what differs, and how sure is that."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, chi2

from vit.evaluation.intervals import LEVEL, RESAMPLES, draw_weights
from vit.evaluation.metrics import Floats
from vit.evaluation.result import (
    EVALUATION_FILE,
    PREDICTIONS_FILE,
    Evaluation,
    Predictions,
    load_evaluation,
    load_predictions,
)
from vit.runtime.files import write_text

_EXACT_UP_TO = 1000  # discordant images; above, the chi-square form agrees to three digits


@dataclass(frozen=True)
class Arm:
    """One evaluation to compare. Its predictions are in the order of the first arm's images."""

    name: str
    evaluation: Evaluation
    predictions: Predictions

    @property
    def correct(self) -> NDArray[np.bool_]:
        return np.equal(self.predictions.rank, 0)


@dataclass(frozen=True)
class Group:
    """Evaluations that differ in nothing but the training seed; usually one."""

    name: str
    arms: list[Arm]

    @property
    def top1(self) -> Floats:
        """One value a seed."""
        return np.array([arm.evaluation.top1 for arm in self.arms])

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation of top-1 over the seeds; None of one seed."""
        return float(self.top1.std(ddof=1)) if len(self.arms) > 1 else None


@dataclass(frozen=True)
class ClassMove:
    """A class whose recall changed."""

    name: str
    recall_a: float
    recall_b: float
    support: int


@dataclass(frozen=True)
class Pair:
    """B against A, image by image."""

    a: str
    b: str
    difference: float  # top-1 of B minus top-1 of A; of several seeds the mean's
    interval: tuple[
        float, float
    ]  # 95 %, paired bootstrap over images, and over seeds where there are several
    loss_difference: float
    p_value: float | None  # McNemar's test; None where a side has several seeds
    moved: list[ClassMove]  # classes whose recall differs, by how much
    only_a: list[str]  # images that every seed of A gets right and none of B
    only_b: list[str]


def load_arms(directories: Sequence[Path]) -> list[Arm]:
    """Read evaluations. Raises ValueError where there are fewer than two or their images differ."""
    if len(directories) < 2:
        raise ValueError("vit compare needs two or more evaluations")
    arms: list[Arm] = []
    shared = os.path.commonpath([directory.resolve().parent for directory in directories])
    for directory in directories:
        name = os.path.relpath(directory.resolve(), shared)
        if not (directory / EVALUATION_FILE).is_file():
            raise FileNotFoundError(f"{directory} holds no {EVALUATION_FILE}; vit evaluate writes it")
        evaluation = load_evaluation(directory / EVALUATION_FILE)
        predictions = load_predictions(directory / PREDICTIONS_FILE)
        if len(predictions.ids) != evaluation.num_images:
            raise ValueError(
                f"{directory / PREDICTIONS_FILE} has {len(predictions.ids)} predictions of "
                f"{evaluation.num_images} images; evaluate again"
            )
        if arms:
            predictions = _align(Arm(name, evaluation, predictions), arms[0])
        arms.append(Arm(name, evaluation, predictions))
    return arms


def fold_seeds(arms: Sequence[Arm]) -> list[Group]:
    """Put runs of one recipe with different seeds together; everything else stays by itself."""
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(arm.evaluation.recipe or arm.name, []).append(arm)
    folded = []
    for members in groups.values():
        seeds = {arm.evaluation.seed for arm in members}
        if len(seeds) == len(members) > 1 and None not in seeds:
            folded.append(Group(name=" + ".join(arm.name for arm in members), arms=members))
        else:
            folded += [Group(name=arm.name, arms=[arm]) for arm in members]
    return folded


def compare_groups(a: Group, b: Group, *, resamples: int = RESAMPLES, seed: int = 0) -> Pair:
    """Compare B with A on the same images."""
    correct_a = np.array([arm.correct for arm in a.arms], dtype=np.float64)  # [seeds, n]
    correct_b = np.array([arm.correct for arm in b.arms], dtype=np.float64)
    share_a, share_b = correct_a.mean(axis=0), correct_b.mean(axis=0)
    p_value = None
    if len(a.arms) == len(b.arms) == 1:
        p_value = compute_mcnemar(int((share_a > share_b).sum()), int((share_b > share_a).sum()))
    ids = np.array(a.arms[0].predictions.ids, dtype=object)
    loss_a, loss_b = (np.mean([arm.evaluation.loss for arm in group.arms]) for group in (a, b))
    return Pair(
        a=a.name,
        b=b.name,
        difference=float((share_b - share_a).mean()),
        interval=_bootstrap_difference(correct_a, correct_b, resamples=resamples, seed=seed),
        loss_difference=float(loss_b - loss_a),
        p_value=p_value,
        moved=_find_moves(np.array(a.arms[0].predictions.labels), share_a, share_b),
        only_a=ids[(share_a == 1) & (share_b == 0)].tolist(),
        only_b=ids[(share_b == 1) & (share_a == 0)].tolist(),
    )


def save_comparison(path: Path, groups: Sequence[Group], pairs: Sequence[Pair]) -> None:
    """Write everything as JSON: groups with their top-1 by seed, and pairs with all classes and images."""
    document = {
        "schema_version": 1,
        "fingerprint": groups[0].arms[0].evaluation.fingerprint,
        "groups": [
            {
                "name": group.name,
                "evaluations": [arm.name for arm in group.arms],
                "seeds": [arm.evaluation.seed for arm in group.arms],
                "top1": group.top1.tolist(),
                "mean": float(group.top1.mean()),
                "standard_deviation": group.deviation,
            }
            for group in groups
        ],
        "pairs": [asdict(pair) for pair in pairs],
    }
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


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


def _align(arm: Arm, first: Arm) -> Predictions:
    """The predictions of `arm` in the order of `first`; ValueError where they are of other images."""
    own, other = first.evaluation, arm.evaluation
    if own.fingerprint != other.fingerprint:
        raise ValueError(
            f"{first.name} and {arm.name} were evaluated on different images "
            f"({own.data} {own.split} {own.fingerprint[:12]}, {other.data} {other.split} "
            f"{other.fingerprint[:12]}); evaluate both on the same"
        )
    position = {name: index for index, name in enumerate(arm.predictions.ids)}
    if len(position) < len(arm.predictions.ids) or set(position) != set(first.predictions.ids):
        raise ValueError(
            f"{first.name} and {arm.name} name the same images differently; evaluate both on one copy"
        )
    order = [position[name] for name in first.predictions.ids]
    predictions = arm.predictions
    return Predictions(
        ids=first.predictions.ids,
        labels=[predictions.labels[index] for index in order],
        predicted=[predictions.predicted[index] for index in order],
        loss=predictions.loss[order],
        rank=predictions.rank[order],
    )


def _bootstrap_difference(
    correct_a: Floats, correct_b: Floats, *, resamples: int, seed: int
) -> tuple[float, float]:
    """95 % percentile interval of top-1 of B minus A: images are drawn for both together, seeds for each."""
    generator = np.random.default_rng(seed)
    count = correct_a.shape[1]
    draws = np.empty(resamples)
    for index in range(resamples):
        seeds_a, seeds_b = (draw_weights(len(rows), generator) / len(rows) for rows in (correct_a, correct_b))
        draws[index] = (seeds_b @ correct_b - seeds_a @ correct_a) @ draw_weights(count, generator) / count
    low, high = np.quantile(draws, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def _find_moves(labels: NDArray[np.str_], share_a: Floats, share_b: Floats) -> list[ClassMove]:
    names, index, support = np.unique(labels, return_inverse=True, return_counts=True)
    recall_a, recall_b = np.bincount(index, share_a) / support, np.bincount(index, share_b) / support
    columns = (names.tolist(), recall_a.tolist(), recall_b.tolist(), support.tolist())
    moves = [ClassMove(*row) for row in zip(*columns, strict=True)]
    moves = [move for move in moves if move.recall_a != move.recall_b]
    return sorted(moves, key=lambda move: -abs(move.recall_b - move.recall_a))
