"""What to explain: images as a user gives them or of a data set, each with a name its files can
have."""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.data.dataset import ImageDataset
from vit.data.images import divide, read_image
from vit.data.open import open_for_model
from vit.data.splits import DatasetSplits
from vit.runtime.files import clean_name, read_bytes


@dataclass(frozen=True)
class ImageItem:
    """An image to explain.

    Args:
        path: what messages and the manifest name: a path, an id of a data set, or image-00000 and so on.
        name: what its files' names start with.
        read: returns the upright RGB image and the SHA-256 of its file or pixels; raises ValueError
            or OSError where it can't be read.
    """

    path: str
    name: str
    read: Callable[[], tuple[Image.Image, str]]

    @property
    def title(self) -> str:
        """What pages and pictures call the image: the name of its file, without the folders, which
        are of the machine and not of what is shared."""
        file = Path(self.path)
        return file.name if clean_name(file.stem) == self.name else self.name


def find_items(
    images: Sequence[str | Image.Image] | None,
    *,
    trained_on: Mapping[str, Any],
    count: int,
    written: Mapping[str, str] | None = None,
    passed_images: DatasetSplits | None = None,
) -> list[ImageItem]:
    """The images to explain.

    Args:
        images: paths of files and images in memory, as `list_images` gives them; None stands for
            `count` of the model's own test split.
        trained_on: the data section of the model's configuration, which describes that split.
        count: how many of the test split.
        written: the names of the images that are left out, by their paths.
        passed_images: what the model was trained on, where that was passed from Python.
    """
    written = written or {}
    if images is None:
        if passed_images is not None:
            source = passed_images.split()
        else:
            source = open_for_model(None, trained_on=trained_on).split("test")
        items = items_from_dataset(source, count=count)
        return [item for item in items if item.path not in written]
    # images in memory have no path to be known by: all are explained again
    remaining = [image for image in images if not (isinstance(image, str) and image in written)]
    return items_from_images(remaining, taken=written.values())


def items_from_images(
    images: Iterable[str | Image.Image], *, taken: Collection[str] = ()
) -> list[ImageItem]:
    """Images as `list_images` gives them, in this order; images in memory are called image-00000
    and so on. No name is one of `taken`."""
    paths = []
    readers: list[Callable[[], tuple[Image.Image, str]]] = []
    for number, image in enumerate(images):
        if isinstance(image, str):
            paths.append(image)
            readers.append(partial(_read_file, image))
        else:
            paths.append(f"image-{number:05d}")
            readers.append(partial(_hash_pixels, image))
    return list(map(ImageItem, paths, name_images(paths, taken=taken), readers))


def items_from_dataset(dataset: ImageDataset, *, count: int) -> list[ImageItem]:
    """`count` images spread evenly over a data set's split, named by their ids."""
    positions = np.linspace(0, len(dataset) - 1, min(count, len(dataset)))
    items = []
    for index in positions.round().astype(int).tolist():
        image_id = dataset.ids[index]
        name = re.sub(r"\.\w+$", "", image_id).replace("/", "-")
        items.append(ImageItem(image_id, clean_name(name), partial(_read_sample, dataset, index)))
    return items


def name_images(paths: Sequence[str], *, taken: Collection[str] = ()) -> list[str]:
    """A name for each path that no other has: its stem; with its folders; or with a hash of the
    path."""
    parts = [Path(path).parts for path in paths]
    # folders at the front that all paths have
    folders = zip(*(path[:-1] for path in parts), strict=False)
    num_shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, folders))

    # from the shortest to the surest
    stems = [clean_name(Path(path).stem) for path in paths]
    with_folders = [
        clean_name("-".join((*path[num_shared:-1], Path(path[-1]).stem))) for path in parts
    ]
    with_hashes = []
    for path, stem in zip(paths, stems, strict=True):
        digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
        with_hashes.append(f"{stem}-{digest[:12]}")
    names = _unique_or(stems, _unique_or(with_folders, with_hashes, taken), taken)
    # a name with folders may be another's stem
    are_unique = len({name.casefold() for name in names}) == len(names)
    return names if are_unique else with_hashes


def _unique_or(
    names: Sequence[str], alternatives: Sequence[str], taken: Collection[str]
) -> list[str]:
    """Each name, or its alternative where another has the same one on a file system that ignores
    case."""
    counts = Counter(name.casefold() for name in (*names, *taken))
    return [
        name if counts[name.casefold()] == 1 else alternative
        for name, alternative in zip(names, alternatives, strict=True)
    ]


def _read_file(path: str) -> tuple[Image.Image, str]:
    """The hash is of the bytes that are decoded, whatever happens to the file meanwhile."""
    try:
        content = read_bytes(Path(path))
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder that holds no images, or can't be read") from error
    return read_image(io.BytesIO(content), name=path), hashlib.sha256(content).hexdigest()


def _hash_pixels(image: Image.Image) -> tuple[Image.Image, str]:
    digest = hashlib.sha256()
    for _, band in divide(image):
        digest.update(band.tobytes())
    return image, digest.hexdigest()


def _read_sample(dataset: ImageDataset, index: int) -> tuple[Image.Image, str]:
    return _hash_pixels(dataset.image(index))
