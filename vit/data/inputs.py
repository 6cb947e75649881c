"""Images without labels, from everything that training reads: files, folders, tables, Parquet,
shards, addresses and names of data sets. They are listed as they are needed."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vit.data.images import ImageInputs, is_image_name, list_images
from vit.data.python_images import iterate_images
from vit.runtime.arguments import first_line, hide_tokens, shorten
from vit.runtime.files import default_cache_dir, expand_home, open_regular

# columns of Parquet that hold images, and those that name their files
IMAGE_COLUMNS = ("image", "img", "bytes")
PATH_COLUMNS = ("path", "file_name", "image_path", "file_path", "filename", "file")
# rows of Parquet in memory at a time
_ROWS = 64


class LazyImage(NamedTuple):
    """An image whose file or pixels are loaded when needed, many at a time if it is remote."""

    load: Callable[[], bytes | Image.Image]
    is_remote: bool = False


# an image's path, its file, an upright image, one that isn't read yet, or none
Input = str | bytes | Image.Image | LazyImage | None


# lists the images in a shard, a Parquet file or a data set, by their names
Lister = partial[Iterator[tuple[str, Input]]]
Places = Iterator[tuple[str, Input | Lister]]


def list_inputs(images: ImageInputs) -> Iterator[tuple[str, Input]]:
    """Yield the name of each image, and the image.

    Args:
        images: See `vit.predict`.

    Raises:
        ValueError: A single folder has no images, or a table, Parquet file or shard has none.
        OSError: A table, file or address can't be read.
    """
    if isinstance(images, str | Path):
        yield from _unpack(list_place(str(images), is_alone=True))
        return
    is_list = isinstance(images, Iterable) and not hasattr(images, "__array__")
    if not is_list or isinstance(images, Image.Image | Mapping):
        yield from ((f"image {number}", each) for number, each in enumerate(list_images(images)))
        return
    number = 0
    for image in iterate_images(images):
        places = [image] if isinstance(image, str | Path) else list_images(image)
        for place in places:
            if isinstance(place, Image.Image):
                yield f"image {number}", place
                number += 1
                continue
            for listed in _unpack(list_place(str(place))):
                yield listed
                number += 1


def _unpack(places: Places) -> Iterator[tuple[str, Input]]:
    for name, found in places:
        yield from found() if isinstance(found, partial) else [(name, found)]


def is_input(place: str) -> bool:
    """Return true for the name of a data set, a pattern of shards or an address."""
    # the kinds of data sets take long to import
    from vit.data.sources.registry import find_kind
    from vit.data.sources.remote import is_remote

    return is_remote(place) or find_kind(place) is not None


def list_place(place: str, *, is_alone: bool = False) -> Places:
    """Yield the name of each image and the image, or a function that lists those in a file."""
    path = expand_home(place)
    name = place.lower()
    if "://" in place:
        yield from _list_address(place)
    elif os.path.isdir(place):
        for image in list_images([place]):
            # the folder itself if it has no image files
            is_packed = image == place
            yield from _list_packed(place, is_alone) if is_packed else [(str(image), image)]
    elif is_image_name(place):
        yield place, place
    elif name.endswith(".parquet") and path.is_file():
        yield from _pack(_list_rows, [place])
    elif ".tar" in name or place.startswith("hf:") or not os.path.lexists(path):
        yield from _list_named(place)
    else:
        from vit.data.sources.tables import is_table, list_table_images

        if not is_table(path):
            yield place, place
            return
        yield from map(_find_image, list_table_images(path))


def _list_packed(folder: str, is_alone: bool) -> Places:
    """List the images of a folder that has no image files: in shards, Parquet files, or a saved
    data set."""
    from vit.data.sources.huggingface import is_dataset, list_parquet
    from vit.data.sources.shards import list_shards

    path = Path(folder)
    if shards := list_shards(folder):
        yield from _pack(_list_shard, chain(*shards.values()))
    elif parquet := list_parquet(path):
        yield from _pack(_list_rows, chain(*parquet.values()))
    elif is_dataset(path):
        yield from _pack(_list_saved, [folder])
    else:
        # in a list, reading the folder says why it has no images
        yield from ((str(image), image) for image in list_images(folder if is_alone else [folder]))


def _list_named(place: str) -> Places:
    """List a data set, or shards that match a pattern; the place itself if it is none of these."""
    from vit.data.sources.registry import find_kind
    from vit.data.sources.shards import expand_pattern

    kind = None
    # a name that no file can have
    with suppress(OSError, ValueError):
        kind = find_kind(place)
    if kind == "webdataset":
        yield from _pack(_list_shard, expand_pattern(os.path.expanduser(place)))
    elif kind == "huggingface":
        yield from _pack(_list_saved, [place])
    elif kind is None:
        yield place, place
    else:
        yield place, partial(_list_dataset, kind)


def _list_dataset(kind: str) -> Iterator[tuple[str, Input]]:
    from vit.data.open import open_dataset

    dataset = open_dataset(kind).split("all")
    for index, name in enumerate(dataset.ids):
        yield name, LazyImage(partial(dataset.image, index))


def _list_saved(place: str) -> Iterator[tuple[str, Input]]:
    from vit.data.sources.huggingface import open_rows

    for reader in open_rows(place):
        for index, name in enumerate(reader.ids):
            yield name, LazyImage(partial(reader.image, index))


def _list_shard(shard: str) -> Iterator[tuple[str, Input]]:
    from vit.data.sources.remote import is_remote
    from vit.data.sources.shards import open_shard

    reader = open_shard(shard)
    for index, name in enumerate(reader.names):
        yield name, LazyImage(partial(reader.load, index), is_remote(shard))


def _pack(
    list_images: Callable[[str], Iterator[tuple[str, Input]]], files: Iterable[str]
) -> Places:
    return ((file, partial(list_images, file)) for file in files)


def _list_address(address: str) -> Places:
    """List the images at an address: one, or those of a folder, of shards or of Parquet files."""
    from vit.data.sources.remote import list_addresses

    path = address.partition("?")[0].lower()
    if ".tar" in path:
        yield from _list_named(address)
    elif path.endswith(".parquet"):
        yield from _pack(_list_rows, [address])
    elif is_image_name(path) or path.startswith("http"):
        yield _find_image(address)
    else:
        files = list_addresses(address)
        shards = [each for each in files if each.lower().endswith(".tar")]
        parquet = [each for each in files if each.lower().endswith(".parquet")]
        images = [each for each in files if is_image_name(each)]
        if not (shards or parquet or images):
            text = f"{hide_tokens(address)} holds no images, shards (.tar) or Parquet files"
            raise FileNotFoundError(f"{text}; check the address")
        yield from map(_find_image, images)
        if not images:
            yield from _pack(_list_shard, shards) if shards else _pack(_list_rows, parquet)


def _list_rows(file: str) -> Iterator[tuple[str, Input]]:
    """List the images in rows of a Parquet file, a few rows in memory at a time."""
    folder = file.rpartition("/")[0]
    row = -1
    with open_parquet(file) as (table, column, named):
        columns = [name for name in (column, named) if name is not None]
        for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
            for values in batch.to_pylist():
                row += 1
                name = values.get(named)
                name = name if name and isinstance(name, str) else f"{hide_tokens(file)}/{row:05d}"
                yield _find_value(values[column or named], name, folder)


@contextmanager
def open_parquet(file: str) -> Iterator[tuple[Any, str | None, str | None]]:
    """Open a Parquet file, and find its column of images and that of names, of which one may be
    missing.

    Raises:
        ValueError: There is neither, or pyarrow isn't installed.
        OSError: It can't be read, also while it is open.
    """
    from vit.data.sources.remote import fetch_files, is_remote

    try:
        # from the extra "datasets"
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError as error:
        hint = "pip install '.[datasets]' in the clone of vit"
        raise ValueError(f"Parquet is read by pyarrow, which is not installed; {hint}") from error

    shown = hide_tokens(file)
    try:
        path = file
        if is_remote(file):
            (path,) = fetch_files([file], default_cache_dir() / "remote")
        with open_regular(Path(path)) as stream:
            table = ParquetFile(stream)
            names = table.schema_arrow.names
            column = next((name for name in IMAGE_COLUMNS if name in names), None)
            named = next((name for name in PATH_COLUMNS if name in names), None)
            if column is None and named is None:
                wanted = ", ".join((*IMAGE_COLUMNS, *PATH_COLUMNS))
                have = shorten(", ".join(names))
                raise ValueError(f"{shown} has no column {wanted}, only {have}; rename one")
            yield table, column, named
    except (ValueError, OSError) as error:
        if str(error).startswith(shown):
            raise
        text = shorten(first_line(error))
        raise OSError(f"{shown} can't be read as Parquet: {text}") from error


def _find_value(value: Any, name: str, folder: str) -> tuple[str, Input]:
    """Find the image of a row: its bytes, a path, or a dictionary of both as Hugging Face's."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        is_whole = "://" in value or os.path.isabs(value) or not folder
        return _find_image(value if is_whole else f"{folder}/{value}")
    return name, value


def _find_image(place: str) -> tuple[str, Input]:
    """Find an image at a path or an address."""
    if "://" not in place:
        return place, place
    from vit.data.sources.remote import read_address

    return hide_tokens(place), LazyImage(partial(read_address, place), is_remote=True)
