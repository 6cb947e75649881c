"""What to explain: images as a user gives them or of a data set, each with a name its files can have."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.data.images import open_image
from vit.data.inputs import ImageInputs, list_images
from vit.data.open import open_for_model
from vit.data.sets.source import ImageSource
from vit.runtime.files import compute_sha256

_LONGEST_NAME = 120  # bytes; file systems allow 255, with the method, the class and what marks a temporary file


@dataclass(frozen=True)
class ImageItem:
    """An image to explain: `path` is shown to the user, `name` starts its files' names."""

    path: str
    name: str
    # the image and the SHA-256 of its file or pixels; inside, its pixels count (`vit.data.images.open_image`)
    open: Callable[[], AbstractContextManager[tuple[Image.Image, str]]]

    def read(self) -> tuple[Image.Image, str]:
        """`open`, for an image that is known to be small."""
        with self.open() as found:
            return found


def find_items(
    images: Sequence[str | Image.Image] | None,
    *,
    trained_on: Mapping[str, Any],
    count: int,
    done: Collection[str] = (),
    taken: Collection[str] = (),
) -> list[ImageItem]:
    """The images to explain, but for the paths that are `done`. Without `images`, `count` of the test split that
    `trained_on`, the data section of a configuration, describes."""
    if images is None:
        source = open_for_model(None, trained_on=trained_on).split("test")
        return [item for item in items_from_source(source, count=count) if item.path not in done]
    left = [image for image in images if not (isinstance(image, str) and image in done)]
    return items_from_images(left, taken=taken)


def items_from_images(images: ImageInputs, *, taken: Collection[str] = ()) -> list[ImageItem]:
    """Images of any kind (`vit.data.inputs`), in the order given; images in memory are called image-00000 and so on.
    Their names avoid each other's and those `taken`."""
    given = list(list_images(images))
    paths = [image if isinstance(image, str) else f"image-{number:05d}" for number, image in enumerate(given)]
    openers = [
        partial(_open_file, image) if isinstance(image, str) else partial(_open_pixels, image) for image in given
    ]
    return list(map(ImageItem, paths, name_images(paths, taken=taken), openers))


def items_from_source(source: ImageSource, *, count: int) -> list[ImageItem]:
    """`count` images spread evenly over a data set's split, named by their ids."""
    chosen = np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int).tolist()
    names = [re.sub(r"\.\w+$", "", source.ids[index]).replace("/", "-") for index in chosen]
    return [
        ImageItem(source.ids[index], clean_name(name), partial(_open_sample, source, index))
        for index, name in zip(chosen, names, strict=True)
    ]


def name_images(paths: Sequence[str], *, taken: Collection[str] = ()) -> list[str]:
    """A name for each path that no other has: its stem; with its folders; or with a hash of the path."""
    parts = [Path(path).parts for path in paths]
    shared = 0
    while parts and all(len(p) > shared + 1 for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    stems = [clean_name(Path(path).stem) for path in paths]
    with_folders = [clean_name("-".join((*p[shared:-1], Path(p[-1]).stem))) for p in parts]
    hashes = [hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:12] for path in paths]
    with_hash = [f"{stem}-{digest}" for stem, digest in zip(stems, hashes, strict=True)]
    names = _unique_or(stems, _unique_or(with_folders, with_hash, taken), taken)
    return names if len({name.casefold() for name in names}) == len(names) else with_hash


def clean_name(name: str) -> str:
    """`name` without characters that file systems and shells don't allow, at most 120 bytes."""
    name = re.sub(r'[\x00-\x1f\x7f<>:"/\\|?*\ud800-\udfff]', "_", name).strip(" .").lstrip("-")
    return name.encode()[:_LONGEST_NAME].decode(errors="ignore") or "image"


def _unique_or(names: Sequence[str], alternatives: Sequence[str], taken: Collection[str]) -> list[str]:
    """Each name, or its alternative where another has the same one on a file system that ignores case."""
    counts = Counter(name.casefold() for name in (*names, *taken))
    return [name if counts[name.casefold()] == 1 else other for name, other in zip(names, alternatives, strict=True)]


@contextmanager
def _open_file(path: str) -> Iterator[tuple[Image.Image, str]]:
    with open_image(Path(path)) as image:
        yield image, compute_sha256(Path(path))


def _open_pixels(image: Image.Image) -> AbstractContextManager[tuple[Image.Image, str]]:
    return _with_hash(nullcontext(image))


def _open_sample(source: ImageSource, index: int) -> AbstractContextManager[tuple[Image.Image, str]]:
    return _with_hash(source.open(index))


@contextmanager
def _with_hash(opened: AbstractContextManager[Image.Image]) -> Iterator[tuple[Image.Image, str]]:
    with opened as image:
        yield image, hashlib.sha256(image.tobytes()).hexdigest()
