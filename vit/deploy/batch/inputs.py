"""The images of a job: files on a shared disk or in object storage, or rows of Parquet files."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from vit.data.images import is_image_name
from vit.data.inputs import IMAGE_COLUMNS, PATH_COLUMNS, list_inputs
from vit.data.sources.remote import is_remote, read_address, request
from vit.data.sources.shards import list_shards
from vit.runtime.files import read_bytes


def list_files(places: Iterable[str]) -> pa.Table:
    """List images by their names, which are those of `vit predict`.

    Args:
        places: Images, folders, tables of paths, Parquet files, and addresses of these.

    Returns:
        Columns path, and for rows of Parquet files: file, row group, and place in it.
    """
    paths: list[str] = []
    rows: list[tuple[str, str, int, int]] = []
    for place in places:
        if tables := _find_tables(place):
            rows += (row for table in tables for row in _list_rows(table))
            continue
        for name, image in list_inputs([place]):
            if not isinstance(image, str) and not ("://" in name and is_image_name(name)):
                text = "files, tables of their paths and Parquet"
                raise ValueError(f"--engine ray reads {text}, and {place} is none of these")
            paths.append(name)
    if rows and paths:
        raise ValueError(f"{paths[0]} is no row of Parquet, and others are; start two jobs")
    if not rows:
        return pa.table({"path": pa.array(dict.fromkeys(paths), pa.string())})
    names = ("path", "file", "group", "place")
    return pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))


def _find_tables(place: str) -> list[str]:
    """Find Parquet files that hold images."""
    files = [place]
    if not place.endswith(".parquet"):
        files = []
        if os.path.isdir(place) or (is_remote(place) and not is_image_name(place)):
            files = [file for each in list_shards(place, ".parquet").values() for file in each]
    if files:
        with _open(files[0]) as table:
            files = files if _find_column(table, IMAGE_COLUMNS) else []
    return files


def _list_rows(file: str) -> Iterator[tuple[str, str, int, int]]:
    number = 0
    with _open(file) as table:
        named = _find_column(table, PATH_COLUMNS)
        for group in range(table.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            names = [f"{file}/{row:05d}" for row in range(number, number + count)]
            if named:
                given = table.read_row_group(group, [named])[0].to_pylist()
                names = [name or number for name, number in zip(given, names, strict=True)]
            yield from ((name, file, group, place) for place, name in enumerate(names))
            number += count


def _open(file: str) -> Any:
    source = request(file, lambda files: files.open(file)) if is_remote(file) else file
    return pq.ParquetFile(source)


def _find_column(table: Any, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in table.schema_arrow.names), None)


def read_contents(rows: pa.Table) -> pa.Table:
    """Return the path and the bytes of each image; no bytes where a worker has to say why."""
    paths, *places = rows.to_pydict().values()
    contents: list[bytes | None] = []
    if places:
        for (file, group), cells in groupby(zip(*places, strict=True), itemgetter(0, 1)):
            with _open(file) as table:
                column = _find_column(table, IMAGE_COLUMNS)
                images = table.read_row_group(group, [column])[0].combine_chunks()
            if pa.types.is_struct(images.type):
                images = pc.struct_field(images, "bytes")
            contents += images.take([place for *_, place in cells]).to_pylist()
    else:
        # object storage answers many requests at once
        with ThreadPoolExecutor(32) as pool:
            contents += pool.map(_read_file, paths)
    return pa.table({"path": paths, "bytes": pa.array(contents, pa.large_binary())})


def _read_file(path: str) -> bytes | None:
    try:
        return read_address(path) if is_remote(path) else read_bytes(Path(path))
    except (OSError, ValueError):
        return None
