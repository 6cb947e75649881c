"""Data sets of Hugging Face's library `datasets`: names, directories of save_to_disk, and Parquet files."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from vit.data.images import check_header, open_image
from vit.data.sets.shards import list_shards
from vit.data.sets.source import (
    SPLIT_OF,
    FindOptions,
    FoundSplit,
    FoundSplits,
    ImageSource,
    StoredReader,
    check_label,
    take_validation_as_test,
)
from vit.runtime.arguments import first_line, shorten
from vit.runtime.hub import without_retries

_IMAGE, _LABEL = ("image", "img"), ("label", "class")


@dataclass(frozen=True, eq=False)
class RowReader(StoredReader):
    """Images in rows of a table that is mapped from disk: the bytes of an image file, or its path."""

    rows: Any  # datasets.Dataset of one column, not decoded
    ids: Sequence[str]
    indices: np.ndarray

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        file, name = self._find(index)
        return open_image(file, name=name)

    def check(self, index: int) -> None:
        file, name = self._find(index)
        check_header(file, name=name)

    def _find(self, index: int) -> tuple[Path | BinaryIO, str | None]:
        (image,) = self.rows[int(self.indices[index])].values()
        if image is None or (image["bytes"] is None and image["path"] is None):
            raise ValueError(f"{self.ids[index]} has no image")
        return (Path(image["path"]), None) if image["bytes"] is None else (io.BytesIO(image["bytes"]), self.ids[index])

    def sizes(self) -> np.ndarray:
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        (column,) = self.rows.with_format("arrow")[:].columns
        lengths = pc.fill_null(pc.binary_length(pc.struct_field(column, "bytes")), -1)
        sizes: np.ndarray = lengths.to_numpy()[self.indices]
        return sizes

    def cache_key(self) -> bytes:
        stats = [os.stat(file["filename"]) for file in self.rows.cache_files]
        return repr([(stat.st_size, stat.st_mtime_ns) for stat in stats]).encode() + self.indices.tobytes()

    def subset(self, indices: np.ndarray) -> RowReader:
        return replace(self, ids=[self.ids[index] for index in indices], indices=self.indices[indices])


def is_dataset(path: Path) -> bool:
    """Whether there are Parquet files, or what save_to_disk wrote."""
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return saved or bool(_list_parquet(path))


def find_huggingface(options: FindOptions) -> FoundSplits:
    """The splits of `root`: "hf:NAME" or "hf:NAME:CONFIGURATION" of the Hub, a directory that save_to_disk wrote, a
    Parquet file or a folder of them (such as data/train-00000.parquet).

    An image is in the column image, img or the only one of images; its class in label, class or the only one of
    classes, as a number, a name, or a number that the file's features name. Splits without labels are left out.
    """
    if options.root is None:
        raise ValueError("data.name=huggingface needs data.root: hf:NAME, or a folder or file of it")
    origin = f"data.root {options.root}"
    tables = _load(str(options.root), options.cache_dir / "datasets")
    features = next(iter(tables.values())).features
    image, label = _find_column(features, _IMAGE, "Image", origin), _find_column(features, _LABEL, "ClassLabel", origin)
    values = {name: _read_labels(table, label, f"{origin} {name}") for name, table in tables.items()}
    used = {name: SPLIT_OF[name.lower()] for name in tables if values[name] and name.lower() in SPLIT_OF}
    if not used:
        raise ValueError(f"{origin} has no labels in a split of {', '.join(SPLIT_OF)}, only {', '.join(tables)}")
    named = getattr(features[label], "names", None)
    names = named or sorted({value for name in used for value in values[name]})
    if len(names) < 2:
        raise ValueError(f"{origin} names {len(names)} classes; a classifier needs at least two")
    numbers = {value: number for number, value in enumerate(names)}
    notes = tuple(f"the split {name!r} was left out" for name in tables if name not in used)

    def load(name: str) -> ImageSource:
        ids = [f"{name}/{row:05d}" for row in range(len(values[name]))]
        labels = np.array(values[name] if named else [numbers[value] for value in values[name]])
        if (wrong := labels[(labels < 0) | (labels >= len(names))]).size:
            raise ValueError(f"{origin} {name}: label {wrong[0]} is none of the {len(names)} classes")
        reader = RowReader(_keep_images(tables[name], image, origin), ids, np.arange(len(ids)))
        known: dict[str, Any] = {"class_names": tuple(map(str, names)), "labels": labels.astype(np.int64), "ids": ids}
        source = ImageSource(name="huggingface", **known, reader=reader, notes=notes)
        return source.keep_classes(options.classes)

    return take_validation_as_test(
        {split: FoundSplit(f"the split {name!r}", partial(load, name)) for name, split in used.items()}
    )


def _list_parquet(path: Path) -> dict[str, list[Path]]:
    """The Parquet files of each split at a path."""
    if not path.is_dir():
        return {"train": [path]} if path.suffix == ".parquet" and path.is_file() else {}
    return list_shards(path.glob, ".parquet") or list_shards((path / "data").glob, ".parquet")


def _load(root: str, cache_dir: Path) -> dict[str, Any]:
    """Split → table, as the library names and maps them."""
    try:
        import datasets
    except ImportError as error:
        cure = "pip install 'vit-pipeline[datasets]'"
        raise ValueError(f"data.root {root} is read by the library datasets, which is not installed: {cure}") from error
    path = Path(root).expanduser()
    files = {split: [str(file) for file in files] for split, files in _list_parquet(path).items()}
    with _quiet(datasets):
        try:
            if root.startswith("hf:"):
                name, _, configuration = root.removeprefix("hf:").partition(":")
                with without_retries():
                    found = datasets.load_dataset(name, configuration or None, cache_dir=str(cache_dir))
            elif files:
                found = datasets.load_dataset("parquet", data_files=files, cache_dir=str(cache_dir), batch_size=1000)
            else:
                found = datasets.load_from_disk(str(path))
        except Exception as error:  # of the library, of pyarrow or of what reaches the Hub
            reason = shorten(first_line(error.__cause__ or error))
            raise OSError(f"data.root {root} can't be read as a data set: {reason}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """What fails is said once, by us; bars are for a screen."""
    level, hidden = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not hidden:
            datasets.enable_progress_bars()


def _find_column(features: Mapping[str, Any], names: Sequence[str], kind: str, origin: str) -> str:
    """The first of the `names` that is there, or the only column of a kind."""
    of_kind = [name for name, feature in features.items() if type(feature).__name__ == kind]
    found = [name for name in names if name in features] or (of_kind if len(of_kind) == 1 else [])
    if not found:
        raise ValueError(f"{origin} has no column {' or '.join(names)}, only {shorten(', '.join(features))}")
    return found[0]


def _read_labels(table: Any, column: str, origin: str) -> list[Any]:
    """The value of each row; none where no row has one (-1, as the Hub's test splits, or null)."""
    values = list(table[column])
    if all(value is None or value == -1 for value in values):
        return []
    for row, value in enumerate(values):
        check_label(value, origin=f"{origin} row {row}")
    return values


def _keep_images(table: Any, column: str, origin: str) -> Any:
    """The images alone, as the bytes or the paths of their files."""
    from datasets import Image as Feature

    try:
        return table.select_columns([column]).cast_column(column, Feature(decode=False))
    except (TypeError, ValueError, NotImplementedError) as error:
        kind = shorten(str(table.features[column]))
        raise ValueError(f"{origin}: the column {column} holds {kind}, no images") from error
