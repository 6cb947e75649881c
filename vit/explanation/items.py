"""The images to explain, from a user or from a data set, each with a name for its files."""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path

import numpy as np
from PIL import Image

from vit.data.dataset import ImageDataset
from vit.data.images import divide, read_image
from vit.data.open import RecordedImages, open_for_model
from vit.data.sources.remote import is_remote
from vit.data.splits import DatasetSplits
from vit.runtime.files import clean_name

Read = Callable[[], tuple[Image.Image, str]]


@dataclass(frozen=True)
class ImageItem:
    """An image to explain.

    Args:
        path: Name in messages and the manifest: a path, an id of a data set, or image-00000 and so
            on.
        name: Start of the names of its files.
        read: Return the upright RGB image and the SHA-256 of its file or pixels. Raises ValueError
            or OSError if it can't be read.
        number: Its place among the images that were asked for, from 0.
    """

    path: str
    name: str
    read: Read
    number: int = 0

    def convert(self, convert: Callable[[Image.Image], Image.Image]) -> "ImageItem":
        """Return an item whose image is converted whenever it is read."""
        return replace(self, read=partial(_convert, self.read, convert))

    @property
    def title(self) -> str:
        """Name on pages and pictures: that of its file, without the folders, which others who get
        the page don't have."""
        file = Path(self.path)
        return file.name if clean_name(file.stem) == self.name else self.name


def find_items(
    images: Sequence[str | Image.Image] | None,
    *,
    recorded: RecordedImages,
    count: int,
    passed_images: DatasetSplits | None = None,
) -> list[ImageItem]:
    """Find the images to explain.

    Args:
        images: Paths of files and images in memory from `list_images`; or the address of shards, of
            which `count` images are taken. None: `count` images of the model's test split.
        recorded: Record of that split in the model file.
        count: Number of images from the test split.
        passed_images: Images that were passed to `vit.train` from Python.
    """
    if images is None:
        splits = passed_images or open_for_model(None, recorded=recorded)
    elif len(images) == 1 and isinstance(images[0], str) and is_remote(images[0]):
        splits = open_for_model(images[0], recorded=recorded)
    else:
        return items_from_images(images)
    return items_from_dataset(splits.split(), count=count)


def items_from_images(images: Iterable[str | Image.Image]) -> list[ImageItem]:
    """Build items for images from `list_images`, in this order. Images in memory are called
    image-00000 and so on."""
    paths = []
    readers: list[Read] = []
    for number, image in enumerate(images):
        if isinstance(image, str):
            paths.append(image)
            readers.append(partial(read_file, image))
        else:
            paths.append(f"image-{number:05d}")
            readers.append(partial(_hash_pixels, image))
    return list(map(ImageItem, paths, name_images(paths), readers, count()))


def items_from_dataset(dataset: ImageDataset, *, count: int) -> list[ImageItem]:
    """Choose `count` images evenly from a data set's split, named by their ids."""
    # evenly, because data sets are often sorted by class
    positions = np.linspace(0, len(dataset) - 1, min(count, len(dataset)))
    indices = positions.round().astype(int).tolist()
    ids = [dataset.ids[index] for index in indices]
    # ids are paths with a suffix, and the files get their own
    names = [clean_name(re.sub(r"\.\w+$", "", image_id).replace("/", "-")) for image_id in ids]
    names = _unique_or(names, list(map(_name_by_hash, names, ids)))
    readers = [partial(_read_sample, dataset, index) for index in indices]
    return list(map(ImageItem, ids, names, readers, range(len(ids))))


def name_images(paths: Sequence[str]) -> list[str]:
    """Return a unique name for each path: its stem, the stem with its folders, or the stem with a
    hash of the path."""
    parts = [Path(path).parts for path in paths]
    # folders at the front that all paths have
    folders = zip(*(path[:-1] for path in parts), strict=False)
    num_shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, folders))

    # from the shortest names to the safest
    stems = [clean_name(Path(path).stem) for path in paths]
    with_folders = [
        clean_name("-".join((*path[num_shared:-1], Path(path[-1]).stem))) for path in parts
    ]
    with_hashes = list(map(_name_by_hash, stems, paths))
    names = _unique_or(stems, _unique_or(with_folders, with_hashes))
    # a name with folders may be another's stem
    are_unique = len({name.casefold() for name in names}) == len(names)
    return names if are_unique else with_hashes


def _name_by_hash(stem: str, path: str) -> str:
    # file names on Linux may be no valid UTF-8
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{stem}-{digest[:12]}"


def _convert(read: Read, convert: Callable[[Image.Image], Image.Image]) -> tuple[Image.Image, str]:
    image, sha256 = read()
    return convert(image), sha256


def _unique_or(names: Sequence[str], alternatives: Sequence[str]) -> list[str]:
    """Return each name, or its alternative if another name is equal on a file system that ignores
    case."""
    counts = Counter(name.casefold() for name in names)
    return [
        name if counts[name.casefold()] == 1 else alternative
        for name, alternative in zip(names, alternatives, strict=True)
    ]


def read_file(path: str) -> tuple[Image.Image, str]:
    """Read an image, and hash the same bytes, in case the file changes meanwhile."""
    try:
        content = Path(path).read_bytes()
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
