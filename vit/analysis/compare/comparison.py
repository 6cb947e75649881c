"""Compare evaluations of the same images, and test whether they differ by more than chance."""

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vit.analysis.compare.labels import (
    LabelChange,
    MetricDifference,
    compare_labels,
    find_label_changes,
)
from vit.evaluation.clusters import Interval, number_clusters, select_groups
from vit.evaluation.label_metrics import LabelMetrics, LabelScores
from vit.evaluation.label_result import LabelEvaluation, LabelEvaluationResult
from vit.evaluation.predictions import (
    GROUP_COLUMN,
    PREDICTIONS_FILE,
    load_label_predictions,
    load_predictions,
)
from vit.evaluation.result import (
    EVALUATION_FILE,
    Evaluation,
    EvaluationResult,
)
from vit.evaluation.saved import load_evaluation
from vit.evaluation.significance import (
    SIGNIFICANCE,
    compare_models,
    compare_seeds,
    correct_p_values,
)
from vit.prediction.probabilities import Floats
from vit.runtime.arguments import check_kind, shorten
from vit.runtime.files import FileContent, Result, format_json


@dataclass(frozen=True)
class NamedEvaluation:
    """An evaluation, its images in the order of the first evaluation that is compared.

    Attributes:
        labels: Class of each image, or its labels.
        groups: Group of each image; None if each is its own.
        correct: True for an image that is predicted correctly, or of which all labels are right.
        scores: Scores of several labels an image; None for classes.
    """

    name: str
    evaluation: Evaluation | LabelEvaluation
    ids: list[str]
    labels: list[str]
    groups: Sequence[str] | None
    correct: NDArray[np.bool_]
    scores: LabelScores | None = None

    @property
    def metric(self) -> str:
        """Name of the metric that is compared."""
        return "top1" if self.scores is None else "map"


@dataclass(frozen=True)
class Group:
    """Evaluations that differ only in the training seed; usually there is one."""

    evaluations: list[NamedEvaluation]

    @property
    def name(self) -> str:
        return " + ".join(member.name for member in self.evaluations)

    @property
    def metric(self) -> str:
        """Name of the metric that is compared: "top1", or "map" for several labels an image."""
        return self.evaluations[0].metric

    @property
    def values(self) -> Floats:
        """The metric of each seed."""
        return np.array([getattr(member.evaluation, self.metric) for member in self.evaluations])

    @property
    def loss(self) -> float:
        """Mean loss of the seeds."""
        return float(np.mean([member.evaluation.loss for member in self.evaluations]))

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation of the metric over the seeds; None if there is one seed."""
        return float(self.values.std(ddof=1)) if len(self.evaluations) > 1 else None

    @property
    def per_label(self) -> list[list[LabelMetrics]]:
        """Metrics of every label, for each seed; empty for classes."""
        evaluations = [member.evaluation for member in self.evaluations]
        return [each.per_label for each in evaluations if isinstance(each, LabelEvaluation)]

    @property
    def correct(self) -> Floats:
        """1 where a seed is correct on an image, else 0: [seeds, n]."""
        return np.array([member.correct for member in self.evaluations], float)


@dataclass(frozen=True)
class RecallChange:
    """A class whose recall differs."""

    name: str
    recall_a: float
    recall_b: float
    support: int


@dataclass(frozen=True)
class Pair:
    """B compared with A, image by image.

    Attributes:
        difference: Metric of B minus that of A, each the mean over its seeds: top-1 accuracy, or
            mean average precision for several labels an image.
        interval: Its 95 % interval, which holds 0 if the difference is not significant.
        test: Name of the test.
        p_value: p-value of this pair alone.
        corrected_p_value: p-value corrected for the number of pairs (Holm 1979).
        is_significant: True if the corrected p-value is below 0.05.
        detectable: Smallest true difference that would be significant in 80 % of such comparisons,
            on as many images.
        recall_changes: The largest change first.
        only_a: Images that every seed of A predicts correctly and no seed of B. All labels of an
            image have to be right.
        only_b: Images that every seed of B predicts correctly and no seed of A.
        metrics: Mean average precision, F1 and exact match of several labels an image.
        label_changes: The largest change of a label's average precision first.
    """

    a: str
    b: str
    difference: float
    interval: Interval
    test: str
    p_value: float
    corrected_p_value: float
    is_significant: bool
    detectable: float
    recall_changes: list[RecallChange]
    only_a: list[str]
    only_b: list[str]
    metrics: list[MetricDifference] = field(default_factory=list)
    label_changes: list[LabelChange] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Every group of evaluations compared with the first one.

    Attributes:
        notes: Sentences about these evaluations that a reader should know.
    """

    groups: list[Group]
    pairs: list[Pair]
    notes: list[str]

    def __repr__(self) -> str:
        """One line, because notebooks show a result that ends a cell."""
        pairs = [
            f"{pair.b} - {pair.a}: {pair.difference:+.4f} (p = {pair.corrected_p_value:.3g})"
            for pair in self.pairs
        ]
        return f"Comparison({shorten('; '.join(pairs))})"

    def build_files(self) -> dict[str, FileContent]:
        content = {
            "schema_version": 1,
            "fingerprint": self.groups[0].evaluations[0].evaluation.fingerprint,
            "groups": [
                {
                    "name": group.name,
                    "evaluations": [member.name for member in group.evaluations],
                    "seeds": [member.evaluation.seed for member in group.evaluations],
                    group.metric: group.values.tolist(),
                    "standard_deviation": group.deviation,
                }
                for group in self.groups
            ],
            "notes": self.notes,
            "pairs": [asdict(pair) for pair in self.pairs],
        }
        return {"comparison.json": format_json(content)}


def compare(
    evaluations: Sequence[str | Path | EvaluationResult | LabelEvaluationResult],
) -> Comparison:
    """Compare evaluations of the same images with the first of them.

    Args:
        evaluations: Two or more directories of `vit evaluate`, or results of
            `vit.evaluate`. If all are seeds of one recipe, they are compared
            with each other, too.

    Returns:
        The comparison: `.pairs` hold the difference in top-1 accuracy with
        its 95 % interval and the p-value of McNemar's exact test, corrected
        for the number of pairs, and the smallest difference that it would
        have found. In `.groups` the seeds of one recipe are one group, and
        groups are compared by Welch's t-test over seeds. Where an image may
        have several labels, the difference is that in mean average precision,
        by the jackknife, and `.metrics` of a pair has F1 and exact match, too.

    Raises:
        ValueError: There are fewer than two evaluations, or they are of
            different images or labels.

    Example:
        >>> comparison = vit.compare(["runs/small-eval", "runs/large-eval"])
        >>> comparison.pairs[0].difference, comparison.pairs[0].interval
    """
    members = load_evaluations(evaluations)
    groups = group_seeds(members)
    compared = groups
    # with one recipe there is nothing to compare but its seeds
    if len(groups) == 1:
        compared = [Group([member]) for member in members]
        groups = groups + compared
    first, *others = compared
    pairs = correct_pairs([compare_groups(first, other, num_pairs=len(others)) for other in others])
    notes = [
        f"{a.name} and {b.name} are evaluations of one model file"
        for a, b in combinations(members, 2)
        # A model in memory has no file.
        if a.evaluation.model_sha256 == b.evaluation.model_sha256 != ""
    ]
    notes += [
        f"{member.name} has no loss: the model's outputs are not all finite numbers"
        for member in members
        if not math.isfinite(member.evaluation.loss)
    ]
    return Comparison(groups, pairs, notes)


def load_evaluations(
    evaluations: Sequence[str | Path | EvaluationResult | LabelEvaluationResult],
) -> list[NamedEvaluation]:
    """Load evaluations, and bring them to the first one's order of images.

    Raises:
        ValueError: There are fewer than two, or their images differ.
        OSError: A file can't be read.
    """
    expected = "a list of results of vit.evaluate, or of their directories"
    check_kind(evaluations, (list, tuple), name="evaluations", expected=expected)
    for item in evaluations:
        kinds = (str, Path, EvaluationResult, LabelEvaluationResult)
        check_kind(item, kinds, name="an evaluation", expected=expected)
    if len(evaluations) < 2:
        raise ValueError("vit compare needs two or more evaluations")
    folders = [Path(item).resolve() for item in evaluations if isinstance(item, str | Path)]
    # A directory is named by the part of its path that differs from the others.
    common = os.path.commonpath([folder.parent for folder in folders]) if folders else ""
    loaded = []
    for number, item in enumerate(evaluations, start=1):
        if isinstance(item, str | Path):
            loaded.append(_load(Path(item), os.path.relpath(Path(item).resolve(), common)))
            continue
        labels: list[str] = []
        scores = None
        if isinstance(item, LabelEvaluationResult):
            scores = item.scores
        else:
            labels = [item.bundle.class_names[label] for label in item.scores.labels]
        name = f"{item.evaluation.model} ({number})"
        groups, correct = item.images.groups, item.scores.correct
        ids = list(item.images.ids)
        loaded.append(NamedEvaluation(name, item.evaluation, ids, labels, groups, correct, scores))
    return [loaded[0], *(_align(other, loaded[0]) for other in loaded[1:])]


def group_seeds(evaluations: Sequence[NamedEvaluation]) -> list[Group]:
    """Group the seeds of one recipe on the same training images that were evaluated alike.

    Every other evaluation is a group of its own.
    """
    by_origin: dict[tuple[object, ...], list[NamedEvaluation]] = defaultdict(list)
    for member in evaluations:
        evaluation = member.evaluation
        # these change the predictions of one model, so that they are no difference between seeds
        origin = (
            evaluation.recipe or member.name,
            evaluation.training_fingerprint,
            evaluation.conditions.get("precision"),
            evaluation.conditions.get("tta"),
            evaluation.calibration is not None,
        )
        by_origin[origin].append(member)
    groups = []
    for members in by_origin.values():
        seeds = {member.evaluation.seed for member in members}
        # a seed that occurs twice, or that isn't known, is no independent repetition
        if len(seeds) == len(members) and None not in seeds:
            groups.append(Group(members))
        else:
            groups += [Group([member]) for member in members]
    return groups


def compare_groups(a: Group, b: Group, *, num_pairs: int = 1) -> Pair:
    """Compare B with A, image by image.

    Args:
        a: One or more seeds.
        b: One or more seeds.
        num_pairs: Number of pairs that are compared. See `correct_pairs`.
    """
    first = a.evaluations[0]
    mean_a = a.correct.mean(axis=0)
    mean_b = b.correct.mean(axis=0)
    # an evaluation of an earlier version doesn't know the groups of its images
    known = (member.groups for member in (*a.evaluations, *b.evaluations))
    groups = next((groups for groups in known if groups is not None), None)
    clusters = number_clusters(groups, len(first.ids))
    # The lowest p-value of several pairs has to be below this.
    significance = SIGNIFICANCE / num_pairs
    # with one model each the images are the sample, with several the seeds are
    is_single = len(a.evaluations) == len(b.evaluations) == 1
    test = f"Welch's t-test over {len(a.evaluations)} and {len(b.evaluations)} seeds"
    metrics: list[MetricDifference] = []
    label_changes: list[LabelChange] = []
    recall_changes: list[RecallChange] = []
    if first.scores is not None:
        if is_single:
            test = "paired jackknife"
        scores_a, scores_b = (
            [member.scores for member in group.evaluations if member.scores] for group in (a, b)
        )
        outcome, metrics = compare_labels(scores_a, scores_b, clusters, significance=significance)
        label_changes = find_label_changes(a.per_label, b.per_label)
        difference = metrics[0].value_b - metrics[0].value_a
    else:
        recall_changes = _find_recall_changes(first.labels, mean_a, mean_b)
        difference = float((mean_b - mean_a).mean())
        if is_single:
            test = "McNemar's exact test"
            outcome = compare_models(mean_b - mean_a, clusters, significance=significance)
        else:
            outcome = compare_seeds(a.correct, b.correct, clusters, significance=significance)
    p_value, interval, detectable = outcome
    ids = np.array(first.ids, dtype=object)
    return Pair(
        a=a.name,
        b=b.name,
        difference=difference,
        interval=interval,
        test=test,
        p_value=p_value,
        corrected_p_value=p_value,
        is_significant=p_value < SIGNIFICANCE,
        detectable=detectable,
        recall_changes=recall_changes,
        only_a=ids[(mean_a == 1) & (mean_b == 0)].tolist(),
        only_b=ids[(mean_b == 1) & (mean_a == 0)].tolist(),
        metrics=metrics,
        label_changes=label_changes,
    )


def correct_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Correct the p-values and verdicts of pairs for their number."""
    p_values = correct_p_values([pair.p_value for pair in pairs])
    corrected = []
    for pair, p_value in zip(pairs, p_values, strict=True):
        pair = replace(pair, corrected_p_value=p_value, is_significant=p_value < SIGNIFICANCE)
        if not pair.is_significant:
            low, high = pair.interval
            pair = replace(pair, interval=(min(low, 0.0), max(high, 0.0)))
        corrected.append(pair)
    return corrected


def _load(directory: Path, name: str) -> NamedEvaluation:
    if not (directory / EVALUATION_FILE).is_file():
        raise FileNotFoundError(f"{directory} has no {EVALUATION_FILE}; run vit evaluate first")
    evaluation = load_evaluation(directory / EVALUATION_FILE)
    path = directory / PREDICTIONS_FILE
    scores = None
    if isinstance(evaluation, LabelEvaluation):
        metric, value = "map", evaluation.map
        columns, scores = load_label_predictions(path, [row.name for row in evaluation.per_label])
        correct, labels = scores.correct, columns["labels"]
    else:
        metric, value = "top1", evaluation.top1
        columns = load_predictions(path)
        correct, labels = np.array(columns["rank"]) == "0", columns["label"]
    # the file may be edited or damaged, and nan would spread to all differences
    if value is None or not all(map(math.isfinite, (value, *evaluation.intervals[metric]))):
        raise ValueError(f"{directory / EVALUATION_FILE}: {metric} is not a number; evaluate again")
    ids = columns["path"]
    # both files are of one evaluation only if nobody replaced one of them
    if len(ids) != evaluation.num_images:
        raise ValueError(
            f"{path} has {len(ids)} predictions of {evaluation.num_images} images; evaluate again"
        )
    return NamedEvaluation(
        name, evaluation, ids, labels, columns.get(GROUP_COLUMN), correct, scores
    )


def _align(other: NamedEvaluation, first: NamedEvaluation) -> NamedEvaluation:
    """Return `other` with its images in the order of `first`.

    Raises:
        ValueError: They are other images.
    """
    a, b = first.evaluation, other.evaluation
    if first.metric != other.metric:
        # "map" comes before "top1"
        several, single = sorted((first, other), key=lambda each: each.metric)
        raise ValueError(
            f"{several.name} is of several labels an image and {single.name} of one class an image;"
            " compare evaluations of one kind"
        )
    if a.fingerprint != b.fingerprint:
        raise ValueError(
            f"{first.name} and {other.name} were evaluated on different images or labels"
            f" ({a.data} {a.split} {a.fingerprint[:12]}, {b.data} {b.split} {b.fingerprint[:12]});"
            " evaluate both on the same images, with labels in the same order"
        )
    position = {name: index for index, name in enumerate(other.ids)}
    if len(position) < len(other.ids) or set(position) != set(first.ids):
        raise ValueError(
            f"the same images have different names in {first.name} and {other.name}; evaluate both"
            " on the same copy of the images"
        )
    # image by image, because tests of pairs are sharper than those of means
    order = np.array([position[name] for name in first.ids])
    aligned = replace(
        other,
        ids=first.ids,
        labels=first.labels,
        groups=select_groups(other.groups, order),
        correct=other.correct[order],
    )
    if other.scores is not None:
        aligned = replace(aligned, scores=other.scores.subset(order))
    return aligned


def _find_recall_changes(
    labels: Sequence[str], mean_a: Floats, mean_b: Floats
) -> list[RecallChange]:
    # An array of text would reserve room for the longest name in every element.
    names, classes = np.unique(np.array(labels, dtype=object), return_inverse=True)
    support = np.bincount(classes)
    recall_a = np.bincount(classes, mean_a) / support
    recall_b = np.bincount(classes, mean_b) / support
    columns = (column.tolist() for column in (names, recall_a, recall_b, support))
    changes = [RecallChange(*row) for row in zip(*columns, strict=True)]
    changes.sort(key=lambda change: -abs(change.recall_b - change.recall_a))
    return [change for change in changes if change.recall_a != change.recall_b]
