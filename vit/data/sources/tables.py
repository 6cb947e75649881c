"""CSV tables of image files, with or without their classes.

A table is read as it is written. A column with another name than the known ones is named by the
user, and an image is found by its path, its file name, or its name without the suffix.
"""

import csv
import io
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress
from pathlib import Path

from vit.data.dataset import ImageRule
from vit.data.images import is_image_name
from vit.data.sources.base import SPLIT_OF, FileReader, Listing, describe_unused, list_below
from vit.runtime.arguments import check_choice, shorten

_SUFFIXES = (".csv", ".tsv", ".txt")
# files that are the table of their folder, whatever else is there
_NAMES = ("labels.csv", "metadata.csv")
# names that columns may have, in small letters
_PATHS = ("path", "filename", "file_name", "file", "image", "image_path", "img")
_LABELS = ("label", "labels", "class", "category", "species", "target", "class_name")
_MARKS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
# wrong rows that a message names
_MAX_LISTED = 10

# values of a row by their columns
Row = Mapping[str, str]


def is_table(path: Path) -> bool:
    """Return true for a file that may be a table, by its name."""
    return path.suffix.lower() in _SUFFIXES and path.is_file()


def find_table(root: Path) -> Path | None:
    """Find the table that `root` is or holds."""
    return next(filter(is_table, (root, *(root / name for name in _NAMES))), None)


def _read_table(path: Path) -> tuple[dict[int, Row], list[str]]:
    """Read a table: UTF-8, UTF-16 with its mark, or Windows-1252. The first line is the header, and
    the sign that is most frequent in it divides the columns. Return line number → row, and
    warnings. Raises ValueError for a damaged one."""
    content = path.read_bytes()
    notes = []
    try:
        encoding = "utf-8-sig"
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            encoding = "utf-16"
        text = content.decode(encoding)
    except UnicodeDecodeError:
        text = content.decode("cp1252", "replace")
        notes = [f"{path.name} is not UTF-8 and was read as Windows-1252; check accented letters"]
    # UTF-32, a workbook, or a damaged file, whose labels would be other ones
    if "\0" in text:
        raise ValueError(f"{path} holds zero bytes, no text; save it as CSV (UTF-8)")
    header = text.partition("\n")[0]
    delimiter = max(",;\t|", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), restval="", delimiter=delimiter)
    rows: dict[int, Row] = {}
    try:
        # spaces around values count nowhere
        columns = [name.strip() for name in reader.fieldnames or ()]
        if len(set(columns)) < len(columns):
            raise ValueError("two columns have one name; rename one")
        for row in reader:
            # where the reader puts values that are too many
            if None in row:
                text = f"line {reader.line_num} has more values than the header"
                raise ValueError(f"{text}; quote values that hold {delimiter!r}")
            if any(row.values()):
                values = map(str.strip, row.values())
                rows[reader.line_num] = dict(zip(columns, values, strict=True))
        if not rows:
            raise ValueError("there are no rows below")
    except (ValueError, csv.Error) as error:
        line = max(rows, default=1)
        raise ValueError(f"{path} can't be read after line {line}: {error}") from error
    return rows, notes


def list_table(path: Path, rule: ImageRule) -> Listing:
    """List the images of a table, which lie below its folder. Raises ValueError for wrong rows,
    with the numbers of their lines."""
    rows, notes = _read_table(path)
    known = list(next(iter(rows.values())))
    used = _find_columns(path, known, rule)
    ways = [f"{what} in {', '.join(map(repr, names))}" for what, names in used.items() if names]
    unread = [name for name in known if name not in chain(*used.values())]
    way = f"{path.name}: {', '.join(ways)}"
    if unread:
        way += f"; columns not read: {shorten(', '.join(unread))}"

    (image,), labels, split, group = used.values()
    files = list_below(path.parent)
    find_file = _make_finder(path.parent, files)
    problems: list[str] = []
    # file → the line of its first row, its class or labels, and its split
    found: dict[str, tuple[int, str | tuple[str, ...], str]] = {}
    for line, row in rows.items():
        try:
            file = find_file(row[image])
            label = _read_label(row, labels, several=rule.task == "multilabel")
            name = row[split[0]].lower() if split else "train"
            check_choice(name, SPLIT_OF, name="split")
            first, *others = found.setdefault(file, (line, label, SPLIT_OF[name]))
            if others != [label, SPLIT_OF[name]]:
                raise ValueError(f"{file} has another class or split in line {first}")
        except ValueError as error:
            problems.append(f"line {line}: {error}")
    if problems:
        more = len(problems) - _MAX_LISTED
        if more > 0:
            problems[_MAX_LISTED:] = [f"{more:,} rows more"]
        raise ValueError(f"{path} {'; '.join(problems)}. Correct or remove these rows. Read: {way}")
    kept = {file: rows[line] for file, (line, _, _) in found.items()}
    groups = None
    if any(row[name] for name in group for row in kept.values()):
        # an image without a group is one
        groups = [row[group[0]] or file for file, row in kept.items()]
    return Listing(
        labels=[label for _, label, _ in found.values()],
        reader=FileReader(path.parent, list(found)),
        splits=[name for _, _, name in found.values()],
        # the splits that a table names stay as they are
        keeps_validation=bool(split),
        groups=groups,
        rows=kept,
        read=[way, *describe_unused(set(files) - {path.name, *found})],
        notes=notes,
    )


def _find_columns(path: Path, columns: Sequence[str], rule: ImageRule) -> dict[str, list[str]]:
    """Find the columns that the user names, or those with known names: what they hold → columns.
    Raises ValueError if one is missing, or several have known names."""

    def find(given: str | None, known: Sequence[str], *, optional: bool = False) -> list[str]:
        found = [name for name in columns if name.lower() in known]
        if given is not None:
            found = [name for name in columns if name == given]
        if len(found) == 1 or (optional and given is None and not found):
            return found
        text = " and ".join(map(repr, found)) or f"no column {given or ', '.join(known)}"
        raise ValueError(
            f"{path} has {text}; its columns are {shorten(', '.join(map(repr, columns)), 300)};"
            f" name the right one with --{known[0]}-column"
        )

    labels = [rule.label_column]
    if rule.label_column is not None and rule.label_column not in columns:
        # a column of 0 and 1 for each class
        labels = [name.strip() for name in rule.label_column.split(",")]
    return {
        "images": find(rule.path_column, _PATHS),
        "classes": [name for label in labels for name in find(label, _LABELS)],
        "split": find(rule.split_column, ("split",), optional=True),
        "group": find(rule.group_column, ("group",), optional=True),
    }


def _make_finder(root: Path, files: Sequence[str]) -> Callable[[str], str]:
    """Return a function that finds the image file below the root that a value in a table names: by
    its path, its file name, or its name without the suffix."""
    known = set(filter(is_image_name, files))
    by_name: dict[str, list[str]] = {}
    for file in filter(known.__contains__, files):
        name = posixpath.basename(file)
        for key in (name, posixpath.splitext(name)[0]):
            by_name.setdefault(key, []).append(file)

    def find(written: str) -> str:
        # most values are paths as they are listed
        path = written
        if path not in known:
            path = os.path.relpath(root / written.replace("\\", "/"), root).replace(os.sep, "/")
        found = [path] if path in known else by_name.get(written, [])
        shown = shorten(written, 60) or "nothing"
        if not found:
            raise ValueError(f"{shown} is not an image, or the name of one, below {root}")
        if len(found) > 1:
            raise ValueError(f"{shown} may be {found[0]} or {found[1]}; write the path")
        return found[0]

    return find


def _read_label(row: Row, columns: Sequence[str], *, several: bool) -> str | tuple[str, ...]:
    """Return the class of a row, or its labels if an image may have several."""
    value = row[columns[0]]
    # several labels in one text have | between them
    labels = [text for part in value.split("|") if (text := part.strip())]
    if len(columns) > 1:
        marks = [_MARKS.get(row[name].lower()) for name in columns]
        if None in marks:
            raise ValueError(f"{columns[marks.index(None)]} is not 0 or 1")
        labels = list(compress(columns, marks))
        value = labels[0] if len(labels) == 1 else ""
    if several:
        return tuple(labels)
    if not value:
        raise ValueError(
            f"it has {' and '.join(labels) or 'no class'}; keep one class, or set"
            " data.task=multilabel"
        )
    return value


def list_rows(path: Path) -> tuple[str, Iterator[tuple[str, str]]]:
    """Return the column of a table that names images, and for each row what it says there and the
    file, which may not exist. It has a known name, or is the first that finds an image. Raises
    ValueError without such a column."""
    rows, _ = _read_table(path)
    find_file = _make_finder(path.parent, list_below(path.parent))

    def find(written: str) -> str:
        # reading the file names the fault
        with suppress(ValueError):
            return os.path.join(path.parent, find_file(written))
        return os.path.join(path.parent, written)

    first = next(iter(rows.values()))
    columns = [name for name in first if name.lower() in _PATHS]
    columns += [name for name in first if os.path.isfile(find(first[name]))]
    if not columns:
        raise ValueError(f"{path} has no column {', '.join(_PATHS)}; name one so")
    written = [row[columns[0]] for row in rows.values()]
    return columns[0], zip(written, map(find, written), strict=True)
