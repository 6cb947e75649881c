"""Images as a user gives them: paths, folders, PIL images or arrays, one or several."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vit.data.images import to_rgb
from vit.data.sets.folders import IMAGE_SUFFIXES, list_files

ImageInput = str | Path | Image.Image | np.ndarray
ImageInputs = ImageInput | Iterable[ImageInput]


def list_images(images: ImageInputs) -> Iterator[str | Image.Image]:
    """Each image as the path of a file or as an upright PIL image in RGB, in the order given.

    A folder stands for the image files below it, sorted. An array (or torch tensor) is uint8 [H, W, 3], [H, W] or, of
    several images, [N, H, W, 3]. A path that doesn't exist is passed on: reading it says so; in a list, a folder
    without images too. Raises ValueError for such a folder by itself and for an array of another kind.
    """
    if isinstance(images, str | Path) and not os.path.isdir(images):  # Path.is_dir raises for a name of 300 characters
        yield str(images)
    elif isinstance(images, str | Path):
        found = _list_folder(images)
        if not found:
            raise ValueError(f"{images} holds no images")
        yield from found
    elif isinstance(images, Image.Image):
        yield to_rgb(ImageOps.exif_transpose(images))
    elif hasattr(images, "__array__"):
        pixels = np.asarray(images)
        if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim in (3, 4) and pixels.shape[-1] == 3)):
            kind = f"{pixels.dtype} {list(pixels.shape)}"
            raise ValueError(f"an array of {kind} is no image; give uint8 of 0 to 255, [H, W, 3] or [H, W]")
        for single in pixels if pixels.ndim == 4 else [pixels]:
            yield Image.fromarray(single).convert("RGB")
    else:
        for image in images:
            if isinstance(image, str | Path) and os.path.isdir(image):
                yield from _list_folder(image) or [str(image)]
            else:
                yield from list_images(image)


def _list_folder(folder: str | Path) -> list[str]:
    return sorted(path for path in list_files(folder) if Path(path).suffix.lower() in IMAGE_SUFFIXES)
