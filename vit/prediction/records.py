"""Predictions as records, and as JSON lines, CSV or lines for a reader."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from vit.prediction.conformal import MAX_P_UNUSUAL
from vit.prediction.probabilities import Float32s
from vit.runtime.arguments import replace_control_characters, shorten
from vit.runtime.documents import escape_formula
from vit.runtime.files import FileContent, Result, expand_home

# name and content of each image
Items = Iterator[tuple[str, Any]]
# columns of CSV, the keys of `Prediction.to_dict` that fit into cells
COLUMNS = (
    "path",
    "predicted",
    "probability",
    "note",
    "labels",
    "prediction_set",
    "p_value",
    "error",
)


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image, or the reason why the image can't be read.

    Attributes:
        path: The image's path; "image 0" for the first PIL image or array.
        classes: Index, name and probability of the most probable classes, in this order. With an
            operating point, the class that it predicts comes first.
        error: Why the image can't be read.
        prediction_set: Names of the classes that include the right one for 95 % of images, the most
            probable first; None if the model file holds no threshold, and where the thresholds of
            labels or of an operating point decide.
        p_value: Small if the image is unusual: the fraction of held-out images that are at least as
            far from the training images. None if the model file can't tell.
        labels: Names of the labels that the image is predicted to have, the most probable first;
            None for a model of one class an image.
        probabilities: Probability of every class, float32 [C]; NaN for an image that can't be read.
    """

    path: str
    classes: list[tuple[int, str, float]]
    error: str | None = None
    prediction_set: list[str] | None = None
    p_value: float | None = None
    labels: list[str] | None = None
    probabilities: Sequence[Any] | Float32s = field(default=(), compare=False, repr=False)

    @property
    def note(self) -> str:
        """The doubt about the answer: "unusual" for an image unlike the training images, else
        "unsure" if the prediction set doesn't have exactly one class, else empty."""
        if self.p_value is not None and self.p_value <= MAX_P_UNUSUAL:
            return "unusual"
        if self.prediction_set is not None and len(self.prediction_set) != 1:
            return "unsure"
        return ""

    @property
    def predicted(self) -> str | None:
        """Name of the predicted class, or of the labels with bars between them; None for an image
        that can't be read."""
        if self.error is not None:
            return None
        return self.classes[0][1] if self.labels is None else "|".join(self.labels)

    @property
    def probability(self) -> float | None:
        """Probability of the first of the `classes`; None for an image that can't be read."""
        return self.classes[0][2] if self.classes else None

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as plain values: a line of JSON, whose keys CSV has as columns.

        An image that can't be read has its path and `error`; the others have all keys but this,
        and `labels` with several labels an image.
        """
        record: dict[str, Any] = {"path": self.path}
        if self.error is not None:
            record["error"] = self.error
        else:
            record |= {"predicted": self.predicted, "probability": self.probability}
            if self.labels is not None:
                record["labels"] = self.labels
            record |= {
                "predictions": [
                    {"index": index, "name": name, "probability": probability}
                    for index, name, probability in self.classes
                ],
                "note": self.note,
                "prediction_set": self.prediction_set,
                "p_value": self.p_value,
            }
        return record


@dataclass(frozen=True, repr=False)
class PredictionResult(Result):
    """Predictions in the order of the images."""

    predictions: list[Prediction]

    def __repr__(self) -> str:
        """One line, because notebooks show a result that ends a cell."""
        num_unreadable = sum(item.error is not None for item in self.predictions)
        return f"PredictionResult({len(self.predictions)} images, {num_unreadable} unreadable)"

    def build_files(self) -> dict[str, FileContent]:
        """Return predictions.jsonl, with a JSON object for each image."""
        lines = (f"{json.dumps(each.to_dict())}\n" for each in self.predictions)
        return {"predictions.jsonl": "".join(lines)}


def write_predictions(
    predictions: Iterable[Prediction], *, file: IO[str], kind: str, header: Sequence[str] = ()
) -> Iterator[Prediction]:
    """Write a line for each prediction, and yield the prediction once it is written.

    Args:
        kind: "jsonl": JSON objects, in which control characters and names that aren't UTF-8 are
            escaped. "csv": `COLUMNS`, with � for control characters, an apostrophe where a
            spreadsheet would see a formula, and bars between several names. "table": lines for a
            reader, with the path whole, so that it can be copied.
        header: Columns of CSV instead: the image, and the probability of each class.
    """
    # without carriage returns, so that command-line tools can read the last column
    table = csv.writer(file, lineterminator="\n")
    if kind == "csv":
        table.writerow(map(_format_cell, header or COLUMNS))
    for prediction in predictions:
        if header:
            # an id of a table stays as it is there
            table.writerow([prediction.path, *prediction.probabilities])
        elif kind == "csv":
            cells = prediction.to_dict()
            table.writerow(_format_cell(cells.get(name)) for name in COLUMNS)
        elif kind == "table":
            file.write(f"{_format_line(prediction)}\n")
        else:
            file.write(f"{json.dumps(prediction.to_dict())}\n")
        yield prediction


def _format_cell(value: Any) -> Any:
    if isinstance(value, list):
        return "|".join(map(str, map(_format_cell, value)))
    if isinstance(value, str):
        # bytes of names that aren't UTF-8 pass through: the name must still find its file
        return escape_formula(replace_control_characters(value, keep_bytes=True))
    return value


def _format_line(prediction: Prediction) -> str:
    path = replace_control_characters(prediction.path, keep_bytes=True)
    if prediction.error is not None:
        return f"{path}: {replace_control_characters(prediction.error)}"
    _, name, probability = prediction.classes[0]
    percent = f"{100 * probability:5.1f} %"
    if prediction.labels is not None:
        # each label has a probability of its own
        percent, name = "", ", ".join(prediction.labels) or "no label"
    return f"{percent:7}  {replace_control_characters(name):16}  {prediction.note:7}  {path}"


def write_output(
    path: str | Path,
    items: Items,
    predict: Callable[[Items], Iterable[Prediction]],
    header: Sequence[str] = (),
    *,
    resume: bool = False,
) -> Iterator[Prediction]:
    """Write predictions of items into FILE.jsonl or FILE.csv as they are made, and yield each once
    it is written. `resume` goes on after the lines that FILE.jsonl has; a torn last line is cut.

    Raises:
        ValueError: The file has another name, it is there already, or its lines are of other
            images.
        OSError: The file can't be written.
    """
    path = expand_home(path)
    if path.suffix != ".jsonl" and (resume or path.suffix != ".csv"):
        raise ValueError(
            f"{path} ends neither in .jsonl nor in .csv; --resume goes on with .jsonl alone"
        )
    if path.exists():
        if not resume:
            raise ValueError(f"{path} is there already; add --resume, or choose another --output")
        _skip(path, items)
    # a line is written whole, at once; a second process finds the file
    mode = "a" if resume else "x"
    with path.open(mode, encoding="utf-8", errors="surrogateescape", buffering=1) as file:
        kind = path.suffix[1:]
        yield from write_predictions(predict(items), file=file, kind=kind, header=header)


def _skip(path: Path, items: Items) -> None:
    """Leave out the images whose lines a file has, and cut a torn last line."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                name = json.loads(line)["path"]
            except (ValueError, KeyError, TypeError):
                name = "no prediction"
            image, _ = next(items, ("missing", None))
            if image != name:
                raise ValueError(
                    f"line {number:,} of {path} is {shorten(str(name), 100)}, and that image is now"
                    f" {shorten(image, 100)}; name the same images, or choose another --output"
                )
            end += len(line)
    os.truncate(path, end)
