"""Images without labels: files, folders, tables, and what Python programs hold. They are listed as
they are needed."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from PIL import Image

from vit.data.images import ImageInputs, iterate_images, list_images
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
    is_list = isinstance(images, Iterable) and not hasattr(images, "__array__")
    several: Iterable[ImageInputs] = [images]
    if is_list and not isinstance(images, str | Path | Image.Image | Mapping):
        several = iterate_images(images)
    number = 0
    for image in several:
        if not isinstance(image, str | Path):
            listed = list_images(image)
        elif is_table(expand_home(image)):
            listed = list_table_images(expand_home(image))
        else:
            # in a list, reading a folder says why it has no images
            listed = list_images(image if image is images else [image])
        for each in listed:
            yield (each if isinstance(each, str) else f"image {number}"), each
            number += 1
