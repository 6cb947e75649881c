"""Tables of image files and their classes: CSV with a header, or JSON Lines.

A table is read as it is written. A column with another name than the known ones is named by the
user, and an image is found by its path, its file name, or its name without the suffix.
"""

import csv
import io
import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.dataset import LabelRule
from vit.data.images import is_image_name
from vit.data.sources.base import (
    SPLIT_OF,
    FileReader,
    describe_unused,
    list_below,
    relative_path,
)
from vit.data.sources.listing import Listing, as_labels
from vit.runtime.arguments import check_choice, shorten

_SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl")
# files that are the table of their folder, whatever else is there
_NAMES = ("labels.csv", "metadata.csv", "metadata.jsonl")
# names that columns may have, in small letters
_PATHS = ("path", "filename", "file_name", "file", "image", "image_path", "img")
_LABELS = ("label", "labels", "class", "category", "species", "target", "class_name")
_MARKS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
# wrong rows that a message names
_MAX_LISTED = 10


def is_table(path: Path) -> bool:
    """Return true for a file that may be a table, by its name."""
    return path.suffix.lower() in _SUFFIXES and path.is_file()


def find_table(root: Path) -> Path | None:
    """Find the table that `root` is or holds."""
    return next(filter(is_table, (root, *(root / name for name in _NAMES))), None)


def read_table(path: Path) -> tuple[dict[int, Mapping[str, Any]], list[str]]:
    """Read a table: UTF-8, UTF-16 with its mark, or Windows-1252. The first line is the header, and
    the sign that is most frequent in it divides the columns.

    Returns:
        Number of the line of each row → its values by their columns; and warnings for the user.

    Raises:
        ValueError: It is damaged.
    """
    content = path.read_bytes()
    notes = []
    is_utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    if b"\0" in content and not is_utf16:
        raise ValueError(f"{path} holds zero bytes, no text; save it as CSV (UTF-8)")
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("cp1252", "replace")
        notes = [f"{path.name} is not UTF-8 and was read as Windows-1252; check accented letters"]
    rows: dict[int, Mapping[str, Any]] = {}
    try:
        for line, row in _parse_json(text) if path.suffix.lower() == ".jsonl" else _parse_csv(text):
            rows[line] = row
    except (ValueError, csv.Error, RecursionError) as error:
        raise ValueError(
            f"{path} can't be read after line {max(rows, default=1)}: {error}"
        ) from error
    if not rows:
        raise ValueError(f"{path} holds no rows below its first line")
    return rows, notes


def _parse_csv(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    header = text.strip().partition("\n")[0]
    delimiter = max(",;\t|", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    # spaces around values count nowhere
    columns = [name.strip() for name in next(filter(None, reader), [])]
    if len(set(columns)) < len(columns):
        raise ValueError(f"two columns of {shorten(header)} have one name; rename one")
    for fields in reader:
        if len(fields) > len(columns):
            raise ValueError(
                f"line {reader.line_num} has {len(fields)} values and the header {len(columns)}"
                f" ({shorten(header, 100)}); quote values that hold {delimiter!r}"
            )
        if any(fields):
            padded = [*map(str.strip, fields), *[""] * (len(columns) - len(fields))]
            yield reader.line_num, dict(zip(columns, padded, strict=True))


def _parse_json(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f'line {number} is not an object such as {{"path": "a.jpg"}}')
            yield number, row


class _Columns(NamedTuple):
    """The columns that are read. An image may have several labels if `several`."""

    path: str
    labels: Sequence[str]
    split: str | None
    group: str | None
    several: bool


def list_table(path: Path, rule: LabelRule) -> Listing:
    """List the images of a table, which lie below its folder.

    Raises:
        ValueError: Rows are wrong; the message has the numbers of their lines.
    """
    rows, notes = read_table(path)
    known = list(dict.fromkeys(name for row in rows.values() for name in row))
    columns = _find_columns(path, rows, known, rule)
    used = {"images": columns.path, "split": columns.split, "group": columns.group}
    ways = [f"{what} in {name!r}" for what, name in used.items() if name is not None]
    ways.insert(1, f"classes in {', '.join(map(repr, columns.labels))}")
    way = f"{path.name}: {', '.join(ways)}"
    unread = [name for name in known if name not in (*used.values(), *columns.labels)]
    if unread:
        way += f"; columns not read: {shorten(', '.join(unread))}"

    files = list_below(path.parent)
    find_file = _make_finder(path.parent, list(filter(is_image_name, files)))
    problems: list[str] = []
    # file → the line of its first row, its class or labels, and its split
    found: dict[str, tuple[int, Any, str]] = {}
    for line, values in rows.items():
        try:
            file = find_file(str(values.get(columns.path) or ""))
            label = _read_label(values, columns)
            split = "train" if columns.split is None else _read_split(values.get(columns.split))
            first, *others = found.setdefault(file, (line, label, split))
            if others != [label, split]:
                raise ValueError(f"{file} has another class or split in line {first}")
        except ValueError as error:
            problems.append(f"line {line}: {error}")
    if problems:
        more = len(problems) - _MAX_LISTED
        rest = f"; {more:,} rows more" if more > 0 else ""
        raise ValueError(
            f"{path} {'; '.join(problems[:_MAX_LISTED])}{rest}. Correct or remove these rows. Read:"
            f" {way}"
        )
    kept = {file: rows[line] for file, (line, _, _) in found.items()}
    given = [""] * len(kept)
    if columns.group is not None:
        given = [str(row.get(columns.group) or "") for row in kept.values()]
    return Listing(
        name="folder",
        origin=str(path),
        labels=[label for _, label, _ in found.values()],
        reader=FileReader(path.parent, list(found)),
        splits=[split for _, _, split in found.values()],
        # the splits that a table names stay as they are
        keeps_validation=columns.split is not None,
        # an image without a group is one
        groups=[group or file for group, file in zip(given, kept, strict=True)]
        if any(given)
        else None,
        columns={name: [row.get(name) for row in kept.values()] for name in known},
        read=[way, *describe_unused(set(files) - {path.name, *found})],
        notes=notes,
    )


def _find_columns(
    path: Path, rows: Mapping[int, Mapping[str, Any]], columns: Sequence[str], rule: LabelRule
) -> _Columns:
    """Find the columns that the user names, or those with known names.

    Raises:
        ValueError: One is missing, or several have known names.
    """

    def find(given: str | None, known: Sequence[str]) -> str | None:
        found = [name for name in columns if name.lower() in known]
        if given is not None:
            found = [name for name in columns if name == given]
        # a table without splits or groups has none
        if len(found) != 1 and (found or given is not None or len(known) > 1):
            text = " and ".join(map(repr, found)) or f"no column {given or ', '.join(known)}"
            raise ValueError(
                f"{path} has {text}; its columns are {shorten(', '.join(map(repr, columns)), 300)};"
                f" name the right one with --{known[0]}-column"
            )
        return found[0] if found else None

    image = find(rule.path_column, _PATHS)
    marks = [rule.label_column]
    if rule.label_column is not None and rule.label_column not in columns:
        # a column of 0 and 1 for each class
        marks = [name.strip() for name in rule.label_column.split(",")]
    labels = [name for mark in marks if (name := find(mark, _LABELS)) is not None]
    assert image is not None
    # lists of labels in one row say that all rows have several
    has_lists = any(isinstance(row.get(labels[0]), list) for row in rows.values())
    return _Columns(
        image,
        labels,
        find(rule.split_column, ("split",)),
        find(rule.group_column, ("group",)),
        several=has_lists or rule.task == "multilabel",
    )


def _make_finder(root: Path, images: Sequence[str]) -> Callable[[str], str]:
    """Return a function that finds the image file below the root that a value in a table names: by
    its path, its file name, or its name without the suffix."""
    known = set(images)

    @cache
    def list_names() -> dict[str, list[str]]:
        by_name: dict[str, list[str]] = {}
        for file in images:
            name = posixpath.basename(file)
            for key in {name, posixpath.splitext(name)[0]}:
                by_name.setdefault(key, []).append(file)
        return by_name

    def find(written: str) -> str:
        # most values are paths as they are listed
        path = written
        if path not in known:
            path = relative_path(root / written.replace("\\", "/"), root)
        found = [path] if path in known else list_names().get(written, [])
        shown = shorten(written, 60) or "nothing"
        if not found:
            raise ValueError(f"{shown} is not an image, or the name of one, below {root}")
        if len(found) > 1:
            raise ValueError(f"{shown} may be {found[0]} or {found[1]}; write the path")
        return found[0]

    return find


def _read_split(value: Any) -> str:
    name = str(value or "").strip().lower()
    check_choice(name, SPLIT_OF, name="split")
    return SPLIT_OF[name]


def _read_label(values: Mapping[str, Any], columns: _Columns) -> str | tuple[str, ...]:
    """Return the class of a row, or its labels. Raises ValueError for anything else."""
    value = values.get(columns.labels[0])
    if len(columns.labels) > 1:
        marks = {name: str(values.get(name)).strip().lower() for name in columns.labels}
        for name, mark in marks.items():
            if mark not in _MARKS:
                raise ValueError(f"{name} is {shorten(mark, 30)!r}, not 0 or 1")
        value = [name for name, mark in marks.items() if _MARKS[mark]]
        if not columns.several:
            if len(value) != 1:
                found = " and ".join(value) or "no class"
                raise ValueError(f"{found} is 1; keep one class, or set data.task=multilabel")
            value = value[0]
    if columns.several:
        # several labels in one text have | between them
        parts = value if isinstance(value, list) else str(value or "").split("|")
        if not all(isinstance(part, str | int) for part in parts):
            raise ValueError(f"{shorten(repr(value), 60)} is not a list of labels")
        return as_labels([text for part in parts if (text := str(part).strip())])
    if value == "" or isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"label {shorten(repr(value), 60)} is no text or whole number")
    return str(value)


def list_table_images(path: Path) -> Iterator[str]:
    """Yield the image file that each row of a table names, whether it has labels or not; what is
    written where there is no such file.

    Raises:
        ValueError: It is no table, or no column names images.
    """
    rows, _ = read_table(path)
    find_file = _make_finder(path.parent, list(filter(is_image_name, list_below(path.parent))))
    for line, row in rows.items():
        columns = [name for name in row if name.lower() in _PATHS]
        if not columns:
            raise ValueError(f"{path} line {line} has no column {', '.join(_PATHS)}; name one so")
        written = str(row[columns[0]] or "")
        # reading the file names the fault
        with suppress(ValueError):
            written = find_file(written)
        yield os.path.join(path.parent, written)
