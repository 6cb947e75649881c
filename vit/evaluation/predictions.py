"""predictions.csv: a line for each evaluated image, with the probability of each class or label."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit.evaluation.label_metrics import LabelScores
from vit.evaluation.metrics import Scores
from vit.prediction.probabilities import Float32s, chunk_rows, compute_log_probabilities
from vit.runtime.arguments import shorten
from vit.runtime.documents import escape_formula, read_table

PREDICTIONS_FILE = "predictions.csv"
COLUMNS = ("path", "label", "predicted", "probability", "label_probability", "loss", "rank")
# columns that a file of an earlier version may lack; the group only where images come in groups
GROUP_COLUMN = "group"
FILE_COLUMN = "file"
# separates the labels of an image
SEPARATOR = "|"
_PROBABILITY = "probability of "


def write_predictions(
    path: Path,
    scores: Scores,
    *,
    ids: Sequence[str],
    class_names: Sequence[str],
    logits: Float32s,
    groups: Sequence[str] | None = None,
    files: Sequence[str] | None = None,
) -> None:
    """Write predictions.csv of a model of one class an image.

    The column `path` has the image's name in its data set, by which `vit compare` pairs evaluations,
    and `file` its path from the working directory. The probability of each class has the fewest
    digits that a float32 is read back from: 14 bytes a value, 0.7 GB for 50,000 images of 1,000
    classes. The other numbers have the full precision of a float64.

    Args:
        path: The file.
        scores: Scores of the images.
        ids: Name of each image.
        class_names: Name of each class.
        logits: [n, C], from which the probabilities are computed, part by part.
        groups: Group of each image; None: there is no such column.
        files: Path of each image, empty if it isn't a file; None: there is no such column.
    """
    names = [escape_formula(name) for name in class_names]
    columns = {
        "path": list(map(escape_formula, ids)),
        "label": [names[label] for label in scores.labels],
        "predicted": [names[label] for label in scores.predicted],
        "probability": scores.confidence.tolist(),
        "label_probability": scores.label_probability.tolist(),
        "loss": scores.loss.tolist(),
        "rank": scores.rank.tolist(),
    }
    probabilities = (
        np.exp(compute_log_probabilities(logits[rows], scores.temperature)).astype(np.float32)
        for rows in chunk_rows(logits)
    )
    # numpy's texts are the shortest, and many times faster than one number after another
    texts = (row for chunk in probabilities for row in chunk.astype("U16").tolist())
    _write(path, columns, class_names, texts, groups=groups, files=files)


def write_label_predictions(
    path: Path,
    scores: LabelScores,
    *,
    ids: Sequence[str],
    class_names: Sequence[str],
    groups: Sequence[str] | None = None,
    files: Sequence[str] | None = None,
) -> None:
    """Write predictions.csv of a model of several labels an image: for each image its labels, the
    predicted ones and the probability of each label, in full precision. See `write_predictions`."""
    names = [escape_formula(name) for name in class_names]

    def join(marks: np.ndarray) -> list[str]:
        places = map(np.flatnonzero, marks)
        return [SEPARATOR.join(names[place] for place in row.tolist()) for row in places]

    columns = {
        "path": list(map(escape_formula, ids)),
        "labels": join(scores.labels),
        "predicted": join(scores.predicted),
        "loss": scores.loss.tolist(),
    }
    _write(path, columns, class_names, scores.probabilities.tolist(), groups=groups, files=files)


def _write(
    path: Path,
    columns: Mapping[str, Sequence[Any]],
    class_names: Sequence[str],
    probabilities: Iterable[Sequence[Any]],
    *,
    groups: Sequence[str] | None,
    files: Sequence[str] | None,
) -> None:
    columns = dict(columns)
    for name, values in ((GROUP_COLUMN, groups), (FILE_COLUMN, files)):
        if values is not None:
            columns[name] = list(map(escape_formula, values))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *(f"{_PROBABILITY}{name}" for name in class_names)])
        rows = zip(*columns.values(), strict=True)
        writer.writerows([*row, *values] for row, values in zip(rows, probabilities, strict=True))


def load_predictions(path: Path) -> dict[str, list[str]]:
    """Return the columns of a predictions file by name, without the probability of each class.

    Raises:
        ValueError: A line is wrong; the message names it.
    """
    rows: list[list[str]] = []
    table = read_table(path)
    _, header = next(table, ("", []))
    places = [place for place, name in enumerate(header) if not name.startswith(_PROBABILITY)]
    names = [header[place] for place in places]
    num_known = len(COLUMNS)
    others = set(names[num_known:])
    if tuple(names[:num_known]) != COLUMNS or not others <= {GROUP_COLUMN, FILE_COLUMN}:
        raise ValueError(f"{path} line 1 is not {','.join(COLUMNS)}; evaluate again")
    rank = header.index("rank")
    for line, row in table:
        if len(row) != len(header):
            raise ValueError(f"{line} has {len(row)} fields instead of {len(header)}")
        # the number of a class
        if not row[rank].isdecimal() or len(row[rank]) > 9:
            raise ValueError(f"{line}: rank {shorten(row[rank])!r} is not a number; evaluate again")
        rows.append([row[place] for place in places])
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
