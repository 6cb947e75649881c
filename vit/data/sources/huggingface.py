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

from vit.data.class_names import check_labels, is_label
from vit.data.dataset import ImageDataset, Request, Source, SourceSplits
from vit.data.images import read_image, read_pixels
from vit.data.python_images import find_feature_names
from vit.data.sources.base import SPLIT_OF, ImageReader, hash_bytes, read_stats
from vit.data.sources.remote import is_remote
from vit.data.sources.shards import list_shards
from vit.data.sources.table_labels import find_label_column, number_splits
from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import default_cache_dir, expand_home
from vit.runtime.hub import offline_if_unreachable


@dataclass(frozen=True, eq=False)
class RowReader(ImageReader):
    """Images in rows of a table that is mapped from disk: the bytes of an image file, or its
    path."""

    # datasets.Dataset of one column, not decoded
    rows: Any
    ids: Sequence[str]
    # int64 [n], numbers of the rows
    indices: np.ndarray

    def image(self, index: int) -> Image.Image:
        image: Image.Image = self._read(index, read_image)
        return image

    def decode(self, index: int) -> Image.Image | np.ndarray:
        decoded: Image.Image | np.ndarray = self._read(index, read_pixels)
        return decoded

    def _read(self, index: int, read: Callable[..., Any]) -> Any:
        # one column, of {bytes, path}
        (stored,) = self.rows[int(self.indices[index])].values()
        if stored is not None and stored["bytes"] is not None:
            return read(io.BytesIO(stored["bytes"]), name=self.ids[index])
        if stored is not None and stored["path"] is not None:
            return read(Path(stored["path"]))
        raise ValueError(f"{self.ids[index]} has no image")

    def sizes(self) -> np.ndarray:
        import pyarrow.compute as pc  # type: ignore[import-untyped]  # of the extra "datasets"

        lengths = pc.binary_length(self._read_field("bytes"))
        sizes: np.ndarray = pc.fill_null(lengths, -1).to_numpy()[self.indices]
        return sizes

    def cache_key(self) -> bytes:
        stats = read_stats([file["filename"] for file in self.rows.cache_files])
        # rows that hold a path change with the file
        return stats.tobytes() + self.indices.tobytes() + read_stats(self.list_paths()).tobytes()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def place(self) -> str:
        files = self.rows.cache_files
        return os.path.realpath(files[0]["filename"]) if files else ""

    def digest(self, index: int) -> int:
        (stored,) = self.rows[int(self.indices[index])].values()
        content = (stored or {}).get("bytes")
        if content is None:
            path = (stored or {}).get("path")
            content = b"" if path is None else read_stats([path]).tobytes() + os.fsencode(path)
        return hash_bytes(content)

    def list_paths(self) -> list[str]:
        """List the files of the rows that hold a path alone."""
        is_path_alone = self._read_field("bytes").is_null().take(self.indices)
        paths = self._read_field("path").take(self.indices)
        listed: list[str] = paths.filter(is_path_alone).drop_null().to_pylist()
        return listed

    def _read_field(self, name: str) -> Any:
        """Read the bytes or the paths of all rows, as an array of Arrow."""
        import pyarrow.compute as pc

        (column,) = self.rows.with_format("arrow")[:].columns
        return pc.struct_field(column, name)

    def subset(self, indices: np.ndarray) -> RowReader:
        ids = [self.ids[index] for index in indices]
        return replace(self, ids=ids, indices=self.indices[indices])


def is_dataset(path: Path) -> bool:
    """Return true for Parquet files and for a directory that save_to_disk wrote."""
    is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return is_saved or bool(list_parquet(path))


def find_huggingface(request: Request) -> SourceSplits:
    """Find the splits of a data set that the library `datasets` reads.

    An image is in the column image or img; its class is in label, labels or class, as a number, a
    name, or a number that the file's features name; several labels are a list of these, or a number
    0 or 1 for each. Splits without labels are left out.

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

    name_of, labels = _find_splits(tables, label_column, origin)
    class_names, numbers, notes, guesses = _number_labels(
        labels, find_feature_names(features[label_column]), request, name_of, origin
    )
    # the user is told, because a split may have been spelled in another way
    left_out = [name for name in tables if name not in name_of.values()]
    notes += [f"the split {name!r} was left out" for name in left_out]

    def load(split: str) -> ImageDataset:
        name = name_of[split]
        own = numbers[split]
        # -1 among other labels, or a number beyond the names
        for wrong in own[(own < 0) | (own >= len(class_names))]:
            text = f"label {wrong} is not one of the {len(class_names)} classes"
            raise ValueError(f"{origin} {name}: {text}; correct it, or remove the row")

        ids = [f"{name}/{row:05d}" for row in range(len(own))]
        rows = _select_images(tables[name], image_column, origin)
        reader = RowReader(rows, ids, np.arange(len(ids)))
        if not request.allow_outside:
            _check_inside(reader, request, f"{origin} {name}")
        dataset = ImageDataset(
            name="huggingface",
            class_names=class_names,
            labels=own,
            ids=ids,
            reader=reader,
            notes=tuple(notes),
            read_column=partial(read_rows_column, {name: tables[name]}, origin=origin),
        )
        return dataset.keep_classes(request.classes)

    origins = {split: f"the split {name!r}" for split, name in name_of.items()}
    unused = {f"rows of {name!r}": len(tables[name]) for name in left_out}
    return SourceSplits(origins, load, unused, guesses).with_test_split()


def open_rows(place: str) -> Iterator[RowReader]:
    """Open each split of a data set, whether it has labels or not. See `find_huggingface`."""
    for split, table in _load(place, default_cache_dir() / "datasets").items():
        column = _find_column(table.features, ("image", "img"), place)
        rows = _select_images(table, column, place)
        ids = [f"{split}/{row:05d}" for row in range(len(table))]
        yield RowReader(rows, ids, np.arange(len(ids)))


def read_rows_column(
    tables: Mapping[str, Any], column: str, *, origin: str, id_format: str = "05d"
) -> dict[str, Any]:
    """Read a column of tables of the library `datasets`: id of an image → its value.

    Args:
        tables: Name in the ids → table.
        column: The column.
        origin: Name of the tables in messages.
        id_format: How the number of a row is written in an id.

    Raises:
        ValueError: There is no such column.
    """
    values: dict[str, Any] = {}
    for name, table in tables.items():
        if column not in table.column_names:
            known = shorten(", ".join(map(repr, table.column_names)), 600)
            raise ValueError(f"{origin} has no column {shorten(column)!r}; they are {known}")
        cells = list(table.select_columns([column])[column])
        # numbers whose names the features have
        names: Sequence[str] = getattr(table.features[column], "names", None) or ()
        for row, value in enumerate(cells):
            is_named = isinstance(value, int) and 0 <= value < len(names)
            values[f"{name}/{row:{id_format}}"] = names[value] if is_named else value
    return values


def _recognizes(place: str) -> bool:
    # object storage can't be asked for Parquet files
    return not is_remote(place) and (place.startswith("hf:") or is_dataset(expand_home(place)))


SOURCE = Source(
    "huggingface", find_huggingface, recognizes=_recognizes, needs_root=True, unit="rows"
)


def _find_splits(
    tables: Mapping[str, Any], label_column: str, origin: str
) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Return the library's name of each split that has labels, and its labels."""
    name_of: dict[str, str] = {}
    labels: dict[str, list[Any]] = {}
    for name, table in tables.items():
        split = SPLIT_OF.get(name.lower())
        values = _read_labels(table, label_column) if split else []
        if split is None or not values:
            continue
        if split in name_of:
            raise ValueError(
                f"{origin} has the splits {name_of[split]!r} and {name!r}"
                f", both names of the {split} split; rename one"
            )
        name_of[split] = name
        labels[split] = values
    if not name_of:
        known = ", ".join(SPLIT_OF)
        names = ", ".join(tables)
        raise ValueError(f"{origin} has no labels in a split of {known}, only {names}; name one so")
    return name_of, labels


def _number_labels(
    labels: Mapping[str, Sequence[Any]],
    class_names: tuple[str, ...] | None,
    request: Request,
    name_of: Mapping[str, str],
    origin: str,
) -> tuple[tuple[str, ...], Mapping[str, np.ndarray], list[str], Sequence[str]]:
    """Return the class names; the labels of each split, int64 [n] or bool [n, C], in which numbers
    that the features don't name are left as they are; warnings; and how labels were read."""
    column = find_label_column(labels, class_names, task=request.labels.task, origin=origin)
    if not column.several:
        for split, values in column.labels.items():
            for row, value in enumerate(values):
                if not is_label(value):
                    text = f"label {shorten(repr(value))} is neither a text nor a whole number"
                    raise ValueError(
                        f"{origin} {name_of[split]} row {row}: {text}; give each image one class"
                    )
    # labels are the names themselves, or numbers whose names the features have
    if column.several or class_names is None:
        names, marks, notes = number_splits(
            column.labels, request.classes, class_names=class_names, origin=origin
        )
        return names, marks, [*notes, *column.notes], column.guesses
    places = {name: place for place, name in enumerate(class_names)}
    numbers = {
        split: np.array([places.get(value, value) for value in values], dtype=np.int64)
        for split, values in column.labels.items()
    }
    named = {
        split: [class_names[place] for place in each if 0 <= place < len(class_names)]
        for split, each in numbers.items()
    }
    check_labels(named, class_names, request.classes, origin=origin)
    return class_names, numbers, [], column.guesses


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


def _read_labels(table: Any, column: str) -> list[Any]:
    """Read the label of each row, or its list of labels; none if no row has one (-1, as in test
    splits of the Hub, null, or an empty list)."""
    values = list(table[column])
    return [] if all(value in (None, -1, [], [-1]) for value in values) else values
