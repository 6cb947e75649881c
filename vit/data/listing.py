"""Lists of images: from paths, folders, PIL images and arrays, and the files below a folder."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from PIL import ExifTags, Image, ImageOps

from vit.data.images import is_image_name, to_rgb
from vit.runtime.arguments import check_kind


@runtime_checkable
class PixelArray(Protocol):
    """An array of pixels that numpy can read, such as an array or a torch tensor."""

    # not torch's type, because files are also listed where torch isn't imported
    def __array__(self) -> np.ndarray: ...


ImageInput = str | Path | Image.Image | PixelArray
ImageInputs = ImageInput | Iterable[ImageInput]


def list_images(images: ImageInputs) -> Iterator[str | Image.Image]:
    """List images, in order: each as the path of a file or as an upright PIL image in RGB.

    Args:
        images: Paths, PIL images or arrays, one or several. A folder gives the image files below
            it, sorted. An array (or torch tensor) is uint8 [H, W, 3], [H, W] or, for several
            images, [N, H, W, 3]. A path that doesn't exist, and in a list a folder without images,
            is listed too: reading it raises an error that names it.

    Raises:
        ValueError: A single folder has no images, or an array has another type or shape.
    """
    if isinstance(images, str | Path):
        # not Path.is_dir, which raises for a name of 300 characters
        if not os.path.isdir(images):
            yield str(images)
            return
        paths = _list_folder(images)
        if not paths:
            raise ValueError(f"{images} holds no images; check the path")
        yield from paths
    elif isinstance(images, Image.Image):
        # Pillow would copy upright images, too
        is_upright = images.getexif().get(ExifTags.Base.Orientation, 1) == 1
        yield to_rgb(images if is_upright else ImageOps.exif_transpose(images))
    # before sequences: arrays and tensors are iterable, too
    elif isinstance(images, PixelArray):
        yield from _list_array(np.asarray(images))
    else:
        expected = "a path, an image, an array or a list of them"
        check_kind(images, Iterable, name="images", expected=expected)
        for image in images:
            if isinstance(image, str | Path) and os.path.isdir(image):
                yield from _list_folder(image) or [str(image)]
            else:
                yield from list_images(image)


def _list_array(pixels: np.ndarray) -> Iterator[Image.Image]:
    is_color = pixels.ndim in (3, 4) and pixels.shape[-1] == 3
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or is_color):
        raise ValueError(
            f"an array of {pixels.dtype} {list(pixels.shape)} is not an image; pass uint8 of 0 to "
            "255, [H, W, 3] or [H, W]"
        )
    if pixels.ndim < 4:
        pixels = pixels[None]
    for image in pixels:
        yield Image.fromarray(image).convert("RGB")


def _list_folder(folder: str | Path) -> list[str]:
    return sorted(filter(is_image_name, list_files(folder)))


def list_files(
    folder: str | Path,
    *,
    hidden: bool = True,
    check_link: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """List the files below a folder, those of each directory in sorted order.

    Args:
        folder: The folder.
        hidden: Read directories whose names begin with a dot.
        check_link: Function that is called with each link, to a file or a directory, before it is
            followed. With None, links to directories are not followed, and directories that can't
            be read are left out.

    Raises:
        OSError: A directory can't be read.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        directory = waiting.pop()
        # not os.walk, which recurses: folders may be nested deeper than Python's stack
        try:
            with os.scandir(directory) as entries:
                sorted_entries = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            if check_link is not None and os.path.exists(directory):
                raise
            continue

        subfolders = []
        for entry in sorted_entries:
            is_link = entry.is_symlink()
            # entry.is_dir would raise for a link that leads to itself
            is_folder = os.path.isdir(entry.path) if is_link else entry.is_dir()
            if is_folder and not hidden and entry.name.startswith("."):
                continue
            if is_link and check_link is not None:
                check_link(entry.path)
            if not is_folder:
                yield entry.path
            elif check_link is not None or not is_link:
                subfolders.append(entry.path)
        # the last directory of `waiting` is read first
        waiting += reversed(subfolders)
