"""Masks of the object in an image: a folder of masks, or a COCO file of polygons and boxes."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from vit.data.images import is_image_name, read_image
from vit.data.listing import list_files
from vit.runtime.documents import read_json

# name of an image → a function that reads its mask, an image that is black except for the object
Masks = Mapping[str, Callable[[], Image.Image]]


def find_masks(path: Path) -> Masks:
    """List masks by the name of their image without its suffix, and by its folder and name. A name
    that two images share is left out.

    Args:
        path: A folder of images, or a COCO file, whose polygons are taken from all categories;
            without a polygon the box is taken.

    Raises:
        ValueError: The path is neither of these.
        OSError: The file can't be read.
    """
    readers: list[tuple[Path, Callable[[], Image.Image]]]
    if path.is_dir():
        readers = [
            (Path(file), partial(read_image, Path(file), name=file))
            for file in filter(is_image_name, list_files(path))
        ]
    elif path.suffix == ".json":
        readers = _read_coco(path)
    else:
        raise ValueError(f"{path} is neither a folder of masks nor a COCO file (.json)")

    masks: dict[str, Callable[[], Image.Image]] = {}
    twice = set()
    for name, read in readers:
        if name.stem in masks:
            twice.add(name.stem)
        masks[name.stem] = read
        masks[f"{name.parent.name}/{name.stem}"] = read
    return {name: read for name, read in masks.items() if name not in twice}


def find_mask(masks: Masks, image: str) -> Callable[[], Image.Image] | None:
    """Return the function that reads the mask of an image; None without one."""
    path = Path(image)
    return masks.get(f"{path.parent.name}/{path.stem}", masks.get(path.stem))


def is_inside(mask: Image.Image) -> np.ndarray:
    """Return True for each pixel [H, W] that lies on the object, which isn't black."""
    return np.asarray(np.asarray(mask).any(axis=2))


def _read_coco(path: Path) -> list[tuple[Path, Callable[[], Image.Image]]]:
    content = read_json(path)
    try:
        shapes: dict[int, list[list[float]]] = {image["id"]: [] for image in content["images"]}
        for annotation in content["annotations"]:
            shapes[annotation["image_id"]] += _list_polygons(annotation)
        return [
            (
                Path(image["file_name"]),
                partial(_draw, (int(image["width"]), int(image["height"])), shapes[image["id"]]),
            )
            for image in content["images"]
            # an image without annotations has no mask
            if shapes[image["id"]]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a COCO file of polygons or boxes: {error!r}") from error


def _list_polygons(annotation: Mapping[str, Any]) -> list[list[float]]:
    """Return x and y of the corners in turn."""
    polygons = annotation.get("segmentation")
    if isinstance(polygons, list) and polygons:
        return [[float(value) for value in polygon] for polygon in polygons]
    # run lengths describe crowds in most cases: the box is taken instead
    left, top, width, height = map(float, annotation["bbox"])
    right = left + width
    bottom = top + height
    return [[left, top, right, top, right, bottom, left, bottom]]


def _draw(size: tuple[int, int], polygons: list[list[float]]) -> Image.Image:
    mask = Image.new("RGB", size)
    draw = ImageDraw.Draw(mask)
    for polygon in polygons:
        draw.polygon(polygon, fill="white")
    return mask
