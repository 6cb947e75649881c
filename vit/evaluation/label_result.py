"""The result of an evaluation on images with several labels, and its files: `evaluation.json`,
`report.html` and `predictions.csv`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vit.bundle import Bundle
from vit.evaluation.clusters import Interval, select_groups
from vit.evaluation.images import EvaluationSet, TrainTestOverlap, describe_unreadable
from vit.evaluation.label_metrics import (
    LabelMetrics,
    LabelScores,
    bound_mean,
    compute_label_intervals,
    compute_label_metrics,
    compute_per_label,
)
from vit.evaluation.predictions import PREDICTIONS_FILE, write_label_predictions
from vit.evaluation.result import Cost, MetricRow, SavedEvaluation, Shown, build_row
from vit.evaluation.subgroups import SubgroupTable
from vit.prediction.conformal import LEVELS, mark_sets
from vit.prediction.probabilities import Bools, Float32s
from vit.runtime.files import FileContent
from vit.runtime.numbers import format_interval, format_number, format_percent


@dataclass(frozen=True)
class LabelSetMetrics:
    """Sets of labels on labelled images.

    Attributes:
        coverage: Fraction of an image's labels that should be in its set, on average.
        num_images: Number of validation images with labels that the threshold is from.
        measured: Mean fraction, of the images that have labels.
        interval: Its 95 % interval.
        mean_size: Mean number of labels in a set.
    """

    coverage: float
    num_images: int
    measured: float
    interval: Interval
    mean_size: float


class LabelEvaluation(Shown, BaseModel):
    """The metrics of one model on one set of images with several labels, and the conditions of the
    measurement. A metric is null where no image has a label that it needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[3] = 3
    task: str = "multilabel"
    map: float | None = Field(
        title="Mean average precision",
        description="average precision (area under the precision-recall curve), mean of the labels",
    )
    map_micro: float | None = Field(
        title="Micro average precision",
        description="average precision of all pairs of image and label together",
    )
    roc_auc: float | None = Field(
        title="ROC AUC", description="area under the ROC curve, mean of the labels"
    )
    macro_f1: float | None = Field(title="Macro F1", description="mean F1 of the labels")
    micro_f1: float | None = Field(
        title="Micro F1", description="F1 of all pairs of image and label together"
    )
    image_f1: float | None = Field(title="F1 by image", description="mean F1 of the images")
    exact_match: float = Field(
        title="Exact match", description="fraction of images of which all labels are right"
    )
    loss: float = Field(title="Loss", description="mean binary cross-entropy, nats")
    ece: float = Field(
        title="Calibration error",
        description="expected calibration error of all labels over 15 bins of equal width",
    )
    # 95 % confidence interval of each metric above but the calibration error
    intervals: dict[str, Interval]
    # every label of the model, in its order
    per_label: list[LabelMetrics]
    # divisor of the logits before the sigmoid; 1 if none was fitted
    temperature: float = 1.0
    # rule by which the thresholds were chosen; null without an operating point
    operating_point: str | None = None
    # sets of labels with a promised fraction of an image's labels; empty without thresholds
    label_sets: list[LabelSetMetrics] = []
    # accuracy by the values of each column of --by
    subgroups: list[SubgroupTable] = []
    # number of evaluated images, and of their groups
    num_images: int
    num_groups: int
    # images that were left out, each with the reason
    unreadable: list[tuple[str, str]]
    # null if it isn't known which images were in training
    duplicates_of_training: TrainTestOverlap | None
    cost: Cost
    # name of the data set
    data: str
    split: str
    # facts about these images that a reader should know, in sentences
    notes: list[str]
    # hash of the decoded pixels, labels, label names and split
    fingerprint: str
    # path or name that the model was loaded from
    model: str
    model_sha256: str
    run_id: str | None = None
    # hash of the training images
    training_fingerprint: str | None = None
    # hash of the training configuration without seed and machine
    recipe: str | None
    # seed of the training run
    seed: int | None
    # device, precision, batch size, tta (hflip or null), command, time, versions
    conditions: dict[str, str | None]

    def __repr__(self) -> str:
        """One line, because notebooks show a result that ends a cell."""
        value = "–" if self.map is None else f"{self.map:.4f}"
        low, high = self.intervals["map"]
        return (
            f"LabelEvaluation({self.num_images} images of {self.data} ({self.split}),"
            f" map={value} ({low:.4f} to {high:.4f}))"
        )

    def list_rows(self) -> list[MetricRow]:
        rows = [
            build_row(self, name, is_fraction=name not in ("loss", "ece"))
            for name in (*self.intervals, "ece")
        ]
        for sets in self.label_sets:
            rows.append(
                MetricRow(
                    f"Labels in sets of {100 * sets.coverage:.0f} %",
                    format_percent(sets.measured, self.num_images),
                    format_interval(sets.interval, self.num_images),
                    f"fraction of an image's labels in its set of {format_number(sets.mean_size)}",
                )
            )
        return rows

    def describe_accuracy(self) -> str:
        """Return the accuracy in a sentence."""
        count = self.num_images
        mean = "–" if self.map is None else format_percent(self.map, count)
        return (
            f"All labels are right on {round(self.exact_match * count):,} of {count:,} images. The"
            f" mean average precision is {mean} (95 % interval"
            f" {format_interval(self.intervals['map'], count)})."
        )

    def describe_guessing(self) -> str:
        """Return the average precision that needs no model in a sentence."""
        return f"Guessing would give {format_percent(self._guess, self.num_images)}."

    def beats_guessing(self) -> bool:
        """Return whether the mean average precision is better than a random order's, beyond what
        chance gives."""
        return self.intervals["map"][0] > self._guess

    @property
    def _guess(self) -> float:
        """Mean average precision of a random order: the mean frequency of the labels."""
        frequencies = [row.support / self.num_images for row in self.per_label if row.support]
        return float(np.mean(frequencies)) if frequencies else 0.0

    def list_warnings(self) -> list[str]:
        """Return what a reader should know before quoting a metric, in sentences."""
        warnings = [*self.notes, *describe_unreadable(self.unreadable)]
        missing = [row.name for row in self.per_label if not row.support]
        if missing:
            warnings.append(f"no image has the label {', '.join(missing)}: its metrics are –")
        overlap = self.duplicates_of_training
        if overlap is not None and (text := overlap.describe()):
            warnings.append(text)
        return warnings


def measure_labels(
    bundle: Bundle,
    images: EvaluationSet,
    scores: LabelScores,
    shared: Mapping[str, Any],
    *,
    logits: Float32s,
) -> LabelEvaluation:
    """Compute the evaluation of a model whose images may have several labels.

    Args:
        bundle: The model.
        images: The images.
        scores: Their scores.
        shared: Fields that every evaluation has, besides its metrics.
        logits: Their logits, [n, C].
    """
    dataset = images.dataset
    metrics = compute_label_metrics(scores)
    known: dict[str, Any] = {
        name: None if np.isnan(value) else value for name, value in metrics.items()
    }
    return LabelEvaluation(
        **known,
        intervals=compute_label_intervals(scores, dataset.groups),
        per_label=compute_per_label(scores, bundle.class_names, dataset.groups),
        label_sets=measure_label_sets(bundle, logits, scores.labels, dataset.groups),
        **shared,
    )


def measure_label_sets(
    bundle: Bundle, logits: Float32s, labels: Bools, groups: Sequence[str] | None = None
) -> list[LabelSetMetrics]:
    """Measure a model's sets of labels for each coverage; none without thresholds in its file.

    Args:
        bundle: The model.
        logits: [n, C].
        labels: Which labels each image has, [n, C].
        groups: Group of each image. None: each is its own group.
    """
    chosen = np.flatnonzero(labels.any(axis=1))
    counts = labels[chosen].sum(axis=1)
    kept = select_groups(groups, chosen)
    measured = []
    for coverage in LEVELS:
        in_set = mark_sets(bundle, logits, coverage=coverage)
        if in_set is None or not len(chosen):
            continue
        found = (in_set & labels)[chosen].sum(axis=1) / counts
        measured.append(
            LabelSetMetrics(
                coverage=coverage,
                num_images=bundle.metadata["conformal"]["num_images"],
                measured=float(found.mean()),
                interval=bound_mean(found, kept),
                mean_size=float(in_set.sum(axis=1).mean()),
            )
        )
    return measured


@dataclass(frozen=True, repr=False)
class LabelEvaluationResult(SavedEvaluation):
    """A `LabelEvaluation`, and what each image contributed to it.

    Attributes:
        num_examples: Missed and falsely found images of each label that the report shows.
    """

    evaluation: LabelEvaluation
    scores: LabelScores
    num_examples: int = 3

    def build_files(self) -> dict[str, FileContent]:
        # templates and maps, which not every evaluation needs
        from vit.evaluation.report.label_report import build_label_report

        return {
            PREDICTIONS_FILE: partial(
                write_label_predictions,
                scores=self.scores,
                ids=self.images.ids,
                class_names=self.bundle.class_names,
                groups=self.images.groups,
                files=self.images.files,
            ),
            "report.html": build_label_report(self),
        }
