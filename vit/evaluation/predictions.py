"""predictions.csv: a line for each evaluated image, with the probability of each class or label."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit.evaluation.metrics import Scores
from vit.prediction.probabilities import Bools, chunk_rows
from vit.runtime.documents import escape_formula

PREDICTIONS_FILE = "predictions.csv"
# separates the labels of an image
SEPARATOR = "|"


def write_predictions(
    path: Path,
    scores: Scores,
    *,
    ids: Sequence[str],
    class_names: Sequence[str],
    groups: Sequence[str] | None = None,
    files: Sequence[str] | None = None,
) -> None:
    """Write predictions.csv.

    The column `path` has the image's name in its data set, by which `vit compare` pairs
    evaluations, and `file` its path from the working directory. The probability of each class has the fewest
    digits that a float32 is read back from: 14 bytes a value, 0.7 GB for 50,000 images of 1,000
    classes. Those of labels and the other numbers have the full precision of a float64.

    Args:
        path: The file.
        scores: Scores of the images.
        ids: Name of each image.
        class_names: Name of each class or label.
        groups: Group of each image; None: there is no such column.
        files: Path of each image, empty if it isn't a file; None: there is no such column.
    """
    names = [escape_formula(name) for name in class_names]

    def join(marks: Bools) -> list[str]:
        return [SEPARATOR.join(names[place] for place in np.flatnonzero(row)) for row in marks]

    columns: dict[str, Sequence[Any]] = {"path": list(map(escape_formula, ids))}
    if scores.is_multilabel:
        columns |= {"labels": join(scores.labels), "predicted": join(scores.predicted)}
        columns["loss"] = scores.loss.tolist()
    else:
        columns |= {
            "label": [names[label] for label in scores.labels],
            "predicted": [names[label] for label in scores.predicted],
            "probability": scores.confidence.tolist(),
            "label_probability": scores.label_probability.tolist(),
            "loss": scores.loss.tolist(),
            "rank": scores.rank.tolist(),
        }
    for name, values in (("group", groups), ("file", files)):
        if values is not None:
            columns[name] = list(map(escape_formula, values))
    texts: Iterable[Sequence[Any]] = (
        scores.probabilities.tolist()
        if scores.is_multilabel
        else (
            row
            for rows in chunk_rows(scores.probabilities)
            # numpy's texts are the shortest, and many times faster than one number after another
            for row in scores.probabilities[rows].astype(np.float32).astype("U16").tolist()
        )
    )
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *(f"probability of {name}" for name in class_names)])
        rows = zip(*columns.values(), strict=True)
        writer.writerows([*row, *values] for row, values in zip(rows, texts, strict=True))
