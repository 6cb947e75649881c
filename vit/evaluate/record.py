"""What an evaluation leaves: `evaluation.json` (this schema) and `predictions.csv`.

`Evaluation.model_json_schema()` is the schema as JSON Schema. `schema_version` rises when a key goes or
changes its meaning; a new key alone doesn't raise it. Shares are 0…1, never per cent.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vit.evaluate.metrics import Bin, ClassFigures, Floats, Ints, Scores
from vit.files import write_atomically, write_text

SCHEMA_VERSION = 1
EVALUATION_FILE = "evaluation.json"
PREDICTIONS_FILE = "predictions.csv"
COLUMNS = ("path", "label", "predicted", "probability", "label_probability", "loss", "rank")


class Evaluation(BaseModel):
    """The figures of one model on one set of images, and their conditions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION

    top1: float = Field(description="share of images whose label is the highest logit")
    top5: float = Field(description="share of images whose label is among the five highest logits")
    loss: float = Field(description="mean cross-entropy of the logits, nats")
    macro_f1: float = Field(description="mean F1 of the classes that occur as label or prediction")
    macro_precision: float
    macro_recall: float
    ece: float = Field(description="expected calibration error, 15 bins of equal width")
    brier: float = Field(description="mean squared distance of probabilities from truth, summed over classes")
    nll: float = Field(
        description="mean cross-entropy of the probabilities, nats: the loss after the temperature"
    )
    intervals: dict[str, tuple[float, float]] = Field(
        description="95 % bootstrap interval of each figure above"
    )
    per_class: list[ClassFigures] = Field(description="every class of the model, in its order")
    reliability: list[Bin]

    num_images: int = Field(description="images evaluated: the denominator of every figure")
    unreadable: list[tuple[str, str]] = Field(description="images left out, with the reason")
    duplicates_of_training: dict[str, Any] | None = Field(
        default=None,
        description="evaluated images seen in training: exact and near counts, examples; null: not known",
    )

    data: str = Field(description="name of the data set")
    split: str
    fingerprint: str = Field(description="of the decoded pixels, labels, class names and split")
    model: str = Field(description="as named on the command line")
    model_sha256: str
    recipe: str | None = Field(
        default=None, description="hash of the training configuration without its seed"
    )
    seed: int | None = Field(default=None, description="of the training run")
    conditions: dict[str, str] = Field(description="device, precision, batch size, command, versions, time")


@dataclass(frozen=True)
class Predictions:
    """The columns of a predictions file that a comparison needs."""

    ids: list[str]
    labels: list[str]
    predicted: list[str]
    loss: Floats
    rank: Ints


def save_predictions(path: Path, scores: Scores, *, ids: Sequence[str], class_names: tuple[str, ...]) -> None:
    """One line an image, floats in full."""

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            numbers = (scores.confidence, scores.label_probability, scores.loss, scores.rank)
            writer.writerows(
                zip(
                    ids,
                    (class_names[label] for label in scores.labels),
                    (class_names[label] for label in scores.predicted),
                    *(column.tolist() for column in numbers),
                    strict=True,
                )
            )

    write_atomically(path, write)


def load_predictions(path: Path) -> Predictions:
    """Read a predictions file. Raises ValueError naming the line that is wrong."""
    rows: list[list[str]] = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        if next(reader, None) != list(COLUMNS):
            raise ValueError(f"{path} line 1 is not {','.join(COLUMNS)}; evaluate again")
        for row in reader:
            if len(row) != len(COLUMNS):
                raise ValueError(
                    f"{path} line {reader.line_num} has {len(row)} fields instead of {len(COLUMNS)}"
                )
            rows.append(row)
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    try:
        loss, rank = np.array(columns[5], dtype=np.float64), np.array(columns[6], dtype=np.int64)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; evaluate again") from error
    return Predictions(
        ids=list(columns[0]), labels=list(columns[1]), predicted=list(columns[2]), loss=loss, rank=rank
    )


def save_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write `evaluation` as JSON, whole or not at all."""
    write_text(path, json.dumps(evaluation.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")


def load_evaluation(path: Path) -> Evaluation:
    """Read an evaluation file. Raises ValueError with what is wrong with it."""
    try:
        return Evaluation.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"{path} is no evaluation of this version: {key} {first['msg']}; evaluate again"
        ) from None
