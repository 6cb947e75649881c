"""The files of an evaluation: `evaluation.json`, whose schema this is, and `predictions.csv`.

`Evaluation.model_json_schema()` is the schema as JSON Schema. `schema_version` rises when a key goes or
changes its meaning; a new key alone doesn't raise it. Fractions are 0 to 1, never per cent.
"""

import csv
import io
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from vit.evaluation.cost import Cost
from vit.evaluation.evaluated_images import Duplication
from vit.evaluation.metrics import Bin, ClassMetrics, Scores
from vit.runtime.arguments import shorten
from vit.runtime.documents import check_schema, read_json, read_table
from vit.runtime.files import write_text

EVALUATION_FILE = "evaluation.json"
PREDICTIONS_FILE = "predictions.csv"
COLUMNS = ("path", "label", "predicted", "probability", "label_probability", "loss", "rank")


@dataclass(frozen=True)
class Example:
    """One image and its prediction."""

    path: str
    label: str
    predicted: str
    probability: float  # of the predicted class
    label_probability: float


@dataclass(frozen=True)
class Examples:
    """Errors, correct predictions of low confidence and likely label errors; the clearest cases first."""

    confident_mistakes: list[Example]
    uncertain_hits: list[Example]
    label_errors: list[Example]
    num_label_errors: int  # of all images, by confident learning


@dataclass(frozen=True)
class Calibration:
    """Metrics of the probabilities before and after the temperature."""

    temperature: float
    fitted_on: dict[str, str | int]  # split, num_images and fingerprint of the validation images
    before: dict[str, float]  # ece, brier, nll
    after: dict[str, float]


class Evaluation(BaseModel):
    """The metrics of one model on one set of images, and the conditions they were measured under."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    top1: float = Field(title="Top-1 accuracy", description="fraction of images whose label has the highest logit")
    top5: float = Field(
        title="Top-5 accuracy", description="fraction of images whose label is among the five highest logits"
    )
    loss: float = Field(title="Loss", description="mean cross-entropy of the logits, nats")
    macro_f1: float = Field(title="Macro F1", description="mean F1 of the classes that occur as label or prediction")
    macro_precision: float = Field(title="Macro precision", description="mean precision of the classes that occur")
    macro_recall: float = Field(title="Macro recall", description="mean recall of the classes that occur")
    ece: float = Field(
        title="Calibration error", description="expected calibration error (ECE) over 15 bins of equal width"
    )
    brier: float = Field(
        title="Brier score", description="squared difference of probabilities and one-hot label, 0 to 2"
    )
    nll: float = Field(
        title="Negative log-likelihood", description="mean cross-entropy after temperature scaling, nats"
    )
    intervals: dict[str, tuple[float, float]] = Field(description="95 % bootstrap confidence interval of each of these")
    per_class: list[ClassMetrics] = Field(description="every class of the model, in its order")
    reliability: list[Bin]
    calibration: Calibration | None = Field(description="null where no temperature was ever fitted")

    num_images: int = Field(description="images evaluated: the denominator of every metric")
    unreadable: list[tuple[str, str]] = Field(description="images left out, with the reason")
    duplicates_of_training: Duplication | None = Field(description="null where it is not known")
    examples: Examples

    corruptions: dict[str, list[float]] | None = Field(description="top-1 at severities 1 to 5 of each")
    mean_corruption_error: float | None = Field(description="mean of 1 - top-1 over corruptions and severities")
    sweeps: dict[str, list[tuple[float, float]]] | None = Field(
        description="(amount, top-1): shift_right and shift_down as fractions of the side, rotate in degrees"
    )
    cost: Cost

    data: str = Field(description="name of the data set")
    split: str
    notes: list[str] = Field(description="what to know about these images")
    fingerprint: str = Field(description="of the decoded pixels, labels, class names and split")
    model: str = Field(description="path or name it was loaded from")
    model_sha256: str
    run_id: str | None = Field(None, description="of the training run: configuration and images that it began with")
    recipe: str | None = Field(description="hash of the training configuration without seed and machine")
    seed: int | None = Field(description="of the training run")
    conditions: dict[str, str] = Field(description="device, precision, batch size, command, time, versions")

    def list_metrics(self) -> list[str]:
        """The metrics that say something each: no top-5 of five classes, no second name of another one's figure."""
        left_out = {"top5"} if len(self.per_class) <= 5 else set()
        if self.calibration is None:
            left_out.add("nll")  # the loss
        if len({each.support for each in self.per_class}) == 1:
            left_out.add("macro_recall")  # top-1
        return [name for name in self.intervals if name not in left_out]

    def list_warnings(self) -> list[str]:
        """What to know before a metric is quoted, in sentences."""
        warnings = list(self.notes)
        if self.unreadable:
            first, count = ": ".join(self.unreadable[0]), len(self.unreadable)
            warnings.append(f"{count} images could not be read and are not counted; the first is {first}")
        seen = self.duplicates_of_training
        if seen is not None and seen.exact + seen.near > 0:
            warnings.append(
                f"{seen.exact} of these images were in training, {seen.near} more are near-duplicates of one that was: "
                f"{', '.join(seen.examples[:3])}"
            )
        return warnings


def save_predictions(path: Path, scores: Scores, *, ids: Sequence[str], class_names: tuple[str, ...]) -> None:
    """Write one line for each image, floats in full precision."""
    labels, predicted = ([class_names[i] for i in indices] for indices in (scores.labels, scores.predicted))
    numbers = (scores.confidence, scores.label_probability, scores.loss, scores.rank)
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(zip(ids, labels, predicted, *(column.tolist() for column in numbers), strict=True))
    write_text(path, file.getvalue())


def load_predictions(path: Path) -> dict[str, list[str]]:
    """The columns of a predictions file by name. Raises ValueError naming the line that is wrong."""
    rows: list[list[str]] = []
    table = read_table(path)
    if next(table, ("", []))[1] != list(COLUMNS):
        raise ValueError(f"{path} line 1 is not {','.join(COLUMNS)}; evaluate again")
    for where, row in table:
        if len(row) != len(COLUMNS):
            raise ValueError(f"{where} has {len(row)} fields instead of {len(COLUMNS)}")
        if not re.fullmatch(r"[0-9]{1,9}", row[-1]):
            raise ValueError(f"{where}: rank {shorten(row[-1])!r} is no number of classes; evaluate again")
        rows.append(row)
    return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}


def save_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write `evaluation` as JSON, whole or not at all."""
    write_text(path, json.dumps(evaluation.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")


def load_evaluation(path: Path) -> Evaluation:
    """Read an evaluation file. Raises ValueError with what is wrong with it."""
    try:
        return check_schema(Evaluation, read_json(path), origin="it")
    except ValueError as error:
        raise ValueError(f"{path} is not an evaluation of this version: {error}; evaluate again") from None


def find_evaluation(model: str, sha256: str) -> Evaluation | None:
    """The latest evaluation of the model whose file has this hash, in or beside the run directory that `model` names;
    None where there is none."""
    run = Path(model) if Path(model).is_dir() else Path(model).parent
    found = []
    for path in (*run.glob(f"*/{EVALUATION_FILE}"), *run.parent.glob(f"*/{EVALUATION_FILE}")):
        with suppress(ValueError, OSError):  # of another version, or damaged
            found.append(load_evaluation(path))
    ours = [evaluation for evaluation in found if evaluation.model_sha256 == sha256]
    return max(ours, key=lambda evaluation: evaluation.conditions.get("time", ""), default=None)
