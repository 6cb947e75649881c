"""The result of an evaluation and its files: `evaluation.json`, with its schema, `predictions.csv`
and others.

`Evaluation.model_json_schema()` returns the schema as JSON Schema. `schema_version` rises when a
key is removed or changes its meaning, not when a key is added. Fractions are 0 to 1, not percent.
"""

import html
import math
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from vit.bundle import MODEL_FILE, Bundle
from vit.evaluation.calibration import save_fitted
from vit.evaluation.clusters import Interval
from vit.evaluation.examples import Examples
from vit.evaluation.images import EvaluationSet, TrainTestOverlap, describe_unreadable
from vit.evaluation.label_metrics import LabelMetrics
from vit.evaluation.metrics import Bin, ClassMetrics, Scores
from vit.evaluation.predictions import PREDICTIONS_FILE, write_predictions
from vit.evaluation.subgroups import SubgroupTable
from vit.evaluation.thresholds import ThresholdRates
from vit.prediction.conformal import SetMetrics
from vit.prediction.ensemble import list_members
from vit.prediction.probabilities import Float32s
from vit.runtime.files import FileContent, Result, expand_home, write_json
from vit.runtime.numbers import format_interval, format_number, format_percent

EVALUATION_FILE = "evaluation.json"
SCHEMA_VERSION = 3
# metrics that are fractions; the others are shown as plain numbers
_FRACTIONS = ("top1", "top5", "macro_f1", "macro_precision", "macro_recall")


@dataclass(frozen=True)
class Cost:
    """The cost of a model.

    Attributes:
        parameters: Number of parameters.
        flops_per_image: Floating-point operations of one image; a multiply-add counts as two.
        images_per_second: Speed of the evaluation, which waits for images, too; None of written
            predictions.
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


class Shown:
    """An evaluation as notebooks show it."""

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """Return the metrics as a table."""
        cells = [
            f"<tr><td>{row.title}<td>{row.value}<td>{row.interval}" for row in self.list_rows()
        ]
        headings = "<tr><th>metric<th>value<th>95 % interval"
        return f"<p>{html.escape(repr(self))}<table>{headings}{''.join(cells)}</table>"

    def list_rows(self) -> list[MetricRow]:
        """Return the metrics as tables for people show them."""
        raise NotImplementedError


def build_row(evaluation: Any, name: str, *, is_fraction: bool) -> MetricRow:
    """Build the row of a metric; fractions are shown in percent, other values as plain numbers."""
    field = type(evaluation).model_fields[name]
    value, interval = getattr(evaluation, name), evaluation.intervals.get(name)
    shown, bounds = "–", ""
    if value is not None and is_fraction:
        shown = format_percent(value, evaluation.num_images)
        bounds = format_interval(interval, evaluation.num_images)
    elif value is not None:
        shown = format_number(value)
        bounds = "–".join(map(format_number, interval or ()))
    return MetricRow(field.title, shown, bounds, field.description)


class Evaluation(Shown, BaseModel):
    """The metrics of one model on one set of images, and the conditions of the measurement."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[3] = 3
    top1: float = Field(
        title="Top-1 accuracy", description="fraction of images whose label has the highest logit"
    )
    top5: float = Field(
        title="Top-5 accuracy",
        description="fraction of images whose label is among the five highest logits",
    )
    loss: float = Field(title="Loss", description="mean cross-entropy of the logits, nats")
    macro_f1: float = Field(title="Macro F1", description="mean F1 of the classes that have images")
    macro_precision: float = Field(
        title="Macro precision", description="mean precision of the classes that have images"
    )
    macro_recall: float = Field(
        title="Macro recall", description="mean recall of the classes that have images"
    )
    ece: float = Field(
        title="Calibration error",
        description="expected calibration error (ECE) over 15 bins of equal width",
    )
    brier: float = Field(
        title="Brier score",
        description="squared difference of probabilities and one-hot label, 0 to 2",
    )
    nll: float = Field(
        title="Negative log-likelihood",
        description="mean cross-entropy after temperature scaling, nats",
    )
    # 95 % confidence interval of each metric above
    intervals: dict[str, Interval]
    # every class of the model, in its order
    per_class: list[ClassMetrics]
    # the rarer of two classes, or the class of the operating point, against the rest
    against_rest: LabelMetrics | None = None
    reliability: list[Bin]
    # divisor of the logits before the softmax; 1 if none was fitted
    temperature: float = 1.0
    # rule by which the threshold of a class was chosen; null without an operating point
    operating_point: str | None = None

    # accuracy by the values of each column of --by
    subgroups: list[SubgroupTable] = []
    # null if the model file holds no thresholds
    prediction_sets: list[SetMetrics] | None = None

    # number of evaluated images, the denominator of every metric, and of their groups
    num_images: int
    num_groups: int
    # images that were left out, each with the reason
    unreadable: list[tuple[str, str]]
    # null if it isn't known which images were in training
    duplicates_of_training: TrainTestOverlap | None
    examples: Examples

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
        low, high = self.intervals["top1"]
        return (
            f"Evaluation({self.num_images} images of {self.data} ({self.split}),"
            f" top1={self.top1:.4f} ({low:.4f} to {high:.4f}))"
        )

    def list_rows(self) -> list[MetricRow]:
        rows = [
            build_row(self, name, is_fraction=name in _FRACTIONS) for name in self.list_metrics()
        ]
        rest = self.against_rest
        if rest is not None:
            for title, rate, bounds in (
                ("ROC AUC", rest.roc_auc, rest.roc_auc_interval),
                ("Average precision", rest.average_precision, rest.average_precision_interval),
            ):
                if rate is not None:
                    value = format_percent(rate, self.num_images)
                    interval = format_interval(bounds, self.num_images)
                    title = f"{title} of {rest.name}"
                    rows.append(MetricRow(title, value, interval, "this class against the rest"))
        return rows

    def list_metrics(self) -> list[str]:
        """Return the names of the metrics worth showing: top-5 only from ten classes on, and no
        metric that equals another one."""
        redundant = set()
        if len(self.per_class) < 10:
            redundant.add("top5")
        # without a temperature it equals the loss
        if self.temperature == 1:
            redundant.add("nll")
        # with equally many images of each class it equals top-1
        if len({row.support for row in self.per_class if row.support}) == 1:
            redundant.add("macro_recall")
        return [name for name in self.intervals if name not in redundant]

    def beats_guessing(self) -> bool:
        """Return whether the model is better than guessing, beyond what chance gives: the 95 %
        interval of its accuracy lies above that of always predicting the most frequent class, or
        with an operating point that of the area under the ROC curve above a half."""
        if self._decided is not None and self.against_rest is not None:
            return self.against_rest.roc_auc_interval[0] > 0.5
        return self.intervals["top1"][0] > self._majority

    @property
    def _majority(self) -> float:
        """Accuracy of always predicting the most frequent class."""
        return max(row.support for row in self.per_class) / self.num_images

    @property
    def _decided(self) -> ThresholdRates | None:
        """Rates at the operating point; None without one."""
        rest = self.against_rest
        return rest.thresholds[0] if self.operating_point and rest and rest.thresholds else None

    def describe_accuracy(self) -> str:
        """Return the accuracy, or the rates at the operating point, in a sentence."""
        count = self.num_images
        rates, rest = self._decided, self.against_rest
        if rates is not None and rest is not None:
            others = count - rest.support
            alarms = rest.predicted - round(rates.sensitivity * rest.support)
            return (
                f"{rest.predicted - alarms:,} of {rest.support:,} images with {rest.name} are found"
                f" ({format_percent(rates.sensitivity, rest.support)}; 95 % interval"
                f" {format_interval(rates.sensitivity_interval, rest.support)}), with {alarms:,} false"
                f" alarms in {others:,} other images"
                f" ({format_percent(1 - rates.specificity, others)}). A person has to look at"
                f" {rest.predicted:,} of {count:,} images."
            )
        return (
            f"{round(self.top1 * count):,} of {count:,} images are classified correctly"
            f" ({format_percent(self.top1, count)}; 95 % interval"
            f" {format_interval(self.intervals['top1'], count)})."
        )

    def describe_guessing(self) -> str:
        """Compare the accuracy with that of always predicting the most frequent class, or the
        operating point with as many images at random."""
        rates, rest = self._decided, self.against_rest
        if rates is not None and rest is not None:
            share = format_percent(rest.predicted / self.num_images, self.num_images)
            return f"As many images at random would have {share} of them."
        percent = format_percent(self._majority, self.num_images)
        always = "always predicting the most frequent class"
        if self.top1 <= self._majority:
            return f"That is no better than guessing: {always} gives {percent}."
        if not self.beats_guessing():
            few = f"{self.num_images:,} images"
            if self.num_groups < self.num_images:
                few += f" in {self.num_groups:,} groups"
            return (
                f"That may be no better than guessing: {always} gives {percent}, and {few} are too few"
                " to tell."
            )
        return f"By comparison, {always} gives {percent}."

    def list_warnings(self) -> list[str]:
        """Return what a reader should know before quoting a metric, in sentences."""
        warnings = [*self.notes, *describe_unreadable(self.unreadable)]
        overlap = self.duplicates_of_training
        if overlap is not None and (text := overlap.describe()):
            if overlap.top1_without is not None:
                text += (
                    f"; the accuracy is {format_percent(self.top1, self.num_images)} with them and"
                    f" {format_percent(overlap.top1_without, self.num_images)} without"
                )
            warnings.append(text)
        return warnings


@dataclass(frozen=True, repr=False)
class SavedEvaluation(Result):
    """An evaluation with its files, and with the model file if an operating point was chosen.

    Attributes:
        evaluation: The metrics and the conditions.
        scores: Contribution of each image to the metrics.
        images: The images.
        bundle: The model, with its operating point.
        is_main: True in the process that writes files.
        has_new_values: True if no model file has these yet; `save` writes one.
        seconds: Work of the evaluation by `read_work_clock`; the maps of the report take no more.
    """

    evaluation: Any
    scores: Any
    images: EvaluationSet
    bundle: Bundle
    _: KW_ONLY
    is_main: bool = True
    has_new_values: bool = False
    seconds: float = math.inf

    def __repr__(self) -> str:
        name = type(self.evaluation).__name__
        return f"{type(self).__name__}{repr(self.evaluation).removeprefix(name)}"

    def _repr_html_(self) -> str:
        """Return the metrics as a table, for a notebook."""
        return str(self.evaluation._repr_html_())

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write what `vit evaluate` writes: predictions.csv, the page, the model file if an operating
        point was chosen, and last evaluation.json.

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
        names = [Path(member.name) for member in list_members(self.bundle)]
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


@dataclass(frozen=True, repr=False)
class EvaluationResult(SavedEvaluation):
    """An `Evaluation`, and what each image contributed to it.

    Attributes:
        logits: Logits of the images, [n, C].
    """

    evaluation: Evaluation
    scores: Scores
    logits: Float32s

    def build_files(self) -> dict[str, FileContent]:
        # templates and maps, which not every evaluation needs
        from vit.evaluation.report.confusion import plot_confusion
        from vit.evaluation.report.report import build_report

        names = self.bundle.class_names
        figure = plot_confusion(self.scores, class_names=names)
        return {
            PREDICTIONS_FILE: partial(
                write_predictions,
                scores=self.scores,
                ids=self.images.ids,
                class_names=names,
                logits=self.logits,
                groups=self.images.groups,
                files=self.images.files,
            ),
            "confusion.png": partial(figure.savefig, format="png", dpi=120),
            "report.html": build_report(self),
        }
