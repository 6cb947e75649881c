"""Data sets of Hugging Face's library `datasets`: names on the Hub, directories of save_to_disk and
Parquet files."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.dataset import Request
from vit.data.python_images import find_feature_names
from vit.data.sources.base import SPLIT_OF, ImageReader, read_stats
from vit.data.sources.listing import Listing, as_labels
from vit.data.sources.remote import is_remote
from vit.data.sources.shards import list_shards
from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import expand_home
from vit.runtime.hub import offline_if_unreachable


@dataclass(frozen=True, eq=False)
class RowReader(ImageReader):
    """Images in rows of tables that are mapped from disk: the bytes of a file, or its path."""

    # datasets.Dataset of one column each, not decoded
    tables: Sequence[Any]
    ids: Sequence[str]
    # int64 [n, 2], numbers of the table and of the row
    places: np.ndarray
    # beginnings of the paths that rows may name
    inside: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Path | bytes:
        number, row = self.places[index].tolist()
        # one column
        (stored,) = self.tables[number][row].values()
        stored = stored or {"bytes": None, "path": None}
        if stored["bytes"] is not None:
            content: bytes = stored["bytes"]
            return content
        if stored["path"] is None:
            raise ValueError(f"{self.ids[index]} has no image")
        if not os.path.abspath(stored["path"]).startswith(self.inside):
            text = f"names {shorten(stored['path'])}, which is outside its folder"
            raise ValueError(f"{self.ids[index]} {text}; save the images in the rows")
        return Path(stored["path"])

    def subset(self, indices: np.ndarray) -> RowReader:
        ids = [self.ids[index] for index in indices]
        return replace(self, ids=ids, places=self.places[indices])

    def get_name(self, index: int) -> str:
        return self.ids[index]

    @property
    def place(self) -> str:
        files = self.tables[0].cache_files
        return os.path.realpath(files[0]["filename"]) if files else ""

    def stats(self) -> np.ndarray | None:
        files = [table.cache_files for table in self.tables]
        # rows that hold a path change with the file
        if not all(files) or (self.sizes() < 0).any():
            return None
        stats: np.ndarray = read_stats([each[0]["filename"] for each in files])[self.places[:, 0]]
        stats[:, 0] = self.places[:, 1]
        return stats

    def sizes(self) -> np.ndarray:
        import pyarrow.compute as pc  # type: ignore[import-untyped]  # of the extra "datasets"

        sizes = np.zeros(len(self), dtype=np.int64)
        for number, table in enumerate(self.tables):
            is_own = self.places[:, 0] == number
            (column,) = table.with_format("arrow")[:].columns
            lengths = pc.fill_null(pc.binary_length(pc.struct_field(column, "bytes")), -1)
            sizes[is_own] = lengths.to_numpy()[self.places[is_own, 1]]
        return sizes


def is_dataset(path: Path) -> bool:
    """Return true for Parquet files and for a directory that save_to_disk wrote."""
    is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return is_saved or bool(_list_parquet(path))


def is_place(place: str) -> bool:
    """Return true for a name on the Hub, Parquet files or a saved data set."""
    # object storage can't be asked for Parquet files
    return not is_remote(place) and (place.startswith("hf:") or is_dataset(expand_home(place)))


def find_huggingface(request: Request) -> Listing:
    """List a data set that the library `datasets` reads.

    An image is in the column image or img; its class is in label, labels or class, as a text, a
    whole number, or a number that the file's features name; several labels are a list of these.
    Splits without labels are left out.

    Args:
        request: Its root is "hf:NAME" or "hf:NAME:CONFIGURATION" of the Hub, a directory that
            save_to_disk wrote, a Parquet file or a folder of them (such as
            data/train-00000.parquet). Its cache holds the library's copies.

    Raises:
        ValueError: The library isn't installed, or there are no images and labels.
        OSError: The data set can't be read.
    """
    origin = f"data.root {request.root}"
    tables = _load(str(request.root), request.cache_dir / "datasets")
    features = next(iter(tables.values())).features
    image_column = _find_column(features, ("image", "img"), origin)
    label_column = None
    if request.needs_labels:
        label_column = _find_column(features, ("label", "labels", "class"), origin)
    names = find_feature_names(features[label_column]) if label_column else None
    labels: list[Any] = []
    ids: list[str] = []
    splits: list[str] = []
    used: dict[str, str] = {}
    for name, table in tables.items():
        values = list(table[label_column]) if label_column else [()] * len(table)
        split = SPLIT_OF.get(name.lower()) if label_column else name
        # test splits of the Hub have -1
        if split is None or all(value in (None, -1, [], [-1]) for value in values):
            continue
        if split in used.values():
            raise ValueError(
                f"{origin} has several splits that are the {split} split, one of them {name!r};"
                " rename one"
            )
        used[name] = split
        for row, value in enumerate(values):
            try:
                labels.append(_read_label(value, names, request) if label_column else value)
            except ValueError as error:
                raise ValueError(f"{origin} {name} row {row}: {error}") from error
        ids += [f"{name}/{row:05d}" for row in range(len(values))]
        splits += [split] * len(values)
    if not used:
        known = ", ".join(SPLIT_OF)
        have = ", ".join(tables)
        raise ValueError(f"{origin} has no labels in a split of {known}, only {have}; name one so")
    opened = [tables[name] for name in used]
    places = [(number, row) for number, table in enumerate(opened) for row in range(len(table))]
    root = expand_home(str(request.root)).absolute()
    folders = (root if root.is_dir() else root.parent, request.cache_dir.absolute() / "datasets")
    reader = RowReader(
        [_select_images(table, image_column, origin) for table in opened],
        ids,
        np.array(places),
        tuple(os.path.join(folder, "") for folder in folders),
    )
    # the user is told, because a split may have been spelled in another way
    left_out = [name for name in tables if name not in used]
    return Listing(
        name="huggingface",
        origin=origin,
        ids=ids,
        labels=labels,
        reader=reader,
        splits=splits,
        origins={split: f"the split {name!r}" for name, split in used.items()},
        class_names=names,
        columns=RowColumns(opened),
        notes=[f"the split {name!r} was left out" for name in left_out],
        unused={f"rows of {name!r}": len(tables[name]) for name in left_out},
    )


def _read_label(value: Any, names: Sequence[str] | None, request: Request) -> str | tuple[str, ...]:
    """Return the class of a row, or the labels in a list. Raises ValueError for anything else."""
    task = request.labels.task
    shown = shorten(repr(value))
    if isinstance(value, list):
        if task == "classes":
            raise ValueError(f"label {shown} is a list, and data.task=classes")
        return as_labels([_name_label(each, names) for each in value])
    if task == "multilabel":
        parts = str("" if value is None else value).split("|")
        return tuple(filter(None, (part.strip() for part in parts)))
    return _name_label(value, names)


def _name_label(value: Any, names: Sequence[str] | None) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and names is not None:
        if not 0 <= value < len(names):
            text = f"label {value} is not one of the {len(names)} classes"
            raise ValueError(f"{text}; correct it, or remove the row")
        return str(names[value])
    if not (is_number or (isinstance(value, str) and value)):
        text = f"label {shorten(repr(value))} is neither a text nor a whole number"
        raise ValueError(f"{text}; give each image one class")
    return str(value)


class RowColumns(Mapping[str, Sequence[Any]]):
    """The columns of tables of the library `datasets`, one after the other, read when needed."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._tables = tables

    def __getitem__(self, column: str) -> list[Any]:
        values: list[Any] = []
        for table in self._tables:
            # numbers whose names the features have
            names: Sequence[str] = getattr(table.features[column], "names", None) or ()
            for value in table.select_columns([column])[column]:
                is_named = isinstance(value, int) and 0 <= value < len(names)
                values.append(names[value] if is_named else value)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables[0].column_names)

    def __len__(self) -> int:
        return len(self._tables[0].column_names)


def _select_images(table: Any, column: str, origin: str) -> Any:
    """Select the column of images, as the bytes or the paths of their files."""
    # an extra, imported by `_load` already
    from datasets import Image as ImageFeature

    try:
        return table.select_columns([column]).cast_column(column, ImageFeature(decode=False))
    except (TypeError, ValueError, NotImplementedError) as error:
        kind = shorten(str(table.features[column]))
        raise ValueError(
            f"{origin}: the column {column} holds {kind}, not images"
            "; name the column of the images image or img"
        ) from error


def _list_parquet(path: Path) -> dict[str, list[str]]:
    """List the Parquet files of each split at a path."""
    if path.suffix == ".parquet" and path.is_file():
        return {"train": [str(path)]}
    return list_shards(str(path), ".parquet") or list_shards(str(path / "data"), ".parquet")


def _load(root: str, cache_dir: Path) -> dict[str, Any]:
    """Open a data set: split → table, as the library names and maps them."""
    try:
        # an extra, which takes seconds to import
        import datasets
    except ImportError as error:
        hint = "pip install '.[datasets]' in the clone of vit"
        raise ValueError(
            f"data.root {root} is read by the library datasets, which is not installed; {hint}"
        ) from error

    path = expand_home(root)
    parquet = _list_parquet(path)
    with _quiet(datasets):
        try:
            if root.startswith("hf:"):
                name, _, configuration = root.removeprefix("hf:").partition(":")
                with offline_if_unreachable():
                    tables = datasets.load_dataset(
                        name, configuration or None, cache_dir=str(cache_dir)
                    )
            elif parquet:
                # the library takes them for patterns
                files = {split: list(map(glob.escape, each)) for split, each in parquet.items()}
                tables = datasets.load_dataset(
                    "parquet", data_files=files, cache_dir=str(cache_dir), batch_size=1000
                )
            else:
                tables = datasets.load_from_disk(str(path))
            by_split = dict(tables) if isinstance(tables, dict) else {"train": tables}
            if not by_split:
                raise ValueError("it names no splits")
            # damaged places of values would be read outside the file
            for table in by_split.values():
                table.data.validate(full=True)
        except Exception as error:
            # the library, pyarrow and the client of the Hub raise errors of many types
            reason = shorten(first_line(error.__cause__ or error))
            raise OSError(f"data.root {root} can't be read as a data set: {reason}") from error
    # a directory may ask for rows of another library's types
    return {split: table.with_format(None) for split, table in by_split.items()}


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Turn off the library's messages, since we report errors, and its bars outside a terminal."""
    level = datasets.logging.get_verbosity()
    had_bars = not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if had_bars:
            datasets.enable_progress_bars()


def _find_column(features: Mapping[str, Any], names: Sequence[str], origin: str) -> str:
    """Find the first of the columns `names` that exists."""
    for name in names:
        if name in features:
            return name
    only = shorten(", ".join(features))
    wanted = " or ".join(names)
    raise ValueError(f"{origin} has no column {wanted}, only {only}; rename the right one")
