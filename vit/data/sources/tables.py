"""Tables of image files and their classes: labels.csv, any CSV or JSON Lines file, Hugging Face's
metadata files."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.class_names import ClassChoice, check_label, check_labels
from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.sources.base import (
    SPLIT_NAMES,
    SPLIT_OF,
    FileReader,
    count_suffixes,
    find_split_folders,
)
from vit.runtime.arguments import shorten
from vit.runtime.documents import parse_json, read_table
from vit.runtime.files import read_text

_METADATA = ("metadata.csv", "metadata.jsonl")

# names that a column may have
_PATH = ("path", "filename", "file_name")
_LABEL = ("label", "class")


def is_table(path: Path) -> bool:
    """Return true for a CSV or JSON Lines file."""
    return path.suffix.lower() in (".csv", ".jsonl") and path.is_file()


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
    for folder in folders:
        if tables and folder not in {table.parent for table in tables}:
            text = f"{folder} has no metadata.csv or metadata.jsonl"
            raise ValueError(f"{text}, which other splits of {root} have; add it, or remove theirs")
    return tables


def find_tables(
    root: Path, tables: Sequence[Path], classes: ClassChoice, *, allow_outside: bool
) -> SourceSplits:
    """Find the splits of tables.

    A row has a path (also filename, file_name) relative to the folder of the table, a label (also
    class) and perhaps a split and a group. Without a split, the images of a metadata file belong to
    the split whose folder they are in.

    Args:
        root: Folder of the table, or of the folders with one table each.
        tables: CSV or JSON Lines files.
        classes: Classes to keep; None keeps all.
        allow_outside: Rows may name images outside `root`.

    Raises:
        ValueError: A row is wrong (the message has its line number), there are fewer than two
            classes, or a class has no training images.
    """
    # split → (path, label, group) of its images
    rows: dict[str, list[tuple[str, str, str]]] = {}
    origins: dict[str, str] = {}
    paths: set[str] = set()
    has_splits: bool | None = None
    has_groups = False
    for table in tables:
        for line, row in _read_rows(table):
            written = str(next(row[name] for name in _PATH if name in row))
            # each file has one name: "./a.png" is a.png
            path = os.path.relpath(os.path.join(table.parent, written), root)
            label = next(row[name] for name in _LABEL if name in row)
            split, origin = _choose_split(row, path, table, line)
            if has_splits not in (None, "split" in row):
                text = "a split, and earlier rows have none" if "split" in row else "no split"
                raise ValueError(f"{line} has {text}; give every row a split, or none")
            has_splits = "split" in row

            if path.partition("/")[0] == ".." and not allow_outside:
                text = f"{shorten(written)} is outside {root}"
                raise ValueError(f"{line}: {text}; set data.allow_outside=true to read it")
            if not os.path.isfile(root / path):
                text = f"{shorten(written)} is not a file below {table.parent}"
                raise ValueError(f"{line}: {text}; correct the path")
            if path in paths:
                raise ValueError(
                    f"{line}: {shorten(path)} was already listed; remove one of the rows"
                )
            paths.add(path)
            # an image without a group is a group of its own
            group = str(row.get("group") or path)
            has_groups = has_groups or "group" in row
            rows.setdefault(split, []).append((path, check_label(label, origin=line), group))
            origins.setdefault(split, origin)

    labels = {split: [label for _, label, _ in rows[split]] for split in rows}
    class_names = tuple(sorted({label for names in labels.values() for label in names}))
    check_labels(labels, class_names, classes, origin=str(tables[0]))
    number_of = {class_name: number for number, class_name in enumerate(class_names)}

    def load(split: str) -> ImageDataset:
        split_paths = [path for path, _, _ in rows[split]]
        dataset = ImageDataset(
            name="folder",
            class_names=class_names,
            labels=np.array([number_of[label] for label in labels[split]]),
            ids=split_paths,
            groups=[group for *_, group in rows[split]] if has_groups else None,
            reader=FileReader(root, split_paths),
        )
        return dataset.keep_classes(classes)

    # the splits that a table names stay as they are
    unused = _count_unlisted(root, paths, tables)
    source = SourceSplits(origins, load, unused)
    return source if has_splits else source.with_test_split()


def _count_unlisted(root: Path, paths: set[str], tables: Sequence[Path]) -> Counter[str]:
    """Count the files in the folders of the images that aren't in the tables."""
    unused: Counter[str] = Counter()
    for folder in {os.path.dirname(path) for path in paths}:
        with os.scandir(root / folder) as entries:
            names = [entry.name for entry in entries if entry.is_file()]
        files = [os.path.join(folder, name) for name in names]
        others = [path for path in files if path not in paths and root / path not in tables]
        unused += count_suffixes(others, images="images in no row of the table")
    return unused


def _choose_split(row: Mapping[str, Any], path: str, table: Path, line: str) -> tuple[str, str]:
    """Find the split of a row, and the place that names it."""
    if "split" in row:
        written = str(row["split"])
        if written.lower() not in SPLIT_OF:
            known = ", ".join(SPLIT_NAMES)
            raise ValueError(f"{line}: unknown split {shorten(written)!r}; known: {known}")
        split = SPLIT_OF[written.lower()]
        return split, f"{split} in {table.name}"

    folder = path.partition("/")[0]
    if table.name in _METADATA and folder.lower() in SPLIT_OF:
        return SPLIT_OF[folder.lower()], f"{folder}/"
    return "train", f"train in {table.name}"


def _read_rows(table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read each row: ("FILE line N", values by column)."""
    if table.suffix.lower() != ".jsonl":
        rows = read_table(table)
        _, header = next(rows, ("", []))
        _check_columns(header, f"{table} line 1")
        for line, values in rows:
            if len(values) != len(header):
                text = f"{line} must have {len(header)} values, {','.join(header)}"
                raise ValueError(f"{text}, not {shorten(','.join(values))!r}")
            yield line, dict(zip(header, values, strict=True))
        return

    # not splitlines, which also cuts at characters that JSON holds as they are, such as U+2028
    lines = read_text(table).removeprefix("\ufeff").split("\n")
    for number, text in enumerate(lines, start=1):
        line = f"{table} line {number}"
        if text.strip():
            row = parse_json(text, origin=line)
            if not isinstance(row, dict):
                raise ValueError(f"{line} is not a JSON object: {shorten(text)}")
            _check_columns(row, line)
            yield line, row


def _check_columns(columns: Iterable[str], line: str) -> None:
    # a table without a header is recognised by its first row
    names = set(columns)
    if names.isdisjoint(_PATH) or names.isdisjoint(_LABEL):
        text = f"{line} must name path (or filename, file_name) and label (or class)"
        raise ValueError(f"{text}, not {shorten(','.join(columns))!r}")
