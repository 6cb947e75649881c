"""Images without labels, from everything that training reads: files, folders, tables, Parquet,
shards, addresses and names of data sets. They are listed as they are needed."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vit.data.images import ImageInputs, is_image_name, list_images
from vit.data.python_images import iterate_images
from vit.runtime.arguments import hide_tokens
from vit.runtime.files import default_cache_dir, expand_home


class LazyImage(NamedTuple):
    """An image whose file or pixels are loaded when needed, many at a time if it is remote."""

    load: Callable[[], Path | bytes | Image.Image]
    is_remote: bool = False


# an image's path, an upright image, or one that isn't read yet
Input = str | Image.Image | LazyImage
Inputs = Iterator[tuple[str, Input]]


def list_inputs(images: ImageInputs) -> Inputs:
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
    for image in iterate_images(images):
        places = [image] if isinstance(image, str | Path) else list_images(image)
        for place in places:
            listed: Inputs = iter([(f"image {number}", place)])  # type: ignore[list-item]
            if not isinstance(place, Image.Image):
                listed = _list_place(str(place))
            for each in listed:
                yield each
                number += 1


def is_input(place: str) -> bool:
    """Return true for the name of a data set, a pattern of shards or an address."""
    # the kinds of data sets take long to import
    from vit.data.sources.registry import find_kind
    from vit.data.sources.remote import is_remote

    return is_remote(place) or find_kind(place) is not None


def _list_place(place: str, *, is_alone: bool = False) -> Inputs:
    """Yield the name of each image at a place, and the image."""
    if "://" in place:
        yield from _list_address(place)
    elif os.path.isdir(place):
        images = list(map(str, list_images([place])))
        # the folder itself if it has no image files
        if images != [place]:
            yield from zip(images, images, strict=True)
            return
        listed = _list_set(place)
        if listed is not None:
            yield from listed
            return
        # in a list, reading the folder says why it has no images
        yield from ((str(image), place) for image in list_images(place if is_alone else [place]))
    elif is_image_name(place):
        yield place, place
    else:
        from vit.data.sources.tables import is_table, list_table_images

        if is_table(expand_home(place)):
            yield from map(_find_image, list_table_images(expand_home(place)))
        else:
            yield from _list_set(place) or [(place, place)]


def _list_set(place: str) -> Inputs | None:
    """List the images of a data set by name, of shards, or of tables of rows; None for another
    place."""
    from vit.data.dataset import Request
    from vit.data.sources.registry import find_kind, find_source, list_named_sets

    kind = None
    # a name that no file can have
    with suppress(OSError, ValueError):
        kind = find_kind(place)
    if kind in (None, "folder"):
        return None
    assert kind is not None
    root = None if kind in list_named_sets() else place
    listing = find_source(kind).find(Request(root, None, default_cache_dir(), needs_labels=False))
    reader = listing.reader
    return (
        (name, LazyImage(partial(reader.__getitem__, index)))
        for index, name in enumerate(listing.ids)
    )


def _list_address(address: str) -> Inputs:
    """List the images at an address: one, or those of shards or below a folder."""
    from vit.data.sources.remote import list_addresses

    path = address.partition("?")[0].lower()
    if ".tar" in path:
        yield from _list_set(address) or ()
    elif is_image_name(path) or path.startswith("http"):
        yield _find_image(address)
    else:
        files = list_addresses(address)
        images = list(filter(is_image_name, files))
        if images:
            yield from map(_find_image, images)
        elif any(file.lower().endswith(".tar") for file in files):
            yield from _list_set(address) or ()
        else:
            text = f"{hide_tokens(address)} holds no images and no shards (.tar)"
            raise FileNotFoundError(f"{text}; check the address")


def _find_image(place: str) -> tuple[str, Input]:
    """Find an image at a path or an address."""
    if "://" not in place:
        return place, place
    from vit.data.sources.remote import read_address

    return hide_tokens(place), LazyImage(partial(read_address, place), is_remote=True)
