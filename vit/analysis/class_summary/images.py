"""The images of a summary, with their labels and masks.

Masks of the object are a folder of images, or a COCO file of polygons and boxes.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

from vit.analysis.class_summary.passes import has_class
from vit.analysis.class_summary.places import MAX_IMAGES_A_CLASS
from vit.bundle import Bundle
from vit.data.class_names import find_wordnet_names, number_labels
from vit.data.dataset import printable
from vit.data.images import (
    ImageInputs,
    check_size,
    is_image_name,
    list_files,
    list_images,
    read_image,
)
from vit.data.preprocess import Preprocess
from vit.evaluation.images import find_labels, match_classes, open_data
from vit.explanation.items import ImageItem, items_from_dataset, items_from_images
from vit.prediction.probabilities import Bools, Ints
from vit.runtime.documents import read_json
from vit.runtime.progress import show_progress

# bytes of all images as the model sees them
_MAX_BYTES = 1 << 30


class Mask(NamedTuple):
    """The mask of an image, not read yet.

    Attributes:
        read: Function that returns the mask, an image that is black except for the object.
        size: Width and height, where a COCO file states them.
    """

    read: Callable[[], Image.Image]
    size: tuple[int, int] | None = None


# name of an image → its mask
Masks = Mapping[str, Mask]


@dataclass(frozen=True)
class SummaryImages:
    """Images to summarise.

    Attributes:
        pixels: The images as the model sees them.
        classes: The class of each image, [n], or its labels, [n, C]; None: without labels, what is
            predicted is taken.
        paths: The name of each image on the page.
        masks: 1 where a pixel lies on the object, otherwise 0; NaN in an image without a mask.
            None: there are no masks.
    """

    pixels: UInt8[np.ndarray, "n H W 3"]
    classes: Ints | Bools | None
    paths: Sequence[str]
    masks: Float[np.ndarray, "n H W"] | None = None


def read_summary_images(
    bundle: Bundle, images: ImageInputs | None, masks: str | Path | None
) -> SummaryImages:
    """Read the images of a summary; arguments and errors as in `summarize_classes`."""
    items, labels = _find_images(bundle, images)
    max_images = int(_MAX_BYTES // (3 * np.prod(bundle.preprocess.image_size)))
    chosen = _sample(labels, len(items), max_images=max_images)
    stems = Counter(Path(item.path).stem for item in items)
    masks_by_name = {}
    if masks is not None:
        # the mask of one of several images of a name must not describe the others
        masks_by_name = {
            name: mask
            for name, mask in find_masks(Path(masks)).items()
            if "/" in name or stems[name] == 1
        }

    pixels = []
    mask_pixels = []
    readable = []
    with ThreadPoolExecutor() as pool, show_progress("reading", len(chosen)) as advance:
        futures = [
            pool.submit(_read, items[index], bundle.preprocess, masks_by_name) for index in chosen
        ]
        for index, future in zip(chosen, futures, strict=True):
            try:
                image, mask = future.result()
            except OSError as error:
                warnings.warn(f"left out: {' '.join(str(error).split())}", stacklevel=3)
                continue
            pixels.append(image)
            mask_pixels.append(mask)
            readable.append(index)
            advance(1)
    if not pixels:
        raise ValueError("there are no images to summarise; name files or folders of images")
    if masks is not None and np.isnan(mask_pixels).all():
        raise ValueError(
            f"no mask in {masks} has the name of an image; give each mask its image's name"
        )
    return SummaryImages(
        pixels=np.stack(pixels),
        classes=None if labels is None else labels[readable],
        paths=[printable(items[index].path) for index in readable],
        masks=None if masks is None else np.stack(mask_pixels),
    )


def _find_images(
    bundle: Bundle, images: ImageInputs | None
) -> tuple[list[ImageItem], Ints | Bools | None]:
    """List the images, with their labels where they have any: those of a data set, or the names of
    the folders that they lie in."""
    names = bundle.class_names
    if images is None:
        source = open_data(bundle, None, None, None, None).split()
        return items_from_dataset(source, count=len(source)), find_labels(source, names)

    items = items_from_images(list_images(images))
    # a folder names one of the labels
    if bundle.is_multilabel:
        return items, None
    folders = [Path(item.path).parent.name for item in items]
    sources = sorted(set(folders))
    numbers = number_labels(folders, sources)
    # a model of folders that are WordNet ids has their words as class names
    words = find_wordnet_names(sources)
    for shown in (sources, [words.get(name, name) for name in sources]):
        # one folder of another name, and the folders are no labels
        with suppress(ValueError):
            return items, match_classes(numbers, source_classes=shown, model_classes=names)[numbers]
    return items, None


def _sample(labels: Ints | Bools | None, count: int, *, max_images: int) -> list[int]:
    """Randomly sample as many images of each class as are used, and in total no more than fit into
    memory."""
    # the same images at each call, so that a summary can be repeated
    order = np.random.default_rng(0).permutation(count)
    if labels is None:
        return sorted(order[:max_images].tolist())
    present = np.unique(labels)
    if labels.ndim == 2:
        present = np.flatnonzero(labels.any(axis=0))
    images_a_class = min(MAX_IMAGES_A_CLASS, max(max_images // max(len(present), 1), 1))
    chosen: set[int] = set()
    for label in present:
        chosen.update(order[has_class(labels[order], label)][:images_a_class].tolist())
    return sorted(chosen)


def _read(
    item: ImageItem, preprocess: Preprocess, masks: Masks
) -> tuple[UInt8[np.ndarray, "H W 3"], Float[np.ndarray, "H W"]]:
    """Read an image and its mask as the model sees them; the mask is NaN where there is none.

    Raises:
        OSError: One of them can't be read.
        ValueError: They differ in size.
    """
    try:
        photo, _ = item.read()
        pixels = preprocess.to_uint8(photo)
        mask = find_mask(masks, item.path)
        if mask is None:
            return pixels, np.full(pixels.shape[:2], np.nan, np.float32)
        size = mask.size
        # a stated size is compared before memory is taken for it
        if size is None or size == photo.size:
            drawn = mask.read()
            size = drawn.size
    except ValueError as error:
        raise OSError(str(error)) from error
    if size != photo.size:
        width, height = size
        raise ValueError(
            f"the mask of {item.path} has {width:,} × {height:,} pixels, the image"
            f" {photo.width:,} × {photo.height:,}; a mask covers its image"
        )
    inside = Image.fromarray(is_inside(drawn)).convert("RGB")
    # a border isn't the object
    black = replace(preprocess, mean=(0.0, 0.0, 0.0))
    return pixels, black.to_uint8(inside)[..., 0].astype(np.float32) / 255


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
    if path.is_dir():
        files = map(Path, filter(is_image_name, list_files(path)))
        found = [(file, Mask(partial(read_image, file, name=str(file)))) for file in files]
    elif path.suffix == ".json":
        found = _read_coco(path)
    else:
        raise ValueError(f"{path} is neither a folder of masks nor a COCO file (.json)")

    # a mask of an ambiguous name would silently describe another image
    named = [(name, mask) for path, mask in found for name in _list_names(path)]
    counts = Counter(name for name, _ in named)
    return {name: mask for name, mask in named if counts[name] == 1}


def find_mask(masks: Masks, image: str) -> Mask | None:
    """Return the mask of an image; None without one."""
    return next((masks[name] for name in _list_names(Path(image)) if name in masks), None)


def _list_names(path: Path) -> tuple[str, str]:
    """Return the names by which an image and its mask find each other."""
    return f"{path.parent.name}/{path.stem}", path.stem


def is_inside(mask: Image.Image) -> np.ndarray:
    """Return True for each pixel [H, W] that lies on the object, which isn't black."""
    return np.asarray(np.asarray(mask).any(axis=2))


def _read_coco(path: Path) -> list[tuple[Path, Mask]]:
    content = read_json(path)
    try:
        shapes: dict[int, list[list[float]]] = {image["id"]: [] for image in content["images"]}
        if len(shapes) < len(content["images"]):
            raise ValueError("two images have the same id")
        for annotation in content["annotations"]:
            shapes[annotation["image_id"]] += _list_polygons(annotation)
        found = []
        for image in content["images"]:
            size = int(image["width"]), int(image["height"])
            # an image without annotations has no mask
            if polygons := shapes[image["id"]]:
                found.append((Path(image["file_name"]), Mask(partial(_draw, size, polygons), size)))
        return found
    except (KeyError, TypeError, ValueError, OverflowError) as error:
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
    check_size(size)
    mask = Image.new("RGB", size)
    draw = ImageDraw.Draw(mask)
    for polygon in polygons:
        draw.polygon(polygon, fill="white")
    return mask
