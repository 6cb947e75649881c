"""The result of an evaluation and its files: evaluation.json, predictions.csv and report.html.

`schema_version` rises when a key is removed or changes its meaning, not when a key is added.
Fractions are 0 to 1, not percent.
"""

import html
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from vit.bundle import MODEL_FILE, Bundle
from vit.evaluation.calibration import save_fitted
from vit.evaluation.clusters import Interval
from vit.evaluation.images import EvaluationSet, TrainTestOverlap
from vit.evaluation.metrics import Bin, ClassMetrics, Scores
from vit.evaluation.predictions import PREDICTIONS_FILE, write_predictions
from vit.evaluation.subgroups import SubgroupTable
from vit.evaluation.thresholds import ThresholdRates
from vit.prediction.conformal import SetMetrics
from vit.runtime.documents import check_schema, read_json
from vit.runtime.files import FileContent, Result, expand_home, write_json
from vit.runtime.numbers import format_interval, format_number, format_percent

EVALUATION_FILE = "evaluation.json"
SCHEMA_VERSION = 3
# metric → its name for readers, and what it is
_TITLES = {
    "top1": ("Top-1 accuracy", "fraction of images whose class is predicted"),
    "top5": ("Top-5 accuracy", "fraction of images whose class is among the five most probable"),
    "map": ("Mean average precision", "area under the precision-recall curve, mean of the labels"),
    "roc_auc": ("ROC AUC", "area under the ROC curve, mean of the labels"),
    "macro_f1": ("Macro F1", "mean F1 of the classes or labels that have images"),
    "macro_recall": ("Macro recall", "mean recall of the classes that have images"),
    "micro_f1": ("Micro F1", "F1 of all pairs of image and label together"),
    "exact_match": ("Exact match", "fraction of images of which all labels are right"),
    "loss": ("Loss", "mean cross-entropy of the probabilities, nats"),
    "ece": ("Calibration error", "expected calibration error (ECE) over 15 bins of equal width"),
    "brier": ("Brier score", "squared difference of probabilities and one-hot label, 0 to 2"),
}
# metrics that are no fractions, and are shown as plain numbers
_NUMBERS = ("loss", "ece", "brier")


@dataclass(frozen=True)
class Cost:
    """The cost of a model.

    Attributes:
        parameters: Number of parameters.
        flops_per_image: Floating-point operations of one image; a multiply-add counts as two.
        images_per_second: Speed of the evaluation, which waits for images, too; None of the
            predictions of `vit train --folds`.
    """

    parameters: int
    flops_per_image: int
    images_per_second: float | None


class MetricRow(NamedTuple):
    """A metric as tables for people show it."""

    title: str
    value: str
    interval: str
    about: str


class Evaluation(BaseModel):
    """The metrics of one model on one set of images, and the conditions of the measurement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[3] = 3
    task: Literal["classes", "multilabel"]
    # null where no image has a label that the metric needs
    metrics: dict[str, float | None]
    # 95 % confidence interval of the metrics that have one
    intervals: dict[str, Interval]
    # every class or label of the model, in its order
    per_class: list[ClassMetrics]
    # confidence and accuracy of the predicted class, or of all pairs of image and label
    reliability: list[Bin]
    # divisor of the logits before the softmax or the sigmoid; 1 if none was fitted
    temperature: float = 1.0
    # rule by which the thresholds were chosen; null without an operating point
    operating_point: str | None = None

    # the metric by the values of each column of --by
    subgroups: list[SubgroupTable] = []
    # null if the model file holds no threshold of prediction sets
    prediction_sets: SetMetrics | None = None

    # number of evaluated images, the denominator of every metric, and of their groups
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
        # four digits, so that two results can be told apart
        name = self.headline
        value = self.metrics[name]
        low, high = self.intervals[name]
        shown = "–" if value is None else f"{value:.4f}"
        return (
            f"Evaluation({self.num_images} images of {self.data} ({self.split}),"
            f" {name}={shown} ({low:.4f} to {high:.4f}))"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the metrics as a table, for a notebook."""
        cells = [
            f"<tr><td>{row.title}<td>{row.value}<td>{row.interval}" for row in self.list_rows()
        ]
        headings = "<tr><th>metric<th>value<th>95 % interval"
        return f"<p>{html.escape(repr(self))}<table>{headings}{''.join(cells)}</table>"

    def list_rows(self) -> list[MetricRow]:
        """Return the metrics as tables for people show them: top-5 only from ten classes on, and no
        metric that equals another one."""
        redundant = set()
        if len(self.per_class) < 10:
            redundant.add("top5")
        # with equally many images of each class it equals top-1
        if len({row.support for row in self.per_class if row.support}) == 1:
            redundant.add("macro_recall")
        shown = [
            (*_TITLES[name], self.metrics[name], self.intervals.get(name), name in _NUMBERS)
            for name in self.metrics
            if name not in redundant
        ]
        # a model of two classes is quoted by its curves, too
        if rest := self.one_against_rest:
            about = "this class against the rest"
            areas = (
                ("ROC AUC", rest.roc_auc, rest.roc_auc_interval),
                ("Average precision", rest.average_precision, rest.average_precision_interval),
            )
            shown += [
                (f"{title} of {rest.name}", about, value, bounds, False)
                for title, value, bounds in areas
                if value is not None
            ]
        return [self._build_row(*cells) for cells in shown]

    def _build_row(
        self, title: str, about: str, value: float | None, bounds: Interval | None, is_number: bool
    ) -> MetricRow:
        if value is None:
            return MetricRow(title, "–", "", about)
        if is_number:
            return MetricRow(title, format_number(value), "", about)
        interval = format_interval(bounds, self.num_images) if bounds else ""
        return MetricRow(title, format_percent(value, self.num_images), interval, about)

    @property
    def one_against_rest(self) -> ClassMetrics | None:
        """The class of the operating point, or the rarer of two classes, with its curves; None for
        labels, more classes and images of one class."""
        # both of two classes have thresholds
        rows = [row for row in self.per_class if row.thresholds]
        if self.is_multilabel or not rows:
            return None
        return min(rows, key=lambda row: row.support)

    @property
    def _decided(self) -> tuple[ClassMetrics, ThresholdRates] | None:
        """The class of the operating point and its rates; None without one."""
        rest = self.one_against_rest
        return (rest, rest.thresholds[0]) if self.operating_point and rest else None

    @property
    def _guess(self) -> float:
        """Metric of guessing: accuracy of always predicting the most frequent class, or mean
        average precision of a random order, which is the mean frequency of the labels."""
        supports = [row.support for row in self.per_class if row.support]
        if not self.is_multilabel:
            return max(supports) / self.num_images
        return sum(supports) / max(len(supports), 1) / self.num_images

    def beats_guessing(self) -> bool:
        """Return whether the model is better than guessing, beyond what chance gives: the 95 %
        interval of its headline lies above that of guessing, or with an operating point that of the
        area under the ROC curve above a half."""
        if decided := self._decided:
            return decided[0].roc_auc_interval[0] > 0.5
        return self.intervals[self.headline][0] > self._guess

    def describe_accuracy(self) -> str:
        """Return the headline in a sentence: the accuracy, or the rates at the operating point."""
        count = self.num_images
        percent = partial(format_percent, count=count)
        interval = format_interval(self.intervals[self.headline], count)
        value = self.metrics[self.headline]
        if self.is_multilabel:
            right = round((self.metrics["exact_match"] or 0) * count)
            shown = "–" if value is None else percent(value)
            return (
                f"All labels are right on {right:,} of {count:,} images. The mean average precision"
                f" is {shown} (95 % interval {interval})."
            )
        if decided := self._decided:
            row, rates = decided
            others, found = count - row.support, round(rates.sensitivity * row.support)
            return (
                f"{found:,} of {row.support:,} images with {row.name} are found"
                f" ({format_percent(rates.sensitivity, row.support)}; 95 % interval"
                f" {format_interval(rates.sensitivity_interval, row.support)}), with"
                f" {row.predicted - found:,} false alarms in {others:,} other images"
                f" ({format_percent(1 - rates.specificity, others)}). A person has to look at"
                f" {row.predicted:,} of {count:,} images."
            )
        assert value is not None
        return (
            f"{round(value * count):,} of {count:,} images are classified correctly"
            f" ({percent(value)}; 95 % interval {interval})."
        )

    def describe_guessing(self) -> str:
        """Compare the headline with that of guessing."""
        percent = partial(format_percent, count=self.num_images)
        if self.is_multilabel:
            return f"Guessing would give {percent(self._guess)}."
        if decided := self._decided:
            share = percent(decided[0].predicted / self.num_images)
            return f"As many images at random would have {share} of them."
        always = f"always predicting the most frequent class gives {percent(self._guess)}"
        if (self.metrics["top1"] or 0) <= self._guess:
            return f"That is no better than guessing: {always}."
        if not self.beats_guessing():
            few = f"{self.num_images:,} images"
            if self.num_groups < self.num_images:
                few += f" in {self.num_groups:,} groups"
            return f"That may be no better than guessing: {always}, and {few} are too few to tell."
        return f"By comparison, {always}."

    def list_warnings(self) -> list[str]:
        """Return what a reader should know before quoting a metric, in sentences."""
        warnings = list(self.notes)
        if self.unreadable:
            warnings.append(
                f"{len(self.unreadable)} images could not be read and are not counted, the first:"
                f" {': '.join(self.unreadable[0])}"
            )
        missing = [row.name for row in self.per_class if not row.support]
        if self.is_multilabel and missing:
            warnings.append(f"no image has the label {', '.join(missing)}: its metrics are –")
        overlap = self.duplicates_of_training
        if overlap is not None and (text := overlap.describe()):
            if overlap.accuracy_without is not None:
                name = "exact_match" if self.is_multilabel else "top1"
                percent = partial(format_percent, count=self.num_images)
                text += (
                    f"; {_TITLES[name][0].lower()} is {percent(self.metrics[name] or 0)} with them"
                    f" and {percent(overlap.accuracy_without)} without"
                )
            warnings.append(text)
        return warnings


@dataclass(frozen=True, repr=False)
class EvaluationResult(Result):
    """An evaluation with its files, and with the model file if an operating point was chosen.

    Attributes:
        evaluation: The metrics and the conditions.
        scores: Prediction of each image.
        images: The images.
        bundle: The model, with its operating point.
        num_examples: Errors that the report shows.
        is_main: True in the process that writes files.
        has_new_values: True if no model file has the operating point yet; `save` writes one.
    """

    evaluation: Evaluation
    scores: Scores
    images: EvaluationSet
    bundle: Bundle
    num_examples: int = 16
    is_main: bool = True
    has_new_values: bool = False

    def __repr__(self) -> str:
        return f"EvaluationResult{repr(self.evaluation).removeprefix('Evaluation')}"

    def _repr_html_(self) -> str:
        """Return the metrics as a table, for a notebook."""
        return self.evaluation._repr_html_()

    def build_files(self) -> dict[str, FileContent]:
        # templates and maps, which not every evaluation needs
        from vit.evaluation.report.report import build_report

        return {
            PREDICTIONS_FILE: partial(
                write_predictions,
                scores=self.scores,
                ids=self.images.ids,
                class_names=self.bundle.class_names,
                groups=self.images.groups,
                files=self.images.files,
            ),
            "report.html": build_report(self),
        }

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write what `vit evaluate` writes: predictions.csv, the page, the model file if an
        operating point was chosen, and last evaluation.json.

        Args:
            directory: New or empty directory.
            overwrite: Replace an earlier result of vit in it.

        Raises:
            FileExistsError: It holds files, and `overwrite` is not set or vit did not make them.
            ValueError: It holds the evaluated model.
        """
        if not self.is_main:
            return
        output = expand_home(directory)
        names = map(Path, self.bundle.metadata.get("models", [self.bundle.name]))
        if any(name.resolve().is_relative_to(output.resolve()) for name in names):
            raise ValueError(f"{directory} holds the evaluated model; choose another --output")
        # evaluation.json is written last: whoever finds it finds the other files, too
        super().save(directory, overwrite=overwrite)
        evaluation = self.evaluation
        if self.has_new_values:
            # the evaluation is of this file
            sha256 = save_fitted(self.bundle, output / MODEL_FILE)
            evaluation = evaluation.model_copy(update={"model_sha256": sha256})
        write_json(output / EVALUATION_FILE, evaluation.model_dump(mode="json"))


def load_evaluation(path: Path) -> Evaluation:
    """Read an evaluation file.

    Raises:
        ValueError: The file is damaged or from another version.
    """
    try:
        values = read_json(path)
        version = values.get("schema_version") if isinstance(values, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"it has schema version {version}, not {SCHEMA_VERSION}")
        return check_schema(Evaluation, values, origin="it")
    except ValueError as error:
        raise ValueError(
            f"{path} is not an evaluation of this version: {error}; evaluate again"
        ) from None


def find_evaluation(model: str, sha256: str) -> Evaluation | None:
    """Return the latest evaluation of the model file with this hash, in or beside the run that
    `model` names; None if there is none."""
    run = Path(model) if Path(model).is_dir() else Path(model).parent
    evaluations = []
    for path in (*run.glob(f"*/{EVALUATION_FILE}"), *run.parent.glob(f"*/{EVALUATION_FILE}")):
        # a file of another version, or a damaged one, is skipped
        with suppress(ValueError, OSError):
            evaluations.append(load_evaluation(path))
    return max(
        (evaluation for evaluation in evaluations if evaluation.model_sha256 == sha256),
        key=lambda evaluation: evaluation.conditions.get("time") or "",
        default=None,
    )
