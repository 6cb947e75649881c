"""Data sets of Hugging Face's library `datasets`: names on the Hub, directories of save_to_disk and
Parquet files."""

from __future__ import annotations

import glob
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.data.dataset import Request, SourceSplits
from vit.data.images import read_image, read_pixels
from vit.data.python_images import find_feature_names
from vit.data.sources.base import SPLIT_OF, ImageReader, hash_bytes, read_stats
from vit.data.sources.listing import Listing, as_labels, build_splits
from vit.data.sources.remote import is_remote
from vit.data.sources.shards import list_shards
from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import default_cache_dir, expand_home
from vit.runtime.hub import offline_if_unreachable


@dataclass(frozen=True, eq=False)
class RowReader(ImageReader):
    """Images in rows of tables that are mapped from disk: the bytes of a file, or its path."""

    # datasets.Dataset of one column each, not decoded
    tables: Sequence[Any]
    ids: Sequence[str]
    # int64 [n, 2], numbers of the table and of the row
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def image(self, index: int) -> Image.Image:
        image: Image.Image = self._read(index, read_image)
        return image

    def decode(self, index: int) -> Image.Image | np.ndarray:
        decoded: Image.Image | np.ndarray = self._read(index, read_pixels)
        return decoded

    def _get(self, index: int) -> Mapping[str, Any]:
        """Return the bytes and the path of an image."""
        number, row = self.places[index].tolist()
        # one column
        (stored,) = self.tables[number][row].values()
        return stored or {"bytes": None, "path": None}

    def _read(self, index: int, read: Callable[..., Any]) -> Any:
        stored = self._get(index)
        if stored["bytes"] is not None:
            return read(io.BytesIO(stored["bytes"]), name=self.ids[index])
        if stored["path"] is not None:
            return read(Path(stored["path"]))
        raise ValueError(f"{self.ids[index]} has no image")

    @property
    def place(self) -> str:
        files = self.tables[0].cache_files
        return os.path.realpath(files[0]["filename"]) if files else ""

    def stats(self) -> np.ndarray | None:
        # rows that hold a path change with the file
        if self.list_paths():
            return None
        files = [table.cache_files for table in self.tables]
        if not all(files):
            return None
        stats: np.ndarray = read_stats([each[0]["filename"] for each in files])[self.places[:, 0]]
        stats[:, 0] = self.places[:, 1]
        return stats

    def digest(self, index: int) -> int:
        stored = self._get(index)
        if stored["bytes"] is not None:
            return hash_bytes(stored["bytes"])
        path = stored["path"] or ""
        return hash_bytes(read_stats([path]).tobytes() + os.fsencode(path))

    def sizes(self) -> np.ndarray:
        import pyarrow.compute as pc  # type: ignore[import-untyped]  # of the extra "datasets"

        sizes = np.zeros(len(self), dtype=np.int64)
        for number, table in enumerate(self.tables):
            is_own = self.places[:, 0] == number
            (column,) = table.with_format("arrow")[:].columns
            lengths = pc.fill_null(pc.binary_length(pc.struct_field(column, "bytes")), -1)
            sizes[is_own] = lengths.to_numpy()[self.places[is_own, 1]]
        return sizes

    def cache_key(self) -> bytes:
        files = [file["filename"] for table in self.tables for file in table.cache_files]
        return (
            read_stats(files).tobytes()
            + self.places.tobytes()
            + read_stats(self.list_paths()).tobytes()
        )

    def list_paths(self) -> list[str]:
        """List the files of the rows that hold a path alone."""
        import pyarrow.compute as pc

        paths: list[str] = []
        for number, table in enumerate(self.tables):
            rows = self.places[self.places[:, 0] == number, 1]
            (column,) = table.with_format("arrow")[:].columns
            is_path_alone = pc.struct_field(column, "bytes").is_null().take(rows)
            own = pc.struct_field(column, "path").take(rows)
            paths += own.filter(is_path_alone).drop_null().to_pylist()
        return paths

    def subset(self, indices: np.ndarray) -> RowReader:
        ids = [self.ids[index] for index in indices]
        return replace(self, ids=ids, places=self.places[indices])


def is_dataset(path: Path) -> bool:
    """Return true for Parquet files and for a directory that save_to_disk wrote."""
    is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return is_saved or bool(list_parquet(path))


def is_place(place: str) -> bool:
    """Return true for a name on the Hub, Parquet files or a saved data set."""
    # object storage can't be asked for Parquet files
    return not is_remote(place) and (place.startswith("hf:") or is_dataset(expand_home(place)))


def find_huggingface(request: Request) -> SourceSplits:
    """Find the splits of a data set that the library `datasets` reads.

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
    label_column = _find_column(features, ("label", "labels", "class"), origin)
    names = find_feature_names(features[label_column])
    splits: list[str] = []
    labels: list[Any] = []
    ids: list[str] = []
    columns: list[Any] = []
    places: list[tuple[int, int]] = []
    name_of: dict[str, str] = {}
    for name, table in tables.items():
        split = SPLIT_OF.get(name.lower())
        values = list(table[label_column])
        # test splits of the Hub have -1
        if split is None or all(value in (None, -1, [], [-1]) for value in values):
            continue
        if split in name_of:
            raise ValueError(
                f"{origin} has the splits {name_of[split]!r} and {name!r}"
                f", both names of the {split} split; rename one"
            )
        name_of[split] = name
        read = partial(_read_label, names=names, task=request.labels.task)
        for row, value in enumerate(values):
            try:
                labels.append(read(value))
            except ValueError as error:
                raise ValueError(f"{origin} {name} row {row}: {error}") from error
        own = [f"{name}/{row:05d}" for row in range(len(values))]
        places += [(len(columns), row) for row in range(len(own))]
        columns.append(_select_images(table, image_column, origin))
        ids += own
        splits += [split] * len(own)
    if not name_of:
        known = ", ".join(SPLIT_OF)
        have = ", ".join(tables)
        raise ValueError(f"{origin} has no labels in a split of {known}, only {have}; name one so")
    reader = RowReader(columns, ids, np.array(places))
    if not request.allow_outside:
        _check_inside(reader, request, origin)
    # the user is told, because a split may have been spelled in another way
    left_out = [name for name in tables if name not in name_of.values()]
    listing = Listing(
        name="huggingface",
        origin=origin,
        ids=ids,
        labels=labels,
        reader=reader,
        splits=splits,
        origins={split: f"the split {name!r}" for split, name in name_of.items()},
        class_names=names,
        columns=RowColumns([tables[name] for name in name_of.values()]),
        notes=[f"the split {name!r} was left out" for name in left_out],
        unused={f"rows of {name!r}": len(tables[name]) for name in left_out},
    )
    return build_splits(listing, request.classes).with_test_split()


def _read_label(
    value: Any, *, names: Sequence[str] | None, task: str | None
) -> str | tuple[str, ...]:
    """Return the class of a row, or the labels in a list. Raises ValueError for anything else."""
    if isinstance(value, list) and task == "classes":
        raise ValueError(f"label {shorten(repr(value))} is a list, and data.task=classes")
    if isinstance(value, list):
        return as_labels([str(_read_label(each, names=names, task=None)) for each in value])
    if task == "multilabel":
        parts = str("" if value is None else value).split("|")
        return tuple(filter(None, (part.strip() for part in parts)))
    if isinstance(value, int) and not isinstance(value, bool) and names is not None:
        if not 0 <= value < len(names):
            text = f"label {value} is not one of the {len(names)} classes"
            raise ValueError(f"{text}; correct it, or remove the row")
        return names[value]
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
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


def open_rows(place: str) -> Iterator[RowReader]:
    """Open each split of a data set, whether it has labels or not. See `find_huggingface`."""
    for split, table in _load(place, default_cache_dir() / "datasets").items():
        column = _find_column(table.features, ("image", "img"), place)
        rows = _select_images(table, column, place)
        ids = [f"{split}/{row:05d}" for row in range(len(table))]
        yield RowReader([rows], ids, np.array([(0, row) for row in range(len(ids))]))


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


def _check_inside(reader: RowReader, request: Request, origin: str) -> None:
    """Raise ValueError if a row names an image that neither lies below the root nor was downloaded."""
    root = expand_home(str(request.root)).absolute()
    folder = root if root.is_dir() else root.parent
    inside = tuple(
        f"{place}{os.sep}" for place in (folder, request.cache_dir.absolute() / "datasets")
    )
    for path in reader.list_paths():
        if not os.path.abspath(path).startswith(inside):
            text = f"a row names {shorten(path)}, which is outside {folder}"
            raise ValueError(
                f"{origin}: {text}; use vit train with data.allow_outside=true to read it"
            )


def list_parquet(path: Path) -> dict[str, list[str]]:
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
    parquet = list_parquet(path)
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
