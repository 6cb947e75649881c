"""Tables of image files and their classes: labels.csv, any CSV or JSON Lines file, Hugging Face's
metadata files, Kaggle's train.csv, Roboflow's _classes.csv."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.class_names import is_label
from vit.data.dataset import LabelRule, Request, SourceSplits
from vit.data.images import is_image_name, list_files
from vit.data.sources.base import (
    SPLIT_NAMES,
    SPLIT_OF,
    describe_counts,
    find_split_folders,
    looks_like_split,
    relative_path,
)
from vit.data.sources.listed import ListedImage, count_unlisted, find_listed
from vit.data.sources.table_columns import choose_columns, choose_path_column, find_column, is_true
from vit.data.sources.table_labels import (
    check_several,
    find_oddities,
    finds_several,
    name_flags,
    split_labels,
    take_class,
    tidy_numbers,
)
from vit.data.sources.table_paths import FileFinder, find_table_split
from vit.data.sources.table_text import (
    TEXT_SUFFIXES,
    WORKBOOK_SUFFIXES,
    count_known,
    read_table_file,
)
from vit.runtime.arguments import as_tuple, shorten

# files that are the table of their folder, whatever else is there
_METADATA = ("metadata.csv", "metadata.jsonl", "_classes.csv")
# problems of one kind that a message lists
_MAX_LISTED = 10


def is_table(path: Path) -> bool:
    """Return true for a file that may be a table, by its name."""
    return path.suffix.lower() in (*TEXT_SUFFIXES, *WORKBOOK_SUFFIXES) and path.is_file()


def list_tables(root: Path) -> list[Path]:
    """List the table that `root` is or holds, or the metadata files of its split folders.

    Raises:
        ValueError: Some split folders have a metadata file, and others don't.
    """
    if root.is_file():
        return [root]
    for name in ("labels.csv", *_METADATA):
        if (root / name).is_file():
            return [root / name]

    # Hugging Face's layout: a metadata file in the folder of each split
    folders = find_split_folders(root).values()
    tables = [path for folder in folders for name in _METADATA if (path := folder / name).is_file()]
    without = [folder for folder in folders if folder not in {table.parent for table in tables}]
    if tables and without:
        raise ValueError(
            f"{without[0]} has no metadata.csv or metadata.jsonl"
            f", which other splits of {root} have; add it, or remove theirs"
        )
    return tables


def list_other_tables(root: Path) -> list[Path]:
    """List the files in a folder that may be tables of its images, other than `list_tables`."""
    # Lists of other kinds, notes and licences are texts, too. A form for answers has labels that
    # are made up.
    return [
        path
        for path in sorted(root.iterdir())
        if is_table(path)
        and path.suffix.lower() != ".txt"
        and path.name[0] != "."
        and "submission" not in path.name.lower()
    ]


def guess_tables(root: Path, rule: LabelRule) -> tuple[list[Path], list[str]]:
    """Find the table of a folder whose images are in no folder of a class, as on Kaggle.

    Args:
        root: The folder.
        rule: Columns that the user names.

    Returns:
        The table, or one each for training, validation and test; and a sentence for each table
        that can't be used.
    """
    found: list[Path] = []
    reasons: list[str] = []
    for path in list_other_tables(root):
        try:
            reader = _TableReader(path, rule)
            paths = reader.list_paths()
            if not reader.finder.count_files(paths[:_MAX_LISTED]):
                raise ValueError(
                    f"{path} names no images below {root}, such as {shorten(paths[0], 60)!r}"
                    "; correct its paths"
                )
        except (ValueError, OSError, IndexError) as error:
            reasons.append(str(error))
        else:
            found.append(path)
    splits = [find_table_split(path) for path in found]
    if len(found) > 1 and not ("train" in splits and all(splits)):
        names = shorten(", ".join(path.name for path in found))
        raise ValueError(f"{root} holds several tables of images: {names}; name the right one")
    return found, reasons


def find_tables(
    root: Path, tables: Sequence[Path], request: Request, *, guesses: Sequence[str] = ()
) -> SourceSplits:
    """Find the splits of tables.

    Columns, delimiter and encoding are recognised, and what was recognised is in the guesses of the
    result. Without a column of splits, the images of a metadata file belong to the split whose
    folder they are in, and those of train.csv to its split where there is a val.csv, too.

    Args:
        root: Folder of the table, or of the folders with one table each.
        tables: Text files.
        request: Its `classes`, `labels` and `allow_outside` count.
        guesses: How the tables were found, for the user.

    Raises:
        ValueError: Rows are wrong (the message has the numbers of their lines), there are fewer
            than two classes, or a class has no training images.
    """
    problems = _Problems()
    readers = [_TableReader(path, request.labels, problems) for path in tables]
    if len(tables) > 1:
        for reader in readers:
            reader.find_split()
    for reader in readers:
        reader.read_cells()
    paths = [path for reader in readers for path in reader.list_paths()]
    values = [value for reader in readers for value in reader.values]
    several = finds_several(paths, values, request.labels.task, readers[0].table.guesses)
    rows = [
        row
        for reader in readers
        for row in reader.read_rows(root, request.allow_outside, several=several)
    ]
    images, num_doubled = _join_doubles(rows, problems)
    origin = str(tables[0])
    ways = [
        f"{os.path.relpath(reader.table.path, root)}: {', '.join(reader.table.guesses)}"
        for reader in readers
        if reader.table.guesses
    ]
    problems.report(ways)

    notes = [note for reader in readers for note in reader.table.notes]
    labels = [name for image in images for name in as_tuple(image.label)]
    if not several and request.labels.task is None:
        notes += check_several(labels, origin=origin)
    notes += find_oddities(labels, several=several)
    if num_doubled and not several:
        ways.append(f"{num_doubled:,} rows listed an image again, with the same label")
    unused = count_unlisted(root, (image.path for image in images), lists=tables)
    others = _count_other_splits(root, images)
    if others:
        text = shorten(describe_counts(others))
        notes.append(f"{origin} names no image in folders that look like splits: {text}")
    source = find_listed(
        images,
        root,
        request,
        origin=origin,
        origins={row.image.split: row.place for row in reversed(rows)},
        unused=unused + others,
        notes=notes,
        guesses=[*guesses, *ways],
        read_column=partial(_read_column, root, tables, request.labels, several),
    )
    # the splits that a table names stay as they are
    return source if any(reader.names_splits for reader in readers) else source.with_test_split()


def list_table_images(path: Path) -> Iterator[str]:
    """Yield the image file that each row of a table names, whether it has labels or not; what is
    written where there is no such file.

    Raises:
        ValueError: It is no table, or no column names images.
    """
    finder = FileFinder(path)
    table = read_table_file(path)
    if not table.rows:
        raise ValueError(f"{path} holds no rows; write an image into each")
    place = choose_path_column(table, finder)
    # the first row may be an image
    if table.columns and not count_known(table.columns) and finder.find(table.columns[place]):
        table = read_table_file(path, has_header=False)
    written = list(map(str, table.values(place)))
    finder.learn(written)
    for value in written:
        files = [] if "://" in value else finder.find(value)
        yield value if "://" in value else os.path.join(path.parent, (*files, value)[0])


def _read_column(
    root: Path, tables: Sequence[Path], rule: LabelRule, several: bool, column: str
) -> dict[str, Any]:
    """Read a column of tables again: id of an image → its value in the first row that has one.

    Raises:
        ValueError: There is no such column.
    """
    values: dict[str, Any] = {}
    for path in tables:
        reader = _TableReader(path, rule)
        place = find_column(reader.table, column)
        reader.read_cells()
        fields_of = dict(reader.table.rows)
        for row in reader.read_rows(root, allow_outside=True, several=several):
            value = fields_of[row.line][place]
            if value not in (None, ""):
                values.setdefault(row.image.path, value)
    return values


def _count_other_splits(root: Path, images: Sequence[ListedImage]) -> Counter[str]:
    """Count the images in folders that are named like splits and hold no listed image, such as the
    unlabelled test/ of Kaggle."""
    counts: Counter[str] = Counter()
    used = {image.path.partition("/")[0] for image in images}
    for entry in sorted(root.iterdir()):
        if looks_like_split(entry.name) and entry.name not in used and entry.is_dir():
            num_images = sum(map(is_image_name, list_files(entry, left_out=[])))
            counts[f"images in {entry.name}/"] = num_images
    return +counts


class _Row(NamedTuple):
    """A row that lists an image.

    Attributes:
        place: Place that names its split.
    """

    image: ListedImage
    table: Path
    line: int
    place: str


def _join_doubles(rows: Sequence[_Row], problems: _Problems) -> tuple[list[ListedImage], int]:
    """Leave out rows that list an image again. Several labels of an image may be in several rows.

    Returns:
        The images, and the number of rows that were left out.
    """
    # path → the row that listed it first
    seen: dict[str, _Row] = {}
    for row in rows:
        image = row.image
        first, table, line, _ = known = seen.setdefault(image.path, row)
        name = f"{shorten(image.path, 60)} was already listed in {table.name} line {line}"
        if first.split != image.split:
            text = f"{name} ({image.split} here, {first.split} there)"
            problems.add(row.table, row.line, text, "keep each image in one split")
        elif isinstance(first.label, tuple):
            names = tuple(dict.fromkeys((*first.label, *image.label)))
            seen[image.path] = known._replace(image=first._replace(label=names))
        elif first.label != image.label:
            labels = f"{_quote(image.label)} here, {_quote(first.label)} there"
            remedy = "keep one label for each image, or set data.task=multilabel"
            problems.add(row.table, row.line, f"{name} ({labels})", remedy)
    return [row.image for row in seen.values()], len(rows) - len(seen)


def _quote(label: object) -> str:
    return repr(shorten(str(label), 30))


class _Problems:
    """Problems of rows, which are reported together."""

    def __init__(self) -> None:
        # remedy → the rows with that problem
        self._rows: dict[str, list[str]] = {}

    def add(self, table: Path, line: int, text: str, remedy: str) -> None:
        """Add the problem of a row."""
        rows = self._rows.setdefault(remedy, [])
        rows.append(f"line {line}: {text}" if rows else f"{table} line {line}: {text}")

    def report(self, guesses: Sequence[str]) -> None:
        """Raise ValueError with the problems and how the tables were read, if there are any."""
        sentences = []
        for remedy, rows in self._rows.items():
            more = len(rows) - _MAX_LISTED
            rest = f", and {more:,} rows more" if more > 0 else ""
            sentences.append(f"{', '.join(rows[:_MAX_LISTED])}{rest}; {remedy}")
        if sentences and guesses:
            sentences.append(f"It was read so: {'; '.join(guesses)}")
        if sentences:
            raise ValueError(shorten(". ".join(sentences), 1800))


class _TableReader:
    """Reads the images that a table lists.

    Args:
        path: The table.
        rule: Columns that the user names.
        problems: Gets the problems of its rows.

    Raises:
        ValueError: It is no table, or its columns can't be told apart.
    """

    def __init__(self, path: Path, rule: LabelRule, problems: _Problems | None = None) -> None:
        self._path = path
        self._problems = problems or _Problems()
        self.finder = FileFinder(path)
        self.table = read_table_file(path)
        self._columns = choose_columns(self.table, rule, self.finder)
        # the first row may be an image without a suffix
        names = self.table.columns
        if names and not count_known(names) and self.finder.find(names[self._columns.path]):
            self.table = read_table_file(path, has_header=False)
            self._columns = choose_columns(self.table, rule, self.finder)
        # true if the table says which split an image is in
        self.names_splits = self._columns.split is not None
        self._split = "train"
        # labels of each row as they are written, see `finds_several`; empty before `read_cells`
        self.values: Sequence[Any] = ()

    def list_paths(self) -> list[str]:
        """List the values of the column of paths."""
        return list(map(str, self.table.values(self._columns.path)))

    def find_split(self) -> None:
        """Find the split of train.csv beside val.csv or test.csv."""
        split = find_table_split(self._path)
        if split is not None and self._path.name not in _METADATA:
            self.names_splits = True
            self._split = split

    def read_rows(self, root: Path, allow_outside: bool, *, several: bool) -> list[_Row]:
        """Read the rows, each with one class or `several` labels. Wrong ones are left out and added
        to the problems."""
        table, columns = self.table, self._columns
        self.finder.learn(self.list_paths())
        self.finder.guesses.clear()
        for line, fields in table.short:
            text = f"{len(fields)} instead of {table.width} values"
            header = shorten(",".join(table.columns), 100) or "the values that other rows have"
            self._add(line, f"{text} ({shorten(','.join(fields), 60)})", f"write {header}")

        rows = []
        labels = self._read_sets() if several else self._read_classes()
        for (line, fields), label in zip(table.rows, labels, strict=True):
            own_split = self._read_split(line, fields)
            value = fields[columns.path]
            written = "" if value is None else str(value)
            file = self._find_file(line, written, own_split)
            if file is None or label is None or own_split == "":
                continue
            split = own_split or self._split
            # each file has one name: "./a.png" is a.png
            file = relative_path(os.path.join(self._path.parent, file), root)
            folder = file.partition("/")[0]
            if folder == ".." and not allow_outside:
                text = f"{shorten(written, 60)} is outside {root}"
                remedy = "put a link to it below the folder, or use vit train with data.allow_outside=true"
                self._add(line, text, remedy)
                continue
            place = f"{split} in {self._path.name}"
            if own_split is None and self._path.name in _METADATA and folder.lower() in SPLIT_OF:
                split, place = SPLIT_OF[folder.lower()], f"{folder}/"
            group = None if columns.group is None else str(fields[columns.group] or "")
            rows.append(_Row(ListedImage(file, label, split, group), self._path, line, place))
        guesses = self.finder.guesses.items()
        table.guesses += [f"{reason} {count:,} times" for reason, count in guesses]
        return rows

    def _add(self, line: int, text: str, remedy: str) -> None:
        self._problems.add(self._path, line, text, remedy)

    def _read_split(self, line: int, fields: Sequence[Any]) -> str | None:
        """Read the split of a row: "" if it is wrong; None if there is no such column."""
        columns = self._columns
        if columns.split is None:
            return None
        value = fields[columns.split]
        if value is None or value == "":
            self._add(line, "no split", "give every row a split, or none")
            return ""
        if str(value).casefold() not in columns.splits:
            text = f"unknown split {shorten(str(value), 30)!r}"
            self._add(line, text, f"known: {', '.join(SPLIT_NAMES)}")
        return columns.splits.get(str(value).casefold(), "")

    def _find_file(self, line: int, written: str, split: str | None) -> str | None:
        """Find the image file of a row, relative to the table's folder."""
        files = self.finder.find(written, split=split)
        if len(files) == 1:
            return files[0]
        folder = self._path.parent
        text = f"{shorten(written, 60) or 'nothing'} is not a file"
        remedy = f"correct the path (none is below {folder}), or remove the row"
        if files:
            first, second = (shorten(file, 60) for file in files[:2])
            text = f"{shorten(written, 60)} may be {first} or {second}"
            remedy = "write the folder and the suffix, too"
        elif written and os.path.isfile(os.path.join(folder, "..", written)):
            remedy = f"move the table to {folder.parent}, where its paths begin"
        self._add(line, text, remedy)
        return None

    def read_cells(self) -> None:
        """Read the labels as they are written into `values`."""
        table, places = self.table, self._columns.classes
        if len(places) == 1:
            self.values, phrase = tidy_numbers(name_flags(table.values(places[0])))
            table.guesses += phrase
        else:
            self.values = [
                tuple(table.columns[place] for place in places if is_true(fields[place]))
                for _, fields in table.rows
            ]

    def _read_sets(self) -> list[tuple[str, ...] | None]:
        """Read the labels of each row, None for a wrong one."""
        labels = split_labels(self.values)
        for (line, _), value, found in zip(self.table.rows, self.values, labels, strict=True):
            if found is None:
                text = f"{shorten(repr(value), 60)} is not a list of labels"
                self._add(line, text, "write names, with | between them")
        return labels

    def _read_classes(self) -> list[str | None]:
        """Read the class of each row, None for a wrong one."""
        labels: list[str | None] = []
        for (line, _), value in zip(self.table.rows, self.values, strict=True):
            if isinstance(value, list | tuple) and len(value) != 1:
                named = shorten(" and ".join(map(str, value)), 60)
                text = f"{named} are labels"
                if isinstance(value, tuple):
                    text = f"{named} are 1"
                if not value:
                    text = "no class is 1"
                remedy = "an image has one class: keep one, leave the image out, or set"
                self._add(line, text, f"{remedy} data.task=multilabel")
                labels.append(None)
                continue
            label = take_class(value)
            if is_label(label):
                labels.append(str(label))
                continue
            text = f"label {shorten(repr(label), 60)} is neither a text nor a whole number"
            self._add(line, text, "give each image one class")
            labels.append(None)
        return labels
