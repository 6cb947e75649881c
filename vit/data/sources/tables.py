"""Tables of image files and their classes: CSV with a header, or JSON Lines.

A table is read as it is written. A column with another name than the known ones is named by the
user, and an image is found by its path, its file name, or its name without the suffix.
"""

import csv
import io
import json
import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.dataset import LabelRule, Request
from vit.data.images import is_image_name
from vit.data.sources.base import (
    SPLIT_NAMES,
    SPLIT_OF,
    FileReader,
    count_suffixes,
    find_split_folders,
    list_below,
    relative_path,
)
from vit.data.sources.listing import Listing, as_labels, count_other_files
from vit.runtime.arguments import shorten

_SUFFIXES = (".csv", ".tsv", ".txt", ".jsonl")
# files that are the table of their folder, whatever else is there
_NAMES = ("labels.csv", "metadata.csv", "metadata.jsonl")
# names that columns may have, in small letters
_PATHS = ("path", "filename", "file_name", "file", "image", "image_path", "img")
_LABELS = ("label", "labels", "class", "category", "species", "target", "class_name")
_DELIMITERS = ",;\t|"
# between several labels in one value
_SEPARATOR = "|"
# wrong rows that a message names
_MAX_LISTED = 10


def is_table(path: Path) -> bool:
    """Return true for a file that may be a table, by its name."""
    return path.suffix.lower() in _SUFFIXES and path.is_file()


def list_tables(root: Path) -> list[Path]:
    """List the table that `root` is or holds, or the metadata files of its split folders."""
    if root.is_file():
        return [root]
    for name in _NAMES:
        if (root / name).is_file():
            return [root / name]
    folders = find_split_folders(root).values()
    return [path for folder in folders for name in _NAMES if (path := folder / name).is_file()]


class Table(NamedTuple):
    """A table as it is written.

    Attributes:
        columns: Names of its columns.
        rows: Number of the line of each row, and its values.
        notes: Warnings for the user.
    """

    path: Path
    columns: Sequence[str]
    rows: Sequence[tuple[int, Mapping[str, Any]]]
    notes: Sequence[str]

    def find(
        self, given: str | None, known: Sequence[str], option: str, *, what: str = ""
    ) -> str | None:
        """Find the column that the user names, or the one with a known name.

        Raises:
            ValueError: There is no column of the name that is given, none at all although `what`
                says what it is needed for, or several have known names.
        """
        columns = shorten(", ".join(map(repr, self.columns)), 300)
        hint = f"its columns are {columns}; name the right one with {option}"
        if given is not None:
            if given not in self.columns:
                raise ValueError(f"{self.path} has no column {given!r}; {hint}")
            return given
        found = [name for name in self.columns if name.strip().lower() in known]
        if len(found) > 1:
            names = " and ".join(map(repr, found))
            raise ValueError(f"{self.path} has {names}; name the right one with {option}")
        if what and not found:
            raise ValueError(f"{self.path} has no column {what} ({', '.join(known)}); {hint}")
        return found[0] if found else None

    def find_paths(self, given: str | None) -> str:
        """Find the column that names the images. Raises ValueError if there is none."""
        column = self.find(given, _PATHS, "--path-column", what="that names the images")
        assert column is not None
        return column


def read_table(path: Path) -> Table:
    """Read a table: UTF-8, UTF-16 with its mark, or Windows-1252. The first line is the header, and
    the sign that is most frequent in it divides the columns.

    Raises:
        ValueError: It is empty or damaged.
    """
    text, notes = _decode(path, path.read_bytes())
    if path.suffix.lower() == ".jsonl":
        rows = list(_read_json_lines(path, text))
        columns = list(dict.fromkeys(name for _, row in rows for name in row))
        return Table(path, columns, rows, notes)
    header = text.lstrip("\r\n").partition("\n")[0]
    delimiter = max(_DELIMITERS, key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        # spaces around values count nowhere
        columns = [name.strip() for name in next(filter(None, reader), [])]
        wrong = Counter(columns).most_common(1)
        if wrong and wrong[0][1] > 1:
            raise ValueError(f"{path} has two columns {wrong[0][0]!r}; rename one")
        rows = []
        for fields in reader:
            if len(fields) > len(columns):
                raise ValueError(
                    f"{path} line {reader.line_num} has {len(fields)} values and the header"
                    f" {len(columns)} ({shorten(header.strip(), 100)}); quote values that hold"
                    f" {delimiter!r}"
                )
            if any(fields):
                padded = [*map(str.strip, fields), *[""] * (len(columns) - len(fields))]
                rows.append((reader.line_num, dict(zip(columns, padded, strict=True))))
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num} is not a row: {error}") from error
    return Table(path, columns, rows, notes)


def _decode(path: Path, content: bytes) -> tuple[str, list[str]]:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", "replace"), []
    if b"\0" in content:
        raise ValueError(f"{path} holds zero bytes, no text; save it as CSV (UTF-8)")
    try:
        return content.decode("utf-8-sig"), []
    except UnicodeDecodeError:
        text = f"{path.name} is not UTF-8 and was read as Windows-1252; check accented letters"
        return content.decode("cp1252", "replace"), [text]


def _read_json_lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f'{path} line {number} is not an object such as {{"path": "a.jpg"}}')
        yield number, row


class _Row(NamedTuple):
    """A row that is right."""

    file: str
    label: str | tuple[str, ...]
    split: str | None
    group: str | None
    values: Mapping[str, Any]


def find_tables(root: Path, tables: Sequence[Path], request: Request) -> Listing:
    """List the images of tables.

    Without a column of splits, the images of a table in a folder train, val or test are those of
    this split.

    Args:
        root: Folder of the table, or of the folders with one table each.
        tables: The tables.
        request: Its `labels` count.

    Raises:
        ValueError: Rows are wrong; the message has the numbers of their lines.
    """
    problems: list[str] = []
    rows: dict[str, _Row] = {}
    notes: list[str] = []
    ways: list[str] = []
    files = FileFinder(root)
    num_doubled = 0
    for path in tables:
        reader = _TableReader(read_table(path), request.labels, files)
        notes += reader.table.notes
        ways.append(reader.describe())
        for line, row in reader.read_rows(problems):
            first = rows.setdefault(row.file, row)
            if first is row:
                continue
            num_doubled += 1
            if isinstance(row.label, tuple) and isinstance(first.label, tuple):
                labels = tuple(dict.fromkeys((*first.label, *row.label)))
                rows[row.file] = first._replace(label=labels)
            elif first.label != row.label:
                problems.append(f"{path.name} line {line}: {row.file} is listed with two classes")
            if first.split != row.split:
                problems.append(f"{path.name} line {line}: {row.file} is listed in two splits")
    if problems:
        more = len(problems) - _MAX_LISTED
        rest = f"; {more:,} rows more" if more > 0 else ""
        raise ValueError(
            f"{root}: {'; '.join(problems[:_MAX_LISTED])}{rest}. Correct or remove these rows."
            f" Read: {'; '.join(ways)}"
        )
    if num_doubled:
        ways.append(f"{num_doubled:,} rows list an image again")
    listed = list(rows.values())
    columns = dict.fromkeys(name for row in listed for name in row.values)
    splits = [row.split or "train" for row in listed]
    others = [file for file in files.all_files if not is_image_name(file)]
    unused = count_suffixes(file for file in others if root / file not in tables)
    return Listing(
        name="folder",
        origin=str(tables[0]),
        ids=list(rows),
        labels=[row.label for row in listed],
        reader=FileReader(root, list(rows)),
        splits=splits,
        # the splits that a table names stay as they are
        keeps_validation=any(row.split for row in listed),
        origins={split: f"{split} in {tables[0].name}" for split in set(splits)},
        groups=[row.group or row.file for row in listed]
        if any(row.group for row in listed)
        else None,
        columns={name: [row.values.get(name) for row in listed] for name in columns},
        read=ways,
        notes=notes,
        unused=unused + count_other_files(files.images, list(rows)),
    )


class FileFinder:
    """Finds the image file that a value names: by its path below a folder, its name, or its name
    without the suffix."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all_files = list_below(root, [])
        self.images = [file for file in self.all_files if is_image_name(file)]
        self._by_name: dict[str, list[str]] = {}
        for file in self.images:
            name = posixpath.basename(file)
            for key in {name, posixpath.splitext(name)[0]}:
                self._by_name.setdefault(key, []).append(file)
        self._known = set(self.images)

    def find(self, written: str, *, folder: str = "") -> list[str]:
        """Find the files that a value may mean: none, the one that is meant, or several.

        Args:
            written: The value; a path is relative to `folder`.
            folder: Folder of the table, relative to the root.
        """
        if not written or "\0" in written:
            return []
        path = posixpath.normpath(posixpath.join(folder, written.replace("\\", "/")))
        if path in self._known:
            return [path]
        if os.path.isfile(self.root / path):
            return [relative_path(self.root / path, self.root)]
        return [] if "/" in written else self._by_name.get(written, [])


class _TableReader:
    """Reads the rows of one table.

    Args:
        table: The table.
        rule: Columns that the user names.
        files: Finds the images.

    Raises:
        ValueError: It has no such column, or none of paths or labels.
    """

    def __init__(self, table: Table, rule: LabelRule, files: FileFinder) -> None:
        self.table = table
        self._files = files
        self._folder = relative_path(table.path.parent, files.root)
        self._path = table.find_paths(rule.path_column)
        self._several = rule.task == "multilabel"
        self._split = table.find(rule.split_column, ("split",), "--split-column")
        self._group = table.find(rule.group_column, ("group",), "--group-column")
        names = [rule.label_column]
        if rule.label_column is not None and rule.label_column not in table.columns:
            names = [name.strip() for name in rule.label_column.split(",")]
        option = "--label-column, or several with commas between them, each a class of 0 and 1"
        found = [table.find(name, _LABELS, option, what="of classes") for name in names]
        self._labels = [name for name in found if name is not None]

    def describe(self) -> str:
        """Say how the table is read."""
        used = {"images": self._path, "split": self._split, "group": self._group}
        parts = [f"{what} in {name!r}" for what, name in used.items() if name is not None]
        parts.insert(1, f"classes in {', '.join(map(repr, self._labels))}")
        text = f"{self.table.path.name}: {', '.join(parts)}"
        others = [
            name for name in self.table.columns if name not in (*used.values(), *self._labels)
        ]
        return f"{text}; columns not read: {shorten(', '.join(others))}" if others else text

    def read_rows(self, problems: list[str]) -> Iterator[tuple[int, _Row]]:
        """Yield the line and the content of each row; describe wrong ones in `problems`."""
        # lists of labels in one row say that all rows have several
        if any(isinstance(row.get(self._labels[0]), list) for _, row in self.table.rows):
            self._several = True
        for line, values in self.table.rows:
            try:
                yield line, self._read_row(values)
            except ValueError as error:
                problems.append(f"{self.table.path.name} line {line}: {error}")

    def _read_row(self, values: Mapping[str, Any]) -> _Row:
        written = str(values.get(self._path) or "")
        files = self._files.find(written, folder=self._folder)
        shown = shorten(written, 60) or "nothing"
        if not files:
            raise ValueError(f"{shown} is not a file or the name of one below {self._files.root}")
        if len(files) > 1:
            raise ValueError(f"{shown} may be {files[0]} or {files[1]}; write the path")
        if files[0].startswith(".."):
            raise ValueError(
                f"{shown} is outside {self._files.root}; put the table above all its images"
            )
        group = values.get(self._group) if self._group is not None else None
        return _Row(
            files[0],
            self._read_set(values) if self._several else self._read_class(values),
            self._read_split(values),
            None if group in (None, "") else str(group),
            values,
        )

    def _read_split(self, values: Mapping[str, Any]) -> str | None:
        if self._split is None:
            is_inside = self._folder != "."
            return SPLIT_OF.get(self.table.path.parent.name.lower()) if is_inside else None
        value = str(values.get(self._split) or "").strip().lower()
        if value not in SPLIT_OF:
            known = ", ".join(SPLIT_NAMES)
            raise ValueError(f"unknown split {shorten(value, 30)!r}; known: {known}")
        return SPLIT_OF[value]

    def _read_class(self, values: Mapping[str, Any]) -> str:
        if len(self._labels) > 1:
            marked = self._read_marks(values)
            if len(marked) != 1:
                found = " and ".join(marked) or "no class"
                raise ValueError(f"{found} is 1; keep one class, or set data.task=multilabel")
            return marked[0]
        value = values.get(self._labels[0])
        if value == "" or isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"label {shorten(repr(value), 60)} is no text or whole number")
        return str(value)

    def _read_set(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        if len(self._labels) > 1:
            return tuple(self._read_marks(values))
        value = values.get(self._labels[0])
        parts = value if isinstance(value, list) else str(value or "").split(_SEPARATOR)
        if not all(isinstance(part, str | int) for part in parts):
            raise ValueError(f"{shorten(repr(value), 60)} is not a list of labels")
        return as_labels([part for part in (str(part).strip() for part in parts) if part])

    def _read_marks(self, values: Mapping[str, Any]) -> list[str]:
        marked = []
        for name in self._labels:
            value = str(values.get(name)).strip().lower()
            if value not in ("0", "1", "0.0", "1.0", "false", "true"):
                raise ValueError(f"{name} is {shorten(value, 30)!r}, not 0 or 1")
            if value in ("1", "1.0", "true"):
                marked.append(name)
        return marked


def list_table_images(path: Path) -> Iterator[str]:
    """Yield the image file that each row of a table names, whether it has labels or not; what is
    written where there is no such file.

    Raises:
        ValueError: It is no table, or no column names images.
    """
    table = read_table(path)
    files = FileFinder(path.parent)
    if len(table.columns) == 1 and files.find(table.columns[0]):
        # a list of paths, which has no header
        column = table.columns[0]
        table = table._replace(rows=[(1, {column: column}), *table.rows])
    else:
        column = table.find_paths(None)
    if not table.rows:
        raise ValueError(f"{path} holds no rows; write an image into each")
    for _, values in table.rows:
        written = str(values.get(column) or "")
        found = [] if "://" in written else files.find(written)
        yield written if "://" in written else os.path.join(path.parent, (*found, written)[0])
