"""The images of a job: files on a shared disk or in object storage, and what holds many of them,
such as shards, whose images the tasks of the cluster list."""

import io
import pickle
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from PIL import Image

from vit.data.dataset import printable
from vit.data.images import DeepImage
from vit.data.inputs import Input, LazyImage, Lister, list_place, open_parquet
from vit.data.sources.remote import MissingError, RemoteError, is_remote, read_address
from vit.runtime.arguments import HIDDEN
from vit.runtime.files import read_bytes

# images that are listed, and those of a shard that are read, at once
_LISTED, _READ = 65_536, 256
# name in the rows; null if the image is at that place, else it is here, pickled
_ROWS = pa.schema({"path": pa.large_string(), "image": pa.large_binary()})
# the bytes of the image, or the pickled reason why there are none
_CONTENTS = _ROWS.append(pa.field("error", pa.large_binary()))


# a row for each image that is a file, and functions that list those of shards and data sets
Listed = tuple[pa.Table, dict[str, Lister]]


def list_files(places: Iterable[str]) -> Listed:
    """List what `vit predict` reads, by the same names."""
    packed: dict[str, Lister] = {}

    def list_rows() -> Iterator[tuple[str, bytes | None]]:
        for name, found in chain.from_iterable(map(list_place, places)):
            if not isinstance(found, partial):
                yield _describe(name, found)
            elif name.endswith(".parquet") and not _holds_images(name):
                # its rows are paths
                yield from (_describe(*each) for each in found())
            else:
                packed[name] = found

    rows = list_rows()
    tables = [_ROWS.empty_table()]
    while listed := list(islice(rows, _LISTED)):
        tables.append(pa.table(list(zip(*listed, strict=True)), schema=_ROWS))
    # a single thread keeps their order
    files = pa.concat_tables(tables).group_by(_ROWS.names, use_threads=False).aggregate([])
    return files, packed


def _holds_images(file: str) -> bool:
    with open_parquet(file) as (_, column, _):
        return column is not None


def _describe(name: str, image: Input) -> tuple[str, bytes | None]:
    shown = printable(name)
    # others are addresses with a token, paths that are no text, rows without an image
    is_there = image == shown or (is_remote(name) and HIDDEN not in name)
    return shown, None if is_there else pickle.dumps(image)


def check_names(listed: Listed) -> None:
    """Raise ValueError if images or shards have the same name: one would be taken for the other."""
    names = listed[0]["path"].chunks
    for place in listed[1]:
        if place.endswith(".parquet"):
            with open_parquet(place) as (table, _, named):
                names += table.read([named])[0].cast(pa.large_string()).chunks if named else []
        elif ".tar" in place:
            names.append(pa.array([place.rpartition("/")[2]], pa.large_string()))
    counts = pc.value_counts(pa.chunked_array(names, pa.large_string()).drop_null())
    doubles = counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist()
    if doubles:
        text = "leave out --resume, or give them different names"
        raise ValueError(
            f"{doubles[0]['counts']} of them are called {doubles[0]['values']}; {text}"
        )


def read_contents(rows: pa.Table, written: pa.Array) -> Iterator[pa.Table]:
    """Yield the path and the bytes of each image, or why it can't be read, a few at a time.

    Args:
        rows: Rows of files, or with a pickled `Lister`.
        written: Sorted names of images that are left out of what is packed.
    """

    def list_images() -> Iterator[tuple[str, Input]]:
        for path, pickled in zip(*rows.to_pydict().values(), strict=True):
            image = path if pickled is None else pickle.loads(pickled)
            if isinstance(image, partial):
                yield from (each for each in image() if not _has(written, each[0]))
            else:
                yield path, image

    images = list_images()
    # object storage answers many requests at once
    with ThreadPoolExecutor(32) as pool:
        while batch := list(islice(images, _READ)):
            names, items = zip(*batch, strict=True)
            found = pool.map(_read, items)
            yield pa.table([map(printable, names), *zip(*found, strict=True)], schema=_CONTENTS)


def _has(names: pa.Array, name: str) -> bool:
    place = bisect_left(names, printable(name), key=lambda found: found.as_py())
    return place < len(names) and names[place].as_py() == printable(name)


def _read(image: Input) -> tuple[bytes | None, bytes | None]:
    """Return the bytes of an image, or the pickled error that says why there are none."""
    try:
        content: Any = image
        if isinstance(image, LazyImage):
            content = image.load()
        elif isinstance(image, str):
            content = read_address(image) if is_remote(image) else read_bytes(Path(image))
        if isinstance(content, Image.Image):
            content = _encode(content)
        if not isinstance(content, bytes):
            raise ValueError("there is no image")
        return content, None
    except (OSError, ValueError) as error:
        if isinstance(error, RemoteError) and not isinstance(error, MissingError):
            raise
        return None, pickle.dumps(error)


def _encode(image: Image.Image) -> bytes:
    if isinstance(image, DeepImage):
        raise ValueError("it has more than 8 bits a channel; predict it without --engine ray")
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def open_contents(rows: pa.Table) -> list[tuple[str, LazyImage]]:
    """Return the name of each image, and the image. See `read_contents`."""

    def load(content: bytes, error: bytes | None) -> bytes:
        if error is not None:
            raise pickle.loads(error)
        return content

    return [
        (path, LazyImage(partial(load, content, error)))
        for path, content, error in zip(*rows.to_pydict().values(), strict=True)
    ]
