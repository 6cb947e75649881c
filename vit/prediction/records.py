"""Predictions as records, JSON lines and CSV."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, TextIO, TypedDict

import numpy as np
from numpy.typing import NDArray

from vit.prediction.conformal import is_unusual
from vit.prediction.neighbours import Similar
from vit.prediction.probabilities import Float32s, Floats
from vit.runtime.arguments import is_control_character, replace_control_characters
from vit.runtime.documents import escape_formula
from vit.runtime.files import FileContent, Result

# index, name and probability, the most probable first
TopClasses = list[tuple[int, str, float]]


class _Class(TypedDict):
    index: int
    name: str
    probability: float


# "class" is there if it is known
_Similar = TypedDict("_Similar", {"path": str, "class": NotRequired[str], "similarity": float})
# name of a column → an array with an entry for each image
Columns = dict[str, Any]


def find_note(
    p_value: float | None, prediction_set: Sequence[object] | None, *, is_decided: bool
) -> str:
    """Return "unusual" for an image unlike the training images, else "unsure" if the prediction set
    doesn't have exactly one class; empty without a doubt or without thresholds. The threshold of a
    label or of an operating point decides in any case, so that nothing is unsure. See `Prediction`
    for the arguments."""
    if is_unusual(p_value):
        return "unusual"
    is_unsure = prediction_set is not None and len(prediction_set) != 1 and not is_decided
    return "unsure" if is_unsure else ""


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, or why there are none.

    Attributes:
        path: The image's path; "image 0" for the first PIL image or array.
        classes: Index, name and probability, the most probable first. With an operating point, the
            class that it predicts comes first.
        error: Why the image can't be read.
        prediction_set: Names of the classes that include the right one as often as `coverage` says,
            the most probable first; None if the model file holds no threshold. Of several labels an
            image, this fraction of its labels is among them on average.
        p_value: Small if the image is unusual: the fraction of held-out images that are at least as
            far from the training images. None if the model file can't tell.
        features: Pooled features that the head reads, float32 [D]; None unless asked for.
        similar: The most similar training images; None unless asked for.
        labels: Names of the labels that the image is predicted to have, the most probable first;
            None for a model of one class an image.
        is_decided: True if thresholds say what is predicted: those of labels, or the operating
            point's.
        uncertainty: See `vit.prediction.decision.measure_uncertainty`.
        probabilities: Probability of every class, [C]; None unless asked for.
        precision: Precision of the forward pass, such as "float32".
    """

    path: str
    classes: TopClasses
    error: str | None = None
    prediction_set: list[str] | None = None
    p_value: float | None = None
    features: Float32s | None = field(default=None, compare=False, repr=False)
    similar: list[Similar] | None = None
    labels: list[str] | None = None
    is_decided: bool = False
    uncertainty: float = field(default=0.0, compare=False)
    probabilities: Floats | None = field(default=None, compare=False, repr=False)
    precision: str = ""

    @property
    def note(self) -> str:
        """The doubt about the answer, see `find_note`."""
        return find_note(self.p_value, self.prediction_set, is_decided=self.is_decided)

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

        def write(path: Path) -> None:
            # names of files may be any bytes
            with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
                for _ in write_jsonl(self.predictions, file=file):
                    pass

        return {"predictions.jsonl": write}


def build_columns(
    predictions: Sequence[Prediction],
    *,
    num_classes: int,
    num_features: int | None,
    has_labels: bool,
) -> Columns:
    """Return predictions as arrays of equal length, with the names of columns that all formats of
    predictions share.

    Args:
        predictions: Predictions with their `probabilities`.
        num_classes: Number of classes C.
        num_features: Number of features D; None: there is no column of embeddings.
        has_labels: An image may have several labels.
    """

    def build(values: Iterable[object]) -> NDArray[np.object_]:
        listed = list(values)
        # numpy would make a matrix of lists of equal length
        column = np.empty(len(listed), dtype=object)
        column[:] = listed
        return column

    def stack(rows: Iterable[Any], width: int) -> Float32s:
        missing = np.full(width, np.nan, dtype=np.float32)
        stacked = [missing if row is None else row for row in rows]
        return np.array(stacked, dtype=np.float32).reshape(-1, width)

    def as_floats(values: Iterable[float | None]) -> Floats:
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    columns: Columns = {
        "path": build(each.path for each in predictions),
        "predicted": build(each.predicted for each in predictions),
        "probability": as_floats(each.probability for each in predictions),
        "note": build(each.note for each in predictions),
    }
    if has_labels:
        columns["labels"] = build(each.labels for each in predictions)
    columns |= {
        "prediction_set": build(each.prediction_set for each in predictions),
        "p_value": as_floats(each.p_value for each in predictions),
        "probabilities": stack((each.probabilities for each in predictions), num_classes),
    }
    if num_features is not None:
        columns["embedding"] = stack((each.features for each in predictions), num_features)
    columns["precision"] = build(each.precision for each in predictions)
    columns["error"] = build(each.error for each in predictions)
    return columns


def describe_classes(classes: TopClasses) -> list[_Class]:
    """Return classes as objects for JSON."""
    return [
        {"index": index, "name": name, "probability": probability}
        for index, name, probability in classes
    ]


def describe_similar(images: Sequence[Similar]) -> list[_Similar]:
    """Return similar training images as objects for JSON."""
    described: list[_Similar] = []
    for image in images:
        described.append({"path": image.path, "similarity": image.similarity})
        if image.class_name:
            described[-1]["class"] = image.class_name
    return described


class Record(TypedDict):
    """A line of predictions.jsonl. An image that can't be read has its path and `error`; the others
    have all keys but this, `labels` with several labels an image, and what was asked for."""

    path: str
    predicted: NotRequired[str | None]
    probability: NotRequired[float | None]
    labels: NotRequired[list[str]]
    predictions: NotRequired[list[_Class]]
    note: NotRequired[str]
    prediction_set: NotRequired[list[str] | None]
    p_value: NotRequired[float | None]
    similar: NotRequired[list[_Similar]]
    embedding: NotRequired[list[float]]
    error: NotRequired[str]
    precision: NotRequired[str]


def write_jsonl(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write a JSON object on a line for each prediction, with escapes for control characters, and
    yield the prediction once it is written."""
    for prediction in predictions:
        record: Record = {"path": prediction.path}
        if prediction.error is None:
            record["predicted"] = prediction.predicted
            record["probability"] = prediction.probability
            if prediction.labels is not None:
                record["labels"] = prediction.labels
            record["predictions"] = describe_classes(prediction.classes)
            record["note"] = prediction.note
            record["prediction_set"] = prediction.prediction_set
            record["p_value"] = prediction.p_value
            if prediction.similar is not None:
                record["similar"] = describe_similar(prediction.similar)
            if prediction.features is not None:
                # with the fewest digits that a float32 is read back from
                record["embedding"] = list(map(float, prediction.features.astype("U16")))
        else:
            record["error"] = prediction.error
        if prediction.precision:
            record["precision"] = prediction.precision
        line = json.dumps(record, ensure_ascii=False)
        if not line.isprintable():
            line = "".join(
                json.dumps(character)[1:-1] if is_control_character(character) else character
                for character in line
            )
        file.write(f"{line}\n")
        yield prediction


def write_csv(
    predictions: Iterable[Prediction], *, file: TextIO, with_header: bool = True
) -> Iterator[Prediction]:
    """Write a line for each image, and yield the prediction once it is written.

    The columns are the path, what is predicted and its probability, the note, for a model of
    several labels an image its labels with bars between them, the classes of the prediction set,
    the p-value, the error, the precision, and class_1 or label_1, probability_1 and so on for as
    many classes as the first image that can be read has.
    Names have � for control characters, and an apostrophe where a spreadsheet would see a formula.
    """
    # without carriage returns, so that command-line tools can read the last column
    writer = csv.writer(file, lineterminator="\n")
    predictions = iter(predictions)
    # images that can't be read come before the first line that shows the number of classes
    waiting: list[Prediction] = []
    for prediction in predictions:
        waiting.append(prediction)
        if prediction.error is None:
            break
    num_classes = len(waiting[-1].classes) if waiting else 0
    ranks = range(1, num_classes + 1)
    has_labels = bool(waiting) and waiting[-1].labels is not None
    kind = "label" if has_labels else "class"
    columns = [f"{name}_{rank}" for rank in ranks for name in (kind, "probability")]
    header = ["path", "predicted", "probability", "note", *(["labels"] if has_labels else [])]
    if with_header:
        header += ["prediction_set", "p_value", "error", "precision"]
        writer.writerow((*header, *columns))
    for prediction in chain(waiting, predictions):
        cells: list[object] = [format_cell(prediction.path)]
        cells += [format_cell(prediction.predicted or ""), prediction.probability, prediction.note]
        for names in (prediction.labels, prediction.prediction_set)[0 if has_labels else 1 :]:
            cells.append("|".join(map(format_cell, names or ())))
        cells.append("" if prediction.p_value is None else prediction.p_value)
        cells += [format_cell(prediction.error or ""), prediction.precision]
        for _, name, probability in prediction.classes:
            cells += [format_cell(name), probability]
        writer.writerow(cells)
        yield prediction


def write_table(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write a line for a reader for each image, and yield the prediction once it is written: the
    most probable class, its probability, the note and the path, whole, so that it can be copied.

    Of several labels an image, all that are predicted, and the probability of the first one, if it is
    among those that are shown."""
    width = 16
    for prediction in predictions:
        path = replace_control_characters(prediction.path, keep_bytes=True)
        if prediction.error is not None:
            file.write(f"{path}: {replace_control_characters(prediction.error)}\n")
        else:
            _, name, probability = prediction.classes[0]
            percent = f"{100 * probability:5.1f} %"
            if prediction.labels is not None:
                # thresholds may leave out the most probable label
                found = {name: value for _, name, value in prediction.classes}
                first = next(iter(prediction.labels), "")
                percent = f"{100 * found[first]:5.1f} %" if first in found else ""
                name = ", ".join(prediction.labels) or "no label"
            name = replace_control_characters(name)
            # a longer name moves the columns; the lines before it are printed already
            width = max(width, len(name))
            note = prediction.note
            file.write(f"{percent:7}  {name:{width}}  {note:7}  {path}\n")
        yield prediction


def format_cell(text: str) -> str:
    """Return text as a cell of CSV, see `write_csv`."""
    # bytes of names that aren't UTF-8 pass through: the name must still find its file
    return escape_formula(replace_control_characters(text, keep_bytes=True))
