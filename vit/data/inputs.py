"""Images without labels: files, folders, tables, and what Python programs hold. They are listed as
they are needed."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from PIL import Image

from vit.data.images import ImageInputs, list_images
from vit.data.python_images import iterate_images
from vit.data.sources.tables import is_table, list_table_images
from vit.runtime.files import expand_home

# name of an image, and its path or an upright image
Inputs = Iterator[tuple[str, str | Image.Image]]


def list_inputs(images: ImageInputs) -> Inputs:
    """Yield the name of each image, and the image.

    Args:
        images: See `vit.predict`.

    Raises:
        ValueError: A single folder has no images, or a table has none.
        OSError: A table can't be read.
    """
    if isinstance(images, str | Path):
        yield from _list_place(images, is_alone=True)
        return
    is_list = isinstance(images, Iterable) and not hasattr(images, "__array__")
    if not is_list or isinstance(images, Image.Image | Mapping):
        yield from ((f"image {number}", each) for number, each in enumerate(list_images(images)))
        return
    number = 0
    for image in iterate_images(images):
        for each in [image] if isinstance(image, str | Path) else list_images(image):
            if isinstance(each, Image.Image):
                yield f"image {number}", each
                number += 1
                continue
            for named in _list_place(each):
                yield named
                number += 1


def _list_place(place: str | Path, *, is_alone: bool = False) -> Inputs:
    """Yield the name of each image at a place, and its path, which is the same."""
    path = expand_home(place)
    if is_table(path):
        listed = list_table_images(path)
    else:
        # in a list, reading a folder says why it has no images
        listed = map(str, list_images(place if is_alone else [place]))
    return ((image, image) for image in listed)
