"""predictions.csv: a line for each evaluated image, with the probability of each class or label."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
LABEL_COLUMNS = ("path", "labels", "predicted", "loss")
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


def _read_rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Read the place and the fields of each line, the header first, which is empty if there is
    none. Raises ValueError for a line of another number of fields."""
    table = read_table(path)
    line, header = next(table, ("", []))
    yield line, header
    for line, row in table:
        if len(row) != len(header):
            raise ValueError(f"{line} has {len(row)} fields instead of {len(header)}")
        yield line, row


def load_label_predictions(
    path: Path, class_names: Sequence[str]
) -> tuple[dict[str, list[str]], LabelScores]:
    """Return the columns of a predictions file of several labels an image by name, and the scores.

    Raises:
        ValueError: A line is wrong; the message names it.
    """
    places = {name: place for place, name in enumerate(class_names)}
    # reading a cell undoes the escape of its first name alone
    places |= {escape_formula(name): place for name, place in places.items()}
    rows: list[list[str]] = []
    numbers = []
    table = _read_rows(path)
    _, header = next(table)
    expected = [*LABEL_COLUMNS, *(f"{_PROBABILITY}{name}" for name in class_names)]
    if [name for name in header if name not in (GROUP_COLUMN, FILE_COLUMN)] != expected:
        raise ValueError(f"{path} line 1 is not {shorten(','.join(expected))}; evaluate again")
    for line, row in table:
        try:
            texts = (row[header.index("loss")], *row[len(header) - len(class_names) :])
            numbers.append([float(text) for text in texts])
        except ValueError:
            raise ValueError(f"{line}: a probability is not a number; evaluate again") from None
        rows.append(row)
    columns = {name: [row[index] for row in rows] for index, name in enumerate(header)}
    labels, predicted = (np.zeros((len(rows), len(class_names)), bool) for _ in range(2))
    for marks, column in ((labels, "labels"), (predicted, "predicted")):
        for place, cell in enumerate(columns[column]):
            # an empty cell has no label
            names = list(filter(None, cell.split(SEPARATOR)))
            if unknown := [name for name in names if name not in places]:
                raise ValueError(f"{path}: {shorten(unknown[0])} is no label; evaluate again")
            marks[place, [places[name] for name in names]] = True
    values = np.array(numbers)
    probabilities = values[:, 1:]
    # any threshold between those that are predicted and the others
    thresholds = np.where(predicted, probabilities, np.inf).min(axis=0)
    return columns, LabelScores(labels, probabilities, values[:, 0], thresholds)


def load_predictions(path: Path) -> dict[str, list[str]]:
    """Return the columns of a predictions file by name, without the probability of each class.

    Raises:
        ValueError: A line is wrong; the message names it.
    """
    rows: list[list[str]] = []
    table = _read_rows(path)
    _, header = next(table)
    places = [place for place, name in enumerate(header) if not name.startswith(_PROBABILITY)]
    names = [header[place] for place in places]
    num_known = len(COLUMNS)
    others = set(names[num_known:])
    if tuple(names[:num_known]) != COLUMNS or not others <= {GROUP_COLUMN, FILE_COLUMN}:
        raise ValueError(f"{path} line 1 is not {','.join(COLUMNS)}; evaluate again")
    rank = header.index("rank")
    for line, row in table:
        # the number of a class
        if not row[rank].isdecimal() or len(row[rank]) > 9:
            raise ValueError(f"{line}: rank {shorten(row[rank])!r} is not a number; evaluate again")
        rows.append([row[place] for place in places])
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
