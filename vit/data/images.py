"""Image files and images from Python: list them, and decode them to upright RGB pixels."""

import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

from vit.data.depth import (
    DICOM_SUFFIX,
    DeepImage,
    check_size,
    has_dicom,
    is_deep,
    is_dicom,
    read_deep,
    read_dicom,
)
from vit.runtime.arguments import check_kind, first_line, shorten
from vit.runtime.drive import DRIVE_ERRORS, report_drive

# Pillow warns about odd metadata and large images, which change no pixels. `catch_warnings` in a
# thread that decodes would take the other threads' warnings, too.
warnings.filterwarnings("ignore", module="PIL")

IMAGE_SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg"),
    *(".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
)
# photos of telephones; the package pillow-heif reads them
HEIF_SUFFIXES = (".heic", ".heif")
HEIF_HINT = "pip install '.[heic]' in the clone of vit reads .heic"
# formats that Pillow may open, whatever a file's name is: some of its other formats start programs
IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP", "HEIF")
# paths, PIL images, arrays or tensors [H, W, 3] or [3, H, W], one or several, in a list or a batch;
# or a set of images with labels, which are left out
ImageInputs = Any
# keys of an item that is a dictionary, and columns of a data set on the Hub
IMAGE_KEYS = ("image", "img")
LABEL_KEYS = ("label", "labels", "class")
# so far may values lie outside 0 to 1: by less than half of a step of 8 bits
_TOLERANCE = 1 / 512
# folders that NAS, file managers, operating systems and archives make; in small letters
_SYSTEM_FOLDERS = (
    *("@eadir", "@recycle", "@tmp", "@thumb", "#recycle", "#snapshot", "$recycle.bin", "__macosx"),
    *("__pycache__", "lost+found", "recycler", "system volume information", "thumbnails"),
)


@cache
def has_heif() -> bool:
    """Let Pillow read HEIC, and return true, if the package for it is installed."""
    try:
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found]  # an extra
    except ImportError:
        return False
    register_heif_opener()
    return True


def is_image_name(path: str) -> bool:
    """Return true if a file has the suffix of an image and isn't hidden."""
    # Path.suffix would be many times slower
    text = path.lower()
    has_suffix = (
        text.endswith(IMAGE_SUFFIXES)
        or (text.endswith(HEIF_SUFFIXES) and has_heif())
        or (text.endswith(DICOM_SUFFIX) and has_dicom())
    )
    return has_suffix and not os.path.basename(path).startswith(".")


def read_image(
    file: Path | BinaryIO, *, name: str = "image", draft_side: int | None = None
) -> Image.Image:
    """Decode the first frame of an image file, or of a file opened for reading bytes with a name
    for messages: EXIF rotation is applied, and see `to_rgb`.

    With `draft_side`, the pixels of a side that are enough, a JPEG file is decoded at a fraction of
    its size, down to an eighth, in less time.

    Raises:
        ValueError: The file is truncated, is not an image, or has more than 100 million pixels.
        OSError, DriveError: There is no such file, or its drive doesn't answer.
    """
    if isinstance(file, Path):
        if file.is_dir():
            raise ValueError(f"{file} is a folder that holds no images, or can't be read")
        with report_drive(file), open(file, "rb") as opened:
            return read_image(opened, name=str(file), draft_side=draft_side)
    try:
        if is_dicom(file):
            return read_dicom(file)
        with Image.open(file, formats=IMAGE_FORMATS[: None if has_heif() else -1]) as image:
            check_size(image.size)
            if draft_side is not None:
                image.draft("RGB", (draft_side, draft_side))
            tags = getattr(image, "tag_v2", {})
            # PlanarConfiguration and BitsPerSample: Pillow reads wrong values
            if tags.get(284) == 2 and max(tags[258]) > 8:
                raise ValueError("its bands of 16 bits lie one after the other; save it as PNG")
            if not is_deep(image):
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
            return to_rgb(image)
    # for broken bytes, the decoders raise errors of nearly any type
    except Exception as error:
        if getattr(error, "errno", None) in DRIVE_ERRORS:
            raise
        reason = first_line(error)
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is not one of {', '.join(IMAGE_FORMATS)} ({HEIF_HINT})"
        raise ValueError(f"{name} can't be read as an image: {reason}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB: transparency is put on white, colours become those of
    sRGB, and an image of more than 8 bits a channel becomes a `DeepImage`."""
    if isinstance(image, DeepImage):
        return image
    if is_deep(image):
        return read_deep(image)
    profile = image.info.get("icc_profile", b"")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode not in ("RGB", "CMYK"):
        image = image.convert("RGB")
    # a broken profile, or one of another kind of colours, changes nothing
    with suppress(OSError, ImageCms.PyCMSError):
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" not in ImageCms.getProfileDescription(own).lower():
            srgb = ImageCms.createProfile("sRGB")
            image = ImageCms.profileToProfile(image, own, srgb, outputMode="RGB") or image
    return image if image.mode == "RGB" else image.convert("RGB")


def convert_pixels(pixels: Any, *, name: str = "an image") -> np.ndarray:
    """Return one image in memory as [H, W, 3] or [H, W]: of uint8, or of the type of its values if
    they need more bits.

    It is an array or tensor, also [H, W, 1], [1, H, W] or [3, H, W], of uint8, of floating-point
    values from 0 to 1, or of values of more bits. Raises ValueError for another one, if its shape
    may be read in two ways, and if the values of a tensor are beyond 0 to 1, as after Normalize.
    """
    is_tensor = hasattr(pixels, "detach")
    if is_tensor:
        pixels = pixels.detach().cpu()
        # numpy has no bfloat16
        pixels = pixels.float() if pixels.is_floating_point() else pixels
    array = np.asarray(pixels)
    is_right = array.dtype.kind in "iuf"
    if array.dtype.kind == "f":
        # false for NaN, too
        has_range = array.min(initial=0) >= -_TOLERANCE and array.max(initial=1) <= 1 + _TOLERANCE
        is_right = has_range or not is_tensor
        if has_range:
            array = np.rint(array.clip(0, 1) * 255).astype(np.uint8)
    is_first, is_last = (array.ndim == 3 and array.shape[axis] in (1, 3) for axis in (0, -1))
    if not is_right or not (array.ndim == 2 or is_first != is_last):
        raise ValueError(
            f"{name} is {array.dtype} {list(array.shape)}, not pixels: pass uint8 of 0 to 255 or"
            " floats of 0 to 1 (without Normalize, vit normalises by itself), as [H, W, 3],"
            " [3, H, W] or [H, W]"
        )
    if is_first:
        array = array.transpose(1, 2, 0)
    return array[..., 0] if array.shape[2:] == (1,) else array


def open_pixels(image: Any, *, name: str = "an image") -> Image.Image:
    """Return an image in memory, one of PIL or an array of `convert_pixels`, upright and in RGB;
    `name` names it in messages."""
    if isinstance(image, Image.Image):
        # a copy would lose the values of a `DeepImage`
        is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
        return to_rgb(image if is_upright else ImageOps.exif_transpose(image))
    if image is None or isinstance(image, str | Path | int):
        kind = type(image).__name__
        raise ValueError(f"{name} is a {kind}, not an image; open files with PIL.Image.open")
    array = convert_pixels(image, name=name)
    if array.dtype != np.uint8:
        return DeepImage(array)
    return Image.fromarray(array).convert("RGB")


def find_key(item: Mapping[str, Any], known: Sequence[str], *, name: str) -> str:
    """Return the one of the known keys that an item has. Raises ValueError if it isn't one."""
    found = [key for key in known if key in item]
    if len(found) != 1:
        have = shorten(", ".join(map(str, item)))
        raise ValueError(f"{name} has {have}; call one of them {' or '.join(known)}")
    return found[0]


def _take_image(item: Any) -> Any:
    """Return the image of an item of a list or a set, without its label; see
    `find_python_objects`."""
    if isinstance(item, Mapping):
        return item[find_key(item, IMAGE_KEYS, name="an item of images")]
    if isinstance(item, tuple) and len(item) == 2:
        image, label = item
        # or else it is a pair of images
        if not isinstance(label, Image.Image | Path) and getattr(label, "ndim", 0) <= 1:
            return image
    return item


def list_images(images: ImageInputs) -> Iterator[str | Image.Image]:
    """List images, in order: each as the path of a file, or as `open_pixels` opens it.

    A folder gives the image files below it, sorted. A path that doesn't exist, and in a list a
    folder that can't be read or has no images, is listed, too: reading it raises an error, as a
    single folder does.
    """
    if isinstance(images, str | Path):
        # not Path.is_dir, which raises for a name of 300 characters
        if not os.path.isdir(images):
            yield str(images)
            return
        paths = sorted(filter(is_image_name, list_files(images)))
        if not paths:
            raise ValueError(f"{images} holds no images; check the path, and unpack archives in it")
        yield from paths
    # arrays and tensors are iterable, too
    elif isinstance(images, Image.Image) or hasattr(images, "__array__"):
        yield from map(open_pixels, images if getattr(images, "ndim", 2) == 4 else [images])
    else:
        if isinstance(images, Mapping):
            images = [images]
        elif hasattr(images, "__getitem__"):
            # sets of torch are read by index
            images = map(images.__getitem__, range(len(images)))
        expected = "a path, an image, an array, a data set or a list of them"
        check_kind(images, Iterable, name="images", expected=expected)
        for image in map(_take_image, images):
            if not isinstance(image, str | Path):
                yield from list_images(image)
                continue
            paths = []
            with suppress(OSError, ValueError):
                paths = list(map(str, list_images(image)))
            yield from paths or [str(image)]


def is_system_folder(name: str) -> bool:
    """Return true for the name of a folder of thumbnails or deleted files, or of a hidden one."""
    return name.startswith(".") or name.casefold() in _SYSTEM_FOLDERS


def list_files(folder: str | Path) -> Iterator[str]:
    """List the files below a folder, those of each directory in sorted order, but in no folders of
    `is_system_folder` or behind links. Raises OSError for a directory that can't be read."""

    def fail(error: OSError) -> None:
        raise error

    for directory, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        folders[:] = [name for name in folders if not is_system_folder(name)]
        yield from (os.path.join(directory, name) for name in sorted(names))
