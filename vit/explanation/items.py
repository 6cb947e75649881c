"""The images to explain, from a user or from a data set, each with a name for its files."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.data.images import ImageInputs, list_images, read_image
from vit.data.open import open_for_model
from vit.runtime.files import clean_name

# number of images of a model's test split that are explained
_NUM_IMAGES = 16


class ImageItem(NamedTuple):
    """An image to explain."""

    # name in messages and the manifest: a path, an id of a data set, or image-00000 and so on
    path: str
    name: str  # start of the names of its files
    # returns the upright RGB image; raises ValueError or OSError if it can't be read
    read: Callable[[], Image.Image]


def find_items(
    bundle: Bundle, images: ImageInputs | None, num_images: int | None
) -> list[ImageItem]:
    """Find the images to explain. None: `num_images`, by default 16, of the model's test split.
    Raise ValueError for `num_images` with other images."""
    if images is not None:
        if num_images is not None:
            raise ValueError("num_images has no effect on images that are named; leave it out")
        return items_from_images(list(list_images(images)))
    splits = bundle.passed_images or open_for_model(None, recorded=bundle.recorded_images)
    return items_from_dataset(splits.split(), num_images=num_images or _NUM_IMAGES)


def items_from_images(images: Sequence[str | Image.Image]) -> list[ImageItem]:
    """Build items for images from `list_images`; those in memory are called image-00000 and so
    on."""
    paths = [
        image if isinstance(image, str) else f"image-{number:05d}"
        for number, image in enumerate(images)
    ]
    return list(map(ImageItem, paths, name_images(paths), [partial(_read, one) for one in images]))


def items_from_dataset(dataset: ImageDataset, *, num_images: int) -> list[ImageItem]:
    """Choose images evenly from a data set's split, named by their ids."""
    # evenly, because data sets are often sorted by class
    positions = np.linspace(0, len(dataset) - 1, min(num_images, len(dataset)))
    indices = positions.round().astype(int).tolist()
    ids = [dataset.ids[index] for index in indices]
    readers = [partial(dataset.image, index) for index in indices]
    return list(map(ImageItem, ids, name_images(ids, num_shared=0), readers))


def name_images(paths: Sequence[str], num_shared: int | None = None) -> list[str]:
    """Return a unique name for each path: its folders but the first `num_shared` (None: those that
    all have), and its stem. Files that differ by suffix alone get a hash of the path."""
    parts = [Path(path).parts for path in paths]
    if num_shared is None:
        levels = zip(*(path[:-1] for path in parts), strict=False)
        num_shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
    stems = [Path(path).stem for path in paths]
    folders = [each[num_shared:-1] for each in parts]
    names = [clean_name("-".join((*own, stem))) for own, stem in zip(folders, stems, strict=True)]
    # file systems may ignore case
    counts = Counter(name.casefold() for name in names)
    for number, path in enumerate(paths):
        if counts[names[number].casefold()] > 1:
            # file names on Linux may be no valid UTF-8
            digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
            names[number] += f"-{digest[:12]}"
    return names


def _read(image: str | Image.Image) -> Image.Image:
    return read_image(Path(image)) if isinstance(image, str) else image
