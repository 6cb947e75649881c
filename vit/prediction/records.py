"""Predictions as records: JSON lines, CSV and lines for a reader, which a stopped command goes on
with."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from vit.prediction.conformal import MAX_P_UNUSUAL
from vit.prediction.neighbours import Similar
from vit.prediction.probabilities import Float32s, Floats
from vit.runtime.arguments import replace_control_characters, shorten
from vit.runtime.documents import escape_formula
from vit.runtime.files import FileContent, Result, expand_home

# index, name and probability, the most probable first
TopClasses = list[tuple[int, str, float]]
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
    "precision",
    "error",
)


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, or why there are none.

    Attributes:
        path: The image's path; "image 0" for the first PIL image or array.
        classes: Index, name and probability, the most probable first. With an operating point, the
            class that it predicts comes first.
        error: Why the image can't be read.
        prediction_set: Names of the classes that include the right one for 95 % of images, the most
            probable first; None if the model file holds no threshold, and where the thresholds of
            labels or of an operating point decide.
        p_value: Small if the image is unusual: the fraction of held-out images that are at least as
            far from the training images. None if the model file can't tell.
        features: Pooled features that the head reads, float32 [D]; None unless asked for.
        similar: The most similar training images; None unless asked for.
        labels: Names of the labels that the image is predicted to have, the most probable first;
            None for a model of one class an image.
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
    probabilities: Floats | None = field(default=None, compare=False, repr=False)
    precision: str = ""

    @property
    def note(self) -> str:
        """The doubt about the answer: "unusual" for an image unlike the training images, else
        "unsure" if the prediction set doesn't have exactly one class; empty without a doubt or
        without thresholds."""
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
        `labels` with several labels an image, and what was asked for.
        """
        record: dict[str, Any] = {"path": self.path}
        if self.error is not None:
            record["error"] = self.error
        else:
            record |= {"predicted": self.predicted, "probability": self.probability}
            if self.labels is not None:
                record["labels"] = self.labels
            record |= {
                "predictions": describe_classes(self.classes),
                "note": self.note,
                "prediction_set": self.prediction_set,
                "p_value": self.p_value,
            }
            if self.similar is not None:
                record["similar"] = describe_similar(self.similar)
            if self.features is not None:
                # with the fewest digits that a float32 is read back from
                record["embedding"] = list(map(float, self.features.astype("U16")))
        if self.precision:
            record["precision"] = self.precision
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

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8") as file:
                for _ in write_jsonl(self.predictions, file=file):
                    pass

        return {"predictions.jsonl": write}


def describe_classes(classes: TopClasses) -> list[dict[str, Any]]:
    """Return classes as objects for JSON."""
    return [
        {"index": index, "name": name, "probability": probability}
        for index, name, probability in classes
    ]


def describe_similar(images: Sequence[Similar]) -> list[dict[str, Any]]:
    """Return similar training images as objects for JSON; the class is there if it is known."""
    described = []
    for image in images:
        values = asdict(image)
        if class_name := values.pop("class_name"):
            values["class"] = class_name
        described.append(values)
    return described


def write_jsonl(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write a JSON object on a line for each prediction, and yield the prediction once it is
    written. Control characters, and names that aren't UTF-8, are escaped."""
    for prediction in predictions:
        file.write(f"{json.dumps(prediction.to_dict())}\n")
        yield prediction


def write_csv(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write `COLUMNS` of each image, and yield the prediction once it is written. Names have � for
    control characters, and an apostrophe where a spreadsheet would see a formula; several have bars
    between them."""
    # without carriage returns, so that command-line tools can read the last column
    writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for prediction in predictions:
        writer.writerow({key: _format(value) for key, value in prediction.to_dict().items()})
        yield prediction


def _format(value: Any) -> Any:
    """Return a value of `Prediction.to_dict` as a cell of CSV, see `write_csv`."""
    if isinstance(value, list):
        return "|".join(map(str, map(_format, value)))
    if isinstance(value, str):
        # bytes of names that aren't UTF-8 pass through: the name must still find its file
        return escape_formula(replace_control_characters(value, keep_bytes=True))
    return value


def write_table(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write a line for a reader for each image, and yield the prediction once it is written: the
    predicted class or labels, the probability, the note and the path, whole, so that it can be
    copied."""
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
                # it may be beyond the classes that were asked for
                percent = ""
                if first in found:
                    percent = f"{100 * found[first]:5.1f} %"
                name = ", ".join(prediction.labels) or "no label"
            name = replace_control_characters(name)
            # a longer name moves the columns; the lines before it are printed already
            width = max(width, len(name))
            file.write(f"{percent:7}  {name:{width}}  {prediction.note:7}  {path}\n")
        yield prediction


def write_output(
    path: str | Path,
    items: Items,
    predict: Callable[[Items], Iterable[Prediction]],
    *,
    resume: bool = False,
) -> Iterator[Prediction]:
    """Write predictions into a file as they are made, and yield each once it is written.

    Args:
        path: FILE.jsonl or FILE.csv.
        items: Name and content of each image.
        predict: Function that predicts items.
        resume: Go on after the lines that FILE.jsonl has; a torn last line is cut.

    Raises:
        ValueError: The file has another name, it is there already, or its lines are of other
            images.
    """
    path = expand_home(path)
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"--output {path} ends neither in .jsonl nor in .csv")
    if resume and path.suffix == ".csv":
        raise ValueError(f"--resume goes on with JSON lines; name a .jsonl file instead of {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}; make it")
    if path.exists() and not resume:
        raise ValueError(f"{path} is there already; add --resume, or choose another --output")
    # a file of a command that was stopped; without one, all is still to do
    if resume and path.exists():
        _skip(path, items)
    write = {".jsonl": write_jsonl, ".csv": write_csv}[path.suffix]
    # a line is written whole, at once; a second process finds the file
    with path.open(
        "a" if resume else "x", encoding="utf-8", errors="surrogateescape", buffering=1
    ) as file:
        yield from write(predict(items), file=file)
        file.flush()
        os.fsync(file.fileno())


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
                raise ValueError(
                    f"line {number:,} of {path} is no prediction; choose another --output"
                ) from None
            image, _ = next(items, ("missing", None))
            if image != name:
                raise ValueError(
                    f"line {number:,} of {path} is {shorten(name, 100)}, and that image is now"
                    f" {shorten(image, 100)}; name the same images, or choose another --output"
                )
            end += len(line)
    os.truncate(path, end)
