"""Tables of image files and their classes: labels.csv, any CSV or JSON Lines file, Hugging Face's metadata files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.sets.source import (
    SPLIT_NAMES,
    SPLIT_OF,
    FileReader,
    FoundSplit,
    FoundSplits,
    ImageSource,
    check_label,
    take_validation_as_test,
)
from vit.runtime.arguments import shorten
from vit.runtime.documents import parse_json, read_table
from vit.runtime.files import read_text

_METADATA = ("metadata.csv", "metadata.jsonl")
_PATH, _LABEL, _SPLIT = ("path", "filename", "file_name"), ("label", "class"), ("split",)


def is_table(path: Path) -> bool:
    """Whether it is a CSV or JSON Lines file."""
    return path.suffix.lower() in (".csv", ".jsonl") and path.is_file()


def list_tables(root: Path) -> list[Path]:
    """The table that `root` is or holds, or the metadata files of its split folders; none where there are none."""
    if root.is_file():
        return [root]
    found = [root / name for name in ("labels.csv", *_METADATA) if (root / name).is_file()]
    if found:
        return found[:1]
    folders = sorted(entry for entry in root.iterdir() if entry.name.lower() in SPLIT_OF and entry.is_dir())
    found = [next((folder / name for name in _METADATA if (folder / name).is_file()), folder) for folder in folders]
    missing = [path for path in found if path.is_dir()]
    if missing and len(missing) < len(found):
        raise ValueError(f"{missing[0]} has no metadata.csv or metadata.jsonl, which other splits of {root} have")
    return [] if missing else found


def find_tables(name: str, root: Path, tables: Sequence[Path], classes: Sequence[str] | None) -> FoundSplits:
    """The splits of tables whose rows have a path (also filename, file_name) relative to the table's folder, a label
    (also class) and perhaps a split. Without, a metadata file's images are of the split whose folder they are in.
    Raises ValueError with a wrong row's line number."""
    rows: dict[str, list[tuple[str, str]]] = {}
    origins: dict[str, str] = {}
    seen: set[str] = set()
    says_split = False
    for table in tables:
        for where, row in _read_rows(table):
            written, label = (_pick(row, columns, where) for columns in (_PATH, _LABEL))
            path = os.path.join("" if table.parent == root else table.parent.name, str(written))
            says_split = "split" in row
            split, origin = _choose_split(row, path, table, where)
            if not os.path.isfile(root / path):
                raise ValueError(f"{where}: {shorten(str(written))} is not a file below {table.parent}")
            if path in seen:
                raise ValueError(f"{where}: {shorten(path)} was already listed")
            seen.add(path)
            rows.setdefault(split, []).append((path, check_label(label, origin=where)))
            origins.setdefault(split, origin)
    class_names = tuple(sorted({label for listed in rows.values() for _, label in listed}))
    numbers = {name: number for number, name in enumerate(class_names)}
    if len(class_names) < 2:
        raise ValueError(f"{tables[0]} names {len(class_names)} classes; a classifier needs at least two")

    def load(split: str) -> ImageSource:
        paths, names = zip(*rows[split], strict=True)
        # not by numpy's text, which has room for the longest name in each
        labels, reader = np.array([numbers[name] for name in names]), FileReader(root, paths)
        source = ImageSource(name=name, class_names=class_names, labels=labels, ids=paths, reader=reader)
        return source.keep_classes(classes)

    found = {split: FoundSplit(origins[split], partial(load, split)) for split in rows}
    return found if says_split else take_validation_as_test(found)


def _choose_split(row: dict[str, Any], path: str, table: Path, where: str) -> tuple[str, str]:
    """The split of a row, and where that is from."""
    if "split" in row:
        if (split := SPLIT_OF.get(str(row["split"]).lower())) is None:
            raise ValueError(f"{where}: unknown split {shorten(str(row['split']))!r}; known: {', '.join(SPLIT_NAMES)}")
        return split, f"{split} in {table.name}"
    folder = path.partition("/")[0]
    if table.name in _METADATA and folder.lower() in SPLIT_OF:
        return SPLIT_OF[folder.lower()], f"{folder}/"
    return "train", f"train in {table.name}"


def _read_rows(table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each row its place, "FILE line N", and its values by column."""
    if table.suffix.lower() != ".jsonl":
        yield from _read_csv(table)
        return
    for number, line in enumerate(read_text(table).splitlines(), start=1):
        where = f"{table} line {number}"
        if line.strip():
            row = parse_json(line, origin=where)
            if not isinstance(row, dict):
                raise ValueError(f"{where} is no JSON object: {shorten(line)}")
            yield where, row


def _read_csv(table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = read_table(table)
    _, header = next(lines, ("", []))
    needed = [place for place, column in enumerate(header) if column in (*_PATH, *_LABEL, *_SPLIT)]
    if not all(set(header) & set(columns) for columns in (_PATH, _LABEL)):
        others = "path may be filename or file_name, and label class"
        given = shorten(",".join(header))
        raise ValueError(f"{table} line 1 must be path,label or path,label,split ({others}), not {given!r}")
    for where, row in lines:
        if len(row) != len(header) or not all(row[place] for place in needed):
            given = f"{','.join(header)}: {shorten(','.join(row))!r}"
            raise ValueError(f"{where} must have {len(header)} values, {given}")
        yield where, dict(zip(header, row, strict=True))


def _pick(row: dict[str, Any], columns: Sequence[str], where: str) -> Any:
    """The value in the first of `columns` that there is."""
    for column in columns:
        if column in row:
            return row[column]
    raise ValueError(f"{where} has no {' or '.join(columns)}, only {shorten(', '.join(row))}")
