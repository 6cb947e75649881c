"""The result of an evaluation and its files.

`schema_version` rises when a key is removed or changes its meaning, not when a key is added.
Fractions are 0 to 1, not percent.
"""

import csv
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from vit.bundle import Bundle
from vit.data.dataset import printable
from vit.evaluation.images import EvaluationSet, TrainTestOverlap
from vit.evaluation.intervals import Interval
from vit.evaluation.metrics import ClassMetrics, Scores
from vit.evaluation.predictions import PREDICTIONS_FILE, save_predictions
from vit.evaluation.subgroups import Subgroup
from vit.model.find_file import MODEL_FILE
from vit.prediction.probabilities import Bools, Float32s, chunk_rows
from vit.runtime.documents import escape_formula
from vit.runtime.files import FileContent, Result, compute_sha256, format_json
from vit.runtime.numbers import format_interval, format_number, format_percent

EVALUATION_FILE = "evaluation.json"
# metric → its name for readers
_TITLES = {
    "top1": "Top-1 accuracy",
    "quadratic_kappa": "Quadratic weighted kappa",
    "top5": "Top-5 accuracy",
    "map": "Mean average precision",
    "roc_auc": "ROC AUC, mean of the labels",
    "macro_f1": "Macro F1",
    "macro_recall": "Macro recall",
    "micro_f1": "Micro F1",
    "exact_match": "Exact match of all labels",
    "loss": "Cross-entropy",
    "ece": "Expected calibration error",
    "brier": "Brier score",
}


class Evaluation(BaseModel):
    """The metrics of one model on one set of images, and the conditions of the measurement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[4] = 4
    task: Literal["classes", "multilabel"]
    # null where no image has a label that the metric needs
    metrics: dict[str, float | None]
    # 95 % confidence interval of the metrics that have one
    intervals: dict[str, Interval]
    # every class or label of the model, in its order
    per_class: list[ClassMetrics]
    # divisor of the logits before the softmax or the sigmoid; 1 if none was fitted
    temperature: float = 1.0
    # rule by which the thresholds were chosen; null without an operating point
    operating_point: str | None = None

    # column of --by → the images by its values, the worst first
    subgroups: dict[str, list[Subgroup]] = {}

    # number of evaluated images, the denominator of every metric, and of their groups
    num_images: int
    num_groups: int
    # images that were left out, each with the reason
    unreadable: list[tuple[str, str]]
    # null if it isn't known which images were in training
    duplicates_of_training: TrainTestOverlap | None

    # name of the data set
    data: str
    split: str
    # facts about these images that a reader should know, in sentences
    notes: list[str]
    # hash of the decoded pixels, labels, class names and split
    fingerprint: str
    # path or name that the model was loaded from
    model: str
    model_sha256: str
    # hash of the configuration and the images that the training run began with
    run_id: str | None = None
    # device, precision, batch size, command, time, versions
    conditions: dict[str, str]

    @property
    def is_multilabel(self) -> bool:
        """True if an image may have several labels."""
        return self.task == "multilabel"

    @property
    def headline(self) -> str:
        """Name of the metric that is quoted: accuracy, or mean average precision."""
        return "map" if self.is_multilabel else "top1"

    def __repr__(self) -> str:
        """One line, because notebooks show a result that ends a cell."""
        return f"Evaluation({self.data}, {self.split}: {self.describe_accuracy()})"

    __str__ = __repr__

    def list_rows(self) -> list[tuple[str, str, str]]:
        """Return title, value and 95 % interval of each metric as tables for people show them."""
        shown = [
            (title, self.metrics[name], self.intervals.get(name))
            for name, title in _TITLES.items()
            # five of few classes are most of them
            if name in self.metrics and (name != "top5" or len(self.per_class) >= 10)
        ]
        # a model of two classes is quoted by its curves, too
        if row := self.one_against_rest:
            area = f"Average precision of {row.name}"
            shown += [
                (f"ROC AUC of {row.name}", row.roc_auc, row.roc_auc_interval),
                (area, row.average_precision, row.average_precision_interval),
            ]
        rows = []
        for title, value, bounds in shown:
            # loss, calibration error and Brier score are no fractions
            text = "–" if value is None else format_number(value)
            interval = ""
            if value is not None and bounds:
                text, interval = self._percent(value), format_interval(bounds, self.num_images)
                # it may be negative
                if "kappa" in title:
                    text, interval = f"{value:.2f}", "{:.2f} to {:.2f}".format(*bounds)
            rows.append((title, text, interval))
        return rows

    def _percent(self, fraction: float | None) -> str:
        return "–" if fraction is None else format_percent(fraction, self.num_images)

    @property
    def one_against_rest(self) -> ClassMetrics | None:
        """The class of the operating point, or the rarer of two classes, with its curves; None for
        labels, more classes and images of one class."""
        rows = [row for row in self.per_class if row.roc_auc is not None]
        if self.is_multilabel or not rows:
            return None
        return min(rows, key=lambda row: row.support)

    @property
    def _fraction_right(self) -> float:
        """Fraction of images of which the class, or all labels, are right."""
        return self.metrics.get("top1") or self.metrics.get("exact_match") or 0.0

    def describe_accuracy(self) -> str:
        """Return the headline in a sentence: the accuracy, or the rates at the operating point."""
        count, row = self.num_images, self.one_against_rest
        if self.operating_point and row:
            others, recall = count - row.support, row.recall or 0.0
            found = round(recall * row.support)
            alarms = row.predicted - found
            return (
                f"{found:,} of {row.support:,} images with {row.name} are found"
                f" ({format_percent(recall, row.support)}; 95 % interval"
                f" {format_interval(row.recall_interval, row.support)}), with {alarms:,} false"
                f" alarms in {others:,} other images ({format_percent(alarms / others, others)})."
                f" A person has to look at {row.predicted:,} of {count:,} images."
            )
        value = self._percent(self.metrics[self.headline])
        interval = format_interval(self.intervals[self.headline], count)
        right = round(self._fraction_right * count)
        if self.is_multilabel:
            return (
                f"All labels are right on {right:,} of {count:,} images. The mean average precision"
                f" is {value} (95 % interval {interval})."
            )
        return (
            f"{right:,} of {count:,} images are classified correctly"
            f" ({value}; 95 % interval {interval})."
        )

    def describe_guessing(self) -> str:
        """Say whether the interval of the headline lies above guessing, or with an operating point
        that of the area under the ROC curve above a half."""
        supports = [row.support for row in self.per_class if row.support] or [0]
        count, kind = float(max(supports)), "always predicting the most frequent class"
        if self.is_multilabel:
            # the mean average precision of a random order
            count, kind = sum(supports) / len(supports), "a random order"
        guess = count / self.num_images
        is_better = self.intervals[self.headline][0] > guess
        text = f"{kind} gives {self._percent(guess)}."
        if self.operating_point and (row := self.one_against_rest):
            is_better = row.roc_auc_interval[0] > 0.5
            share = self._percent(row.predicted / self.num_images)
            text = f"as many images at random would have {share} of them."
        start = "By comparison," if is_better else "That may be no better than guessing:"
        return f"{start} {text}"

    def list_warnings(self) -> list[str]:
        """Return what a reader should know before quoting a metric, in sentences."""
        warnings = list(self.notes)
        if self.unreadable:
            warnings.append(
                f"{len(self.unreadable)} images could not be read and are not counted, the first:"
                f" {': '.join(self.unreadable[0])}"
            )
        overlap = self.duplicates_of_training
        if overlap is not None and overlap.exact + overlap.near:
            text = (
                f"{overlap.exact} of these images were in training, {overlap.near} more are"
                f" near-duplicates of one that was, or of its scene: {', '.join(overlap.examples[:3])}"
            )
            if overlap.accuracy_without is not None:
                text += (
                    f"; {self._percent(self._fraction_right)} of the images are right with them and"
                    f" {self._percent(overlap.accuracy_without)} without"
                )
            warnings.append(text)
        return warnings


@dataclass(frozen=True, repr=False)
class EvaluationResult(Result):
    """An evaluation with its files, and with the model file if an operating point was chosen.

    Attributes:
        evaluation: The metrics and the conditions.
        scores: Prediction of each image.
        logits: Its logits, [n, C].
        images: The images.
        bundle: The model, with its operating point.
        num_examples: Errors that the report shows.
        is_main: True in the process that writes files.
        has_new_point: True if the operating point is new; `save` writes a model file with it.
    """

    evaluation: Evaluation
    scores: Scores
    logits: Float32s
    images: EvaluationSet
    bundle: Bundle
    num_examples: int = 16
    is_main: bool = True
    has_new_point: bool = False

    def __repr__(self) -> str:
        return f"EvaluationResult{repr(self.evaluation).removeprefix('Evaluation')}"

    @property
    def sources(self) -> Sequence[str]:
        names: list[str] = self.bundle.metadata.get("models", [self.bundle.name])
        return names

    def build_files(self) -> dict[str, FileContent]:
        # templates and maps, which not every evaluation needs
        from vit.evaluation.report.report import build_report

        files: dict[str, FileContent] = {}
        if self.has_new_point:
            files[MODEL_FILE] = self.bundle.save
        return {
            **files,
            "predictions.csv": self.write_table,
            PREDICTIONS_FILE: lambda path: save_predictions(
                path, self.images.dataset, self.scores, self.logits
            ),
            "report.html": build_report(self),
            # written last: whoever finds it finds the other files, too
            EVALUATION_FILE: self._write_evaluation,
        }

    def write_table(self, path: Path) -> None:
        """Write predictions.csv for people: a line for each image, with the probability of each
        class in the digits of a float32: 0.7 GB for 50,000 images of 1,000 classes."""
        scores, images = self.scores, self.images
        names = [escape_formula(name) for name in self.bundle.class_names]

        def join(marks: Bools) -> list[str]:
            return ["|".join(names[place] for place in np.flatnonzero(row)) for row in marks]

        columns: dict[str, Sequence[Any]] = {"path": list(map(escape_formula, images.ids))}
        if scores.is_multilabel:
            columns |= {"labels": join(scores.labels), "predicted": join(scores.predicted)}
        else:
            columns |= {
                "label": [names[label] for label in scores.labels],
                "predicted": [names[label] for label in scores.predicted],
                "probability": scores.confidence.tolist(),
            }
        columns["loss"] = scores.loss.tolist()
        if images.dataset.groups is not None:
            columns["group"] = [escape_formula(printable(name)) for name in images.dataset.groups]
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*columns, *(f"probability of {name}" for name in names)])
            rows = zip(*columns.values(), strict=True)
            for part in chunk_rows(scores.probabilities):
                # numpy's texts are the shortest, and many times faster than one number at a time
                texts = scores.probabilities[part].astype(np.float32).astype("U16").tolist()
                writer.writerows([*next(rows), *values] for values in texts)

    def _write_evaluation(self, path: Path) -> None:
        evaluation = self.evaluation
        if self.has_new_point:
            # the evaluation is of the file beside it
            sha256 = compute_sha256(path.with_name(MODEL_FILE))
            evaluation = evaluation.model_copy(update={"model_sha256": sha256})
        path.write_text(format_json(evaluation.model_dump(mode="json")), encoding="utf-8")

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write the files in the main process. See `Result.save`."""
        if self.is_main:
            super().save(directory, overwrite=overwrite)


def find_evaluation(model: str, sha256: str) -> Evaluation | None:
    """Return the latest evaluation of the model file with this hash, in or beside the run that
    `model` names; None if there is none."""
    run = Path(model) if Path(model).is_dir() else Path(model).parent
    found = []
    for path in (*run.glob(f"*/{EVALUATION_FILE}"), *run.parent.glob(f"*/{EVALUATION_FILE}")):
        # a file of another version, or a damaged one, is skipped
        with suppress(ValueError, OSError):
            found.append(Evaluation.model_validate_json(path.read_bytes()))
    own = [each for each in found if each.model_sha256 == sha256]
    return max(own, key=lambda each: each.conditions.get("time", ""), default=None)
