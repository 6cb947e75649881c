"""Evaluations on the same images: what differs between them, and whether more than by chance."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vit.evaluation.evaluate import EvaluationResult
from vit.evaluation.intervals import RESAMPLES, draw_weights, take_percentiles
from vit.evaluation.metrics import Floats
from vit.evaluation.schema import EVALUATION_FILE, PREDICTIONS_FILE, Evaluation, load_evaluation, load_predictions
from vit.runtime.files import write_text
from vit.runtime.output_dir import prepare_output

COMPARISON_FILE = "comparison.json"
_EXACT_UP_TO = 1000  # discordant images; above, the chi-square form agrees to three digits


@dataclass(frozen=True)
class NamedEvaluation:
    """One evaluation to compare, with its images in the order of the first one's."""

    name: str
    evaluation: Evaluation
    ids: list[str]
    labels: list[str]
    correct: NDArray[np.bool_]


@dataclass(frozen=True)
class Group:
    """Evaluations that differ in nothing but the training seed; usually one."""

    evaluations: list[NamedEvaluation]

    @property
    def name(self) -> str:
        return " + ".join(each.name for each in self.evaluations)

    @property
    def top1(self) -> Floats:
        """One value for each seed."""
        return np.array([each.evaluation.top1 for each in self.evaluations])

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return float(np.mean([each.evaluation.loss for each in self.evaluations]))

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation of top-1 over the seeds; None of one seed."""
        return float(self.top1.std(ddof=1)) if len(self.evaluations) > 1 else None


@dataclass(frozen=True)
class RecallChange:
    """A class whose recall differs."""

    name: str
    recall_a: float
    recall_b: float
    support: int


@dataclass(frozen=True)
class Pair:
    """B compared with A, image by image."""

    a: str
    b: str
    difference: float  # top-1 of B minus top-1 of A; of several seeds the mean's
    interval: tuple[float, float]  # 95 %, paired bootstrap over images, and over seeds where there are several
    loss_difference: float
    p_value: float | None  # McNemar's test; None where a side has several seeds
    recall_changes: list[RecallChange]  # the largest first
    only_a: list[str]  # images that every seed of A predicts correctly and none of B
    only_b: list[str]


@dataclass(frozen=True)
class Comparison:
    """Every group of evaluations compared with the first one."""

    groups: list[Group]
    pairs: list[Pair]

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write comparison.json: groups with their top-1 by seed, and pairs with all classes and images."""
        document = {
            "schema_version": 1,
            "fingerprint": self.groups[0].evaluations[0].evaluation.fingerprint,
            "groups": [
                {
                    "name": group.name,
                    "evaluations": [each.name for each in group.evaluations],
                    "seeds": [each.evaluation.seed for each in group.evaluations],
                    "top1": group.top1.tolist(),
                    "mean": float(group.top1.mean()),
                    "standard_deviation": group.deviation,
                }
                for group in self.groups
            ],
            "pairs": [asdict(pair) for pair in self.pairs],
        }
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        write_text(prepare_output(Path(directory), overwrite=overwrite) / COMPARISON_FILE, text)


def compare_evaluations(evaluations: Sequence[str | Path | EvaluationResult]) -> Comparison:
    """Compare evaluations, or the directories that hold them, with the first; seeds of one recipe are one group.

    Where all are seeds of one recipe, they are compared with each other too. Raises what `load_evaluations` raises.
    """
    named = load_evaluations(evaluations)
    groups = group_seeds(named)
    compared = groups if len(groups) > 1 else [Group([each]) for each in named]
    pairs = [compare_groups(compared[0], other) for other in compared[1:]]
    return Comparison(groups if compared is groups else groups + compared, pairs)


def load_evaluations(evaluations: Sequence[str | Path | EvaluationResult]) -> list[NamedEvaluation]:
    """Raises ValueError where there are fewer than two or their images differ, OSError where one can't be read."""
    if len(evaluations) < 2:
        raise ValueError("a comparison needs two or more evaluations")
    folders = [Path(each).resolve() for each in evaluations if not isinstance(each, EvaluationResult)]
    common = os.path.commonpath([folder.parent for folder in folders]) if folders else ""
    loaded = [
        _take(each, f"{each.evaluation.model} ({number})")
        if isinstance(each, EvaluationResult)
        else _load(Path(each), os.path.relpath(Path(each).resolve(), common))
        for number, each in enumerate(evaluations, start=1)
    ]
    return [loaded[0], *(_align(other, loaded[0]) for other in loaded[1:])]


def group_seeds(evaluations: Sequence[NamedEvaluation]) -> list[Group]:
    """Put runs of one recipe with different seeds together; everything else stays by itself."""
    by_recipe: dict[str, list[NamedEvaluation]] = {}
    for each in evaluations:
        by_recipe.setdefault(each.evaluation.recipe or each.name, []).append(each)
    groups = []
    for members in by_recipe.values():
        seeds = {each.evaluation.seed for each in members}
        are_seeds = len(seeds) == len(members) and None not in seeds
        groups += [Group(members)] if are_seeds else [Group([each]) for each in members]
    return groups


def compare_groups(a: Group, b: Group, *, resamples: int = RESAMPLES, seed: int = 0) -> Pair:
    """Compare B with A on the same images."""
    # [seeds, n] each
    correct_a, correct_b = (np.array([each.correct for each in group.evaluations], float) for group in (a, b))
    mean_a, mean_b = correct_a.mean(axis=0), correct_b.mean(axis=0)
    p_value = None
    if len(correct_a) == len(correct_b) == 1:
        p_value = compute_mcnemar(int((mean_a > mean_b).sum()), int((mean_b > mean_a).sum()))
    first = a.evaluations[0]
    ids = np.array(first.ids, dtype=object)
    return Pair(
        a=a.name,
        b=b.name,
        difference=float((mean_b - mean_a).mean()),
        interval=_bootstrap_difference(correct_a, correct_b, resamples=resamples, seed=seed),
        loss_difference=b.loss - a.loss,
        p_value=p_value,
        recall_changes=_find_recall_changes(first.labels, mean_a, mean_b),
        only_a=ids[(mean_a == 1) & (mean_b == 0)].tolist(),
        only_b=ids[(mean_b == 1) & (mean_a == 0)].tolist(),
    )


def compute_mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p-value of McNemar's test (1947) that both models err equally often.

    Exact binomial up to 1,000 discordant images, chi-square with Edwards' continuity correction above.
    """
    from scipy.stats import binomtest, chi2  # takes a second, which other commands don't need

    discordant = only_a + only_b
    if discordant == 0:
        return 1.0
    if discordant <= _EXACT_UP_TO:
        return float(binomtest(only_a, discordant).pvalue)
    return float(chi2.sf(max(abs(only_a - only_b) - 1, 0) ** 2 / discordant, df=1))


def _take(result: EvaluationResult, name: str) -> NamedEvaluation:
    labels = [result.bundle.class_names[label] for label in result.scores.labels.tolist()]
    return NamedEvaluation(name, result.evaluation, list(result.images.ids), labels, result.scores.correct)


def _load(directory: Path, name: str) -> NamedEvaluation:
    if not (directory / EVALUATION_FILE).is_file():
        raise FileNotFoundError(f"{directory} holds no {EVALUATION_FILE}; vit evaluate writes it")
    evaluation, path = load_evaluation(directory / EVALUATION_FILE), directory / PREDICTIONS_FILE
    columns = load_predictions(path)
    ids = columns["path"]
    if len(ids) != evaluation.num_images:
        raise ValueError(f"{path} has {len(ids)} predictions of {evaluation.num_images} images; evaluate again")
    return NamedEvaluation(name, evaluation, ids, columns["label"], np.array([rank == "0" for rank in columns["rank"]]))


def _align(other: NamedEvaluation, first: NamedEvaluation) -> NamedEvaluation:
    """`other` with its images in the order of `first`; ValueError where they are other images."""
    a, b = first.evaluation, other.evaluation
    if a.fingerprint != b.fingerprint:
        raise ValueError(
            f"{first.name} and {other.name} were evaluated on different images ({a.data} {a.split} "
            f"{a.fingerprint[:12]}, {b.data} {b.split} {b.fingerprint[:12]}); evaluate both on the same"
        )
    position = {name: index for index, name in enumerate(other.ids)}
    if len(position) < len(other.ids) or set(position) != set(first.ids):
        raise ValueError(f"{first.name} and {other.name} name the same images differently; evaluate both on one copy")
    order = [position[name] for name in first.ids]
    return replace(other, ids=first.ids, labels=first.labels, correct=other.correct[order])


def _bootstrap_difference(correct_a: Floats, correct_b: Floats, *, resamples: int, seed: int) -> tuple[float, float]:
    """95 % percentile interval of top-1 of B minus A: images are drawn for both together, seeds for each."""
    generator, count = np.random.default_rng(seed), correct_a.shape[1]
    differences = np.empty(resamples)
    for index in range(resamples):
        seeds_a, seeds_b = (draw_weights(len(rows), generator) / len(rows) for rows in (correct_a, correct_b))
        change = seeds_b @ correct_b - seeds_a @ correct_a
        differences[index] = change @ draw_weights(count, generator) / count
    return take_percentiles(differences)


def _find_recall_changes(labels: Sequence[str], mean_a: Floats, mean_b: Floats) -> list[RecallChange]:
    names = sorted(set(labels))
    numbers = {name: number for number, name in enumerate(names)}  # an array of text has room for the longest in each
    index = np.fromiter(map(numbers.__getitem__, labels), np.int64, len(labels))
    support = np.bincount(index)
    recall_a, recall_b = np.bincount(index, mean_a) / support, np.bincount(index, mean_b) / support
    columns = (names, recall_a.tolist(), recall_b.tolist(), support.tolist())
    changes = [RecallChange(*row) for row in zip(*columns, strict=True) if row[1] != row[2]]
    return sorted(changes, key=lambda change: -abs(change.recall_b - change.recall_a))
