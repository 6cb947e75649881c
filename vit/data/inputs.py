"""Images without labels, from everything that training reads: files, folders, tables, Parquet,
shards, addresses and names of data sets. They are listed as they are needed."""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vit.data.images import ImageInputs, is_image_name, list_images, read_image
from vit.data.python_images import iterate_images, open_loader
from vit.runtime.arguments import first_line, hide_tokens, shorten
from vit.runtime.files import expand_home

# columns of Parquet that hold images, and those that name their files
IMAGE_COLUMNS = ("image", "img", "bytes")
PATH_COLUMNS = ("path", "file_name", "image_path", "file_path", "filename", "file")
# rows of Parquet in memory at a time
_ROWS = 64


class LazyImage(NamedTuple):
    """An image that is decoded when it is needed.

    Attributes:
        read: Function that decodes it. Raises ValueError or OSError if it can't be read.
        is_remote: It comes over a network, so that many should be read at a time.
    """

    read: Callable[[], Image.Image]
    is_remote: bool = False


# an image's path, an upright image, or one that isn't decoded yet
Input = str | Image.Image | LazyImage


def list_inputs(images: ImageInputs) -> Iterator[tuple[str, Input]]:
    """Yield the name of each image, and the image.

    Args:
        images: See `vit.predict`.

    Raises:
        ValueError: A single folder has no images, or a table, Parquet file or shard has none.
        OSError: A table, file or address can't be read.
    """
    if isinstance(images, str | Path):
        yield from _list_place(str(images), is_alone=True)
        return
    is_list = isinstance(images, Iterable) and not hasattr(images, "__array__")
    if not is_list or isinstance(images, Image.Image | Mapping):
        yield from ((f"image {number}", each) for number, each in enumerate(list_images(images)))
        return
    number = 0
    for image in iterate_images(open_loader(images)):
        places = [image] if isinstance(image, str | Path) else list_images(image)
        for place in places:
            if isinstance(place, Image.Image):
                yield f"image {number}", place
                number += 1
                continue
            for listed in _list_place(str(place), is_alone=False):
                yield listed
                number += 1


def is_input(place: str) -> bool:
    """Return true for the name of a data set, a pattern of shards or an address."""
    # the kinds of data sets take long to import
    from vit.data.sources.registry import find_kind
    from vit.data.sources.remote import is_remote

    return is_remote(place) or find_kind(place) is not None


def _list_place(place: str, *, is_alone: bool) -> Iterator[tuple[str, Input]]:
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
        yield from _list_rows([place])
    elif ".tar" in name or place.startswith("hf:") or not os.path.lexists(path):
        yield from _list_named(place)
    else:
        from vit.data.sources.tables import is_table, list_table_images

        if not is_table(path):
            yield place, place
            return
        for listed in list_table_images(path):
            yield from _list_address(listed) if "://" in listed else [(listed, listed)]


def _list_packed(folder: str, is_alone: bool) -> Iterator[tuple[str, Input]]:
    """List the images of a folder that has no image files: in shards, Parquet files, or a saved
    data set."""
    from vit.data.sources.huggingface import is_dataset, list_parquet
    from vit.data.sources.shards import list_shards

    path = Path(folder)
    if shards := list_shards(folder):
        yield from _list_samples([each for paths in shards.values() for each in paths])
    elif parquet := list_parquet(path):
        yield from _list_rows([each for paths in parquet.values() for each in paths])
    elif is_dataset(path):
        yield from _list_saved(folder)
    else:
        # in a list, reading the folder says why it has no images
        yield from ((str(image), image) for image in list_images(folder if is_alone else [folder]))


def _list_named(place: str) -> Iterator[tuple[str, Input]]:
    """List a data set, or shards that match a pattern; the place itself if it is none of these."""
    from vit.data.open import open_dataset
    from vit.data.sources.registry import find_kind
    from vit.data.sources.shards import expand_pattern

    kind = None
    # a name that no file can have
    with suppress(OSError, ValueError):
        kind = find_kind(place)
    if kind == "webdataset":
        yield from _list_samples(expand_pattern(os.path.expanduser(place)))
    elif kind == "huggingface":
        yield from _list_saved(place)
    elif kind is None:
        yield place, place
    else:
        dataset = open_dataset(kind).split("all")
        for index, name in enumerate(dataset.ids):
            yield name, LazyImage(partial(dataset.image, index))


def _list_saved(place: str) -> Iterator[tuple[str, Input]]:
    from vit.data.sources.huggingface import open_rows

    for reader in open_rows(place):
        for index, name in enumerate(reader.ids):
            yield name, LazyImage(partial(reader.image, index))


def _list_samples(shards: Iterable[str]) -> Iterator[tuple[str, Input]]:
    from vit.data.sources.remote import is_remote
    from vit.data.sources.shards import open_shard

    for shard in shards:
        reader = open_shard(shard)
        for index, name in enumerate(reader.names):
            yield name, LazyImage(partial(reader.image, index), is_remote(shard))


def _list_address(address: str) -> Iterator[tuple[str, Input]]:
    """List the images at an address: one, or those of a folder, of shards or of Parquet files."""
    from vit.data.sources.remote import list_addresses, read_address

    def read() -> Image.Image:
        return read_image(io.BytesIO(read_address(address)), name=hide_tokens(address))

    path = address.partition("?")[0].lower()
    if ".tar" in path:
        yield from _list_named(address)
    elif path.endswith(".parquet"):
        yield from _list_rows([address])
    elif is_image_name(path) or path.startswith("http"):
        yield hide_tokens(address), LazyImage(read, is_remote=True)
    else:
        files = list_addresses(address)
        shards = [each for each in files if each.lower().endswith(".tar")]
        parquet = [each for each in files if each.lower().endswith(".parquet")]
        images = [each for each in files if is_image_name(each)]
        if not (shards or parquet or images):
            text = f"{hide_tokens(address)} holds no images, shards (.tar) or Parquet files"
            raise FileNotFoundError(f"{text}; check the address")
        for image in images:
            yield from _list_address(image)
        if not images:
            yield from _list_samples(shards) if shards else _list_rows(parquet)


def _list_rows(files: Iterable[str]) -> Iterator[tuple[str, Input]]:
    """List the images in rows of Parquet files, a few rows in memory at a time."""
    from vit.data.sources.remote import find_file, is_remote

    try:
        # from the extra "datasets"
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError as error:
        hint = "pip install '.[datasets]' in the clone of vit"
        raise ValueError(f"Parquet is read by pyarrow, which is not installed; {hint}") from error

    for file in files:
        shown = hide_tokens(file)
        folder = file.rpartition("/")[0] if is_remote(file) else os.path.dirname(file)
        row = -1
        try:
            with find_file(file).open() as stream:
                table = ParquetFile(stream)
                names = table.schema_arrow.names
                column = next((name for name in IMAGE_COLUMNS if name in names), None)
                named = next((name for name in PATH_COLUMNS if name in names), None)
                if column is None and named is None:
                    wanted = ", ".join((*IMAGE_COLUMNS, *PATH_COLUMNS))
                    have = shorten(", ".join(names))
                    raise ValueError(f"{shown} has no column {wanted}, only {have}; rename one")
                columns = [name for name in (column, named) if name is not None]
                for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                    for values in batch.to_pylist():
                        row += 1
                        name = values.get(named) or f"{shown}/{row:05d}"
                        yield from _list_value(values[column or named], str(name), folder)
        except (ValueError, OSError) as error:
            if str(error).startswith(shown):
                raise
            text = shorten(first_line(error))
            raise OSError(f"{shown} can't be read as Parquet: {text}") from error


def _list_value(value: Any, name: str, folder: str) -> Iterator[tuple[str, Input]]:
    """List the image of a row: its bytes, a path, or a dictionary of both as Hugging Face's."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        path = value if "://" in value else f"{folder}/{value}" if folder else value
        found = value if "://" not in value and os.path.isabs(value) else path
        yield from _list_address(found) if "://" in found else [(found, found)]
        return

    def read() -> Image.Image:
        if not isinstance(value, bytes):
            raise ValueError("there is no image")
        return read_image(io.BytesIO(value), name=name)

    yield name, LazyImage(read)
