"""The files of an evaluation: `evaluation.json`, whose schema this is, and `predictions.csv`.

`Evaluation.model_json_schema()` is the schema as JSON Schema. `schema_version` rises when a key
goes or changes its meaning; a new key alone doesn't raise it. Fractions are 0 to 1, never per cent.
"""

import csv
import html
import io
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from vit.evaluation.calibration import Calibration
from vit.evaluation.cost import Cost
from vit.evaluation.examples import Examples
from vit.evaluation.metrics import Bin, Scores
from vit.evaluation.overlap import TrainTestOverlap
from vit.evaluation.per_class import ClassMetrics
from vit.evaluation.prediction_sets import SetMetrics
from vit.runtime.arguments import shorten
from vit.runtime.documents import check_schema, read_json, read_table
from vit.runtime.files import write_json

EVALUATION_FILE = "evaluation.json"
PREDICTIONS_FILE = "predictions.csv"
COLUMNS = ("path", "label", "predicted", "probability", "label_probability", "loss", "rank")


class Evaluation(BaseModel):
    """The metrics of one model on one set of images, and the conditions they were measured
    under."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 2
    top1: float = Field(
        title="Top-1 accuracy", description="fraction of images whose label has the highest logit"
    )
    top5: float = Field(
        title="Top-5 accuracy",
        description="fraction of images whose label is among the five highest logits",
    )
    loss: float = Field(title="Loss", description="mean cross-entropy of the logits, nats")
    macro_f1: float = Field(
        title="Macro F1", description="mean F1 of the classes that occur as label or prediction"
    )
    macro_precision: float = Field(
        title="Macro precision", description="mean precision of the classes that occur"
    )
    macro_recall: float = Field(
        title="Macro recall", description="mean recall of the classes that occur"
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
    # 95 % confidence interval of each of these
    intervals: dict[str, tuple[float, float]]
    # every class of the model, in its order
    per_class: list[ClassMetrics]
    reliability: list[Bin]
    # null where no temperature was ever fitted
    calibration: Calibration | None

    # null where the model file holds no thresholds
    prediction_sets: list[SetMetrics] | None = None

    # images evaluated: the denominator of every metric
    num_images: int
    # images left out, with the reason
    unreadable: list[tuple[str, str]]
    # null where it is not known
    duplicates_of_training: TrainTestOverlap | None
    examples: Examples

    # top-1 at severities 1 to 5 of each
    corruptions: dict[str, list[float]] | None
    # mean of 1 - top-1 over corruptions and severities
    mean_corruption_error: float | None
    cost: Cost

    # name of the data set
    data: str
    split: str
    # what to know about these images
    notes: list[str]
    # of the decoded pixels, labels, class names and split
    fingerprint: str
    # path or name it was loaded from
    model: str
    model_sha256: str
    # of the training run: configuration and images that it began with
    run_id: str | None = None
    # of the images that it was trained on
    training_fingerprint: str | None = None
    # hash of the training configuration without seed and machine
    recipe: str | None
    # of the training run
    seed: int | None
    # device, precision, batch size, tta (hflip or null), command, time, versions
    conditions: dict[str, str | None]

    def __repr__(self) -> str:
        """One line: notebooks show a result that ends a cell."""
        low, high = self.intervals["top1"]
        return (
            f"Evaluation({self.num_images} images of {self.data} ({self.split}),"
            f" top1={self.top1:.4f} ({low:.4f} to {high:.4f}))"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """The metrics as a table, in a notebook."""
        rows = []
        for name in self.list_metrics():
            low, high = self.intervals[name]
            rows.append(f"<tr><td>{name}<td>{getattr(self, name):.4f}<td>{low:.4f} … {high:.4f}")
        headings = "<tr><th>metric<th>value<th>95 % interval"
        return f"<p>{html.escape(repr(self))}<table>{headings}{''.join(rows)}</table>"

    def list_metrics(self) -> list[str]:
        """The metrics that say something each: top-5 from ten classes on, no second name of another
        one's figure."""
        redundant = set()
        if len(self.per_class) < 10:
            redundant.add("top5")
        if self.calibration is None:
            # the loss
            redundant.add("nll")
        if len({row.support for row in self.per_class}) == 1:
            # top-1
            redundant.add("macro_recall")
        return [name for name in self.intervals if name not in redundant]

    def describe_accuracy(self) -> str:
        """The accuracy in a plain sentence, beside that of answers which no model is needed for."""
        low, high = self.intervals["top1"]
        # in tenths where no more is known, and where they don't hide the errors
        unit = 10
        if high - low < 0.1 or round(unit * self.top1) in (0, unit):
            unit = 100
        # outwards; a product such as 0.7 * 10 may lie above the whole number by its last bit
        least = math.floor(round(unit * low, 6))
        most = math.ceil(round(unit * high, 6))
        majority = max(row.support for row in self.per_class) / self.num_images
        return (
            f"{unit * self.top1:.0f} in {unit} images are classified correctly; between {least} and"
            f" {most} with 95 % confidence. Always the most frequent class: {majority:.1%};"
            f" guessing: {1 / len(self.per_class):.1%}"
        )

    def list_warnings(self) -> list[str]:
        """What to know before a metric is quoted, in sentences."""
        warnings = list(self.notes)
        if self.unreadable:
            warnings.append(
                f"{len(self.unreadable)} images could not be read and are not counted; the first is"
                f" {': '.join(self.unreadable[0])}"
            )
        overlap = self.duplicates_of_training
        if overlap is not None and overlap.exact + overlap.near > 0:
            text = (
                f"{overlap.exact} of these images were in training, {overlap.near} more are"
                f" near-duplicates of one that was: {', '.join(overlap.examples[:3])}"
            )
            if overlap.top1_without is not None:
                text += (
                    f"; top-1 is {self.top1:.2%} with them and {overlap.top1_without:.2%} without"
                )
            warnings.append(text)
        return warnings


def save_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write `evaluation` as JSON, whole or not at all."""
    write_json(path, evaluation.model_dump(mode="json"))


def load_evaluation(path: Path) -> Evaluation:
    """Read an evaluation file.

    Raises:
        ValueError: says what is wrong with it.
    """
    try:
        return check_schema(Evaluation, read_json(path), origin="it")
    except ValueError as error:
        raise ValueError(
            f"{path} is not an evaluation of this version: {error}; evaluate again"
        ) from None


def find_evaluation(model: str, sha256: str) -> Evaluation | None:
    """The latest evaluation of the model whose file has this hash, in or beside the run directory
    that `model` names; None where there is none."""
    run = Path(model) if Path(model).is_dir() else Path(model).parent
    evaluations = []
    for path in (*run.glob(f"*/{EVALUATION_FILE}"), *run.parent.glob(f"*/{EVALUATION_FILE}")):
        # of another version, or damaged
        with suppress(ValueError, OSError):
            evaluations.append(load_evaluation(path))
    return max(
        (evaluation for evaluation in evaluations if evaluation.model_sha256 == sha256),
        key=lambda evaluation: evaluation.conditions.get("time") or "",
        default=None,
    )


def format_predictions(scores: Scores, *, ids: Sequence[str], class_names: tuple[str, ...]) -> str:
    """Return the text of predictions.csv: a line for each image, floats in full precision."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    columns = (
        ids,
        [class_names[label] for label in scores.labels],
        [class_names[label] for label in scores.predicted],
        scores.confidence.tolist(),
        scores.label_probability.tolist(),
        scores.loss.tolist(),
        scores.rank.tolist(),
    )
    writer.writerows(zip(*columns, strict=True))
    return file.getvalue()


def load_predictions(path: Path) -> dict[str, list[str]]:
    """Read the columns of a predictions file, by name.

    Raises:
        ValueError: names the line that is wrong.
    """
    rows: list[list[str]] = []
    table = read_table(path)
    _, header = next(table, ("", []))
    if header != list(COLUMNS):
        raise ValueError(f"{path} line 1 is not {','.join(COLUMNS)}; evaluate again")
    for line, row in table:
        if len(row) != len(COLUMNS):
            raise ValueError(f"{line} has {len(row)} fields instead of {len(COLUMNS)}")
        # the number of a class
        if not row[-1].isdecimal() or len(row[-1]) > 9:
            raise ValueError(f"{line}: rank {shorten(row[-1])!r} is not a number; evaluate again")
        rows.append(row)
    return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}
