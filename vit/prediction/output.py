"""Predictions in a file that is written as they are made, and that a stopped command goes on with."""

import csv
import importlib.util
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.dataset import printable
from vit.prediction.records import Columns, Prediction, format_cell, write_csv, write_jsonl
from vit.runtime.arguments import first_line, shorten
from vit.runtime.documents import read_json
from vit.runtime.files import (
    expand_home,
    remove_temporaries,
    write_atomically,
    write_json,
)
from vit.runtime.locks import lock_file

_SUFFIXES = (".jsonl", ".csv", ".parquet")
# rows of a part of Parquet: what a kill can lose
_PART_ROWS = 4096
_PARTS = "part-*.parquet"
# an image that isn't predicted yet, with its name
Items = Iterator[tuple[str, Any]]


class Output(ABC):
    """A file of predictions.

    Args:
        path: FILE.jsonl or FILE.csv, or FILE.parquet, which is a folder of parts. Its options are
            in FILE.jsonl.options.json and so on.
        resume: Go on after the rows that it has.

    Attributes:
        num_skipped: Rows that it had.

    Raises:
        ValueError: It has another suffix, or another process writes it.
        OSError: It is there already, or its folder isn't.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.num_skipped = 0
        self._options = path.with_name(f"{path.name}.options.json")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"--output {path}: there is no folder {path.parent}; make it")
        self._resumes = path.exists()
        if self._resumes and not resume:
            text = f"--output {path} is there already; add --resume to go on with it"
            raise FileExistsError(f"{text}, or choose another")

    @abstractmethod
    def _read_names(self) -> Iterator[str]:
        """Yield the names in the rows, then remove what was written in part."""

    @abstractmethod
    def _write(self, predictions: Iterable[Prediction]) -> Iterator[Prediction]:
        """Add predictions, and yield each."""

    def _show(self, name: str) -> str:
        """Return the name of an image as a row has it."""
        return name

    def write(
        self,
        predict: Callable[[Items], Iterator[Prediction]],
        items: Items,
        options: Mapping[str, object],
    ) -> Iterator[Prediction]:
        """Predict the images that have no row yet, write them, and yield each.

        Args:
            predict: Function that predicts images.
            items: All images in their order.
            options: Facts of the model and the options that rows depend on.

        Raises:
            ValueError: The rows were made with other options, or of other images.
        """
        lock = self.path.with_name(f".{self.path.name}.lock")
        refusal = f"another process writes {self.path}; wait for it"
        with lock_file(lock, refusal=refusal):
            # since the model was opened
            if self.path.exists() != self._resumes:
                raise ValueError(refusal)
            if self._resumes:
                self._check_options(options)
                items = self._skip(items)
            else:
                write_json(self._options, options)
            yield from self._write(predict(items))
        with suppress(OSError):
            lock.unlink()

    def _check_options(self, options: Mapping[str, object]) -> None:
        try:
            before = read_json(self._options)
        except FileNotFoundError:
            text = f"{self.path} can't be resumed without {self._options.name}"
            raise ValueError(f"{text}; choose another --output") from None
        for name, value in options.items():
            if before.get(name) == value:
                continue
            text = f"{name} {shorten(str(before.get(name)), 60)}, not {shorten(str(value), 60)}"
            raise ValueError(
                f"{self.path} was written with {text}; use the same, or choose another --output"
            )

    def _skip(self, items: Items) -> Items:
        for name in self._read_names():
            image, _ = next(items, ("", None))
            if self._show(image) != name:
                found = shorten(image, 100) or "missing"
                raise ValueError(
                    f"row {self.num_skipped + 1:,} of {self.path} is {shorten(name, 100)}, and that"
                    f" image is now {found}; name the same images, or choose another --output"
                )
            self.num_skipped += 1
        return items


class _Lines(Output):
    """JSON lines or CSV."""

    def _read_names(self) -> Iterator[str]:
        is_csv = self.path.suffix == ".csv"
        end = 0
        row = b""
        with self.path.open("rb") as file:
            for line in file:
                row += line
                # a cell of CSV may have several lines; the last row may have been cut
                if not line.endswith(b"\n") or (is_csv and row.count(b'"') % 2):
                    continue
                text = row.decode("utf-8", "surrogateescape")
                if not is_csv:
                    yield json.loads(text)["path"]
                elif end:
                    yield next(csv.reader([text]))[0]
                end += len(row)
                row = b""
        os.truncate(self.path, end)

    def _show(self, name: str) -> str:
        return name if self.path.suffix == ".jsonl" else format_cell(name)

    def _write(self, predictions: Iterable[Prediction]) -> Iterator[Prediction]:
        write = write_jsonl
        if self.path.suffix == ".csv":
            with_header = not self._resumes or not self.path.stat().st_size
            write = partial(write_csv, with_header=with_header)
        # a line is written whole, at once
        with self.path.open("a", encoding="utf-8", errors="surrogateescape", buffering=1) as file:
            yield from write(predictions, file=file)
            file.flush()
            os.fsync(file.fileno())


class _Parts(Output):
    """A folder of Parquet files."""

    def __init__(
        self,
        path: Path,
        *,
        resume: bool,
        build_columns: Callable[[Sequence[Prediction]], Columns],
    ) -> None:
        super().__init__(path, resume=resume)
        self._build_columns = build_columns
        self._num_parts = 0

    def _read_names(self) -> Iterator[str]:
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        remove_temporaries(self.path)
        for part in sorted(self.path.glob(_PARTS)):
            self._num_parts += 1
            try:
                names = pq.read_table(part, columns=["path"])["path"].to_pylist()
            except ValueError as error:
                text = f"can't be read ({first_line(error)}); remove it and the parts after it"
                raise ValueError(f"{part} {text}") from error
            yield from names

    def _show(self, name: str) -> str:
        return printable(name)

    def _write(self, predictions: Iterable[Prediction]) -> Iterator[Prediction]:
        import pyarrow.parquet as pq

        def save() -> None:
            part = self.path / _PARTS.replace("*", f"{self._num_parts:05d}")
            table = build_table(self._build_columns(rows))
            write_atomically(part, partial(pq.write_table, table))
            self._num_parts += 1
            rows.clear()

        self.path.mkdir(exist_ok=True)
        rows: list[Prediction] = []
        try:
            for prediction in predictions:
                rows.append(prediction)
                if len(rows) == _PART_ROWS:
                    save()
                yield prediction
        finally:
            # also of a command that is stopped
            if rows:
                save()


def build_table(columns: Columns) -> Any:
    """Return columns of predictions as a table of pyarrow, with null for what is missing."""
    import pyarrow as pa

    texts = pa.list_(pa.string())
    kinds = {"prediction_set": texts, "labels": texts}
    arrays = {}
    for name, values in columns.items():
        if values.dtype == object:
            cells = [printable(each) if isinstance(each, str) else each for each in values]
            arrays[name] = pa.array(cells, kinds.get(name, pa.string()))
        elif values.ndim == 1:
            arrays[name] = pa.array(values, from_pandas=True)
        else:
            is_missing = np.isnan(values[:, 0])
            lengths = np.where(is_missing, 0, values.shape[1])
            ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            offsets = pa.array(ends, mask=np.append(is_missing, False))
            numbers = pa.array(values[~is_missing].ravel())
            arrays[name] = pa.ListArray.from_arrays(offsets, numbers)
    return pa.table(arrays)


def open_output(
    path: str | Path,
    *,
    resume: bool,
    build_columns: Callable[[Sequence[Prediction]], Columns],
    only_jsonl: Sequence[str] = (),
    not_csv: Sequence[str] = (),
) -> Output:
    """Open a file of predictions before any is made. See `Output`.

    Args:
        path: The file.
        resume: Go on after the rows that it has.
        build_columns: Function that makes columns of predictions, for Parquet.
        only_jsonl: Options for which only JSON lines have a place.
        not_csv: Options for which CSV has no place.
    """
    path = expand_home(path)
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"--output {path} ends in none of {', '.join(_SUFFIXES)}")
    for name in (*only_jsonl, *(not_csv if path.suffix == ".csv" else ())):
        if path.suffix != ".jsonl":
            raise ValueError(f"--output {path} has no place for --{name}; name a .jsonl file")
    if path.suffix != ".parquet":
        return _Lines(path, resume=resume)
    if importlib.util.find_spec("pyarrow") is None:
        hint = "pip install '.[datasets]' in the clone of vit; .jsonl needs nothing"
        raise ValueError(f"--output {path} needs pyarrow: {hint}")
    return _Parts(path, resume=resume, build_columns=build_columns)
