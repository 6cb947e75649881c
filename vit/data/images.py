"""Image files and images from Python: list them, and decode them to upright RGB pixels."""

import io
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vit.data.depth import is_deep, read_values, scale_values
from vit.data.dicom import DICOM_SUFFIX, has_dicom, is_dicom, read_dicom
from vit.data.python_images import convert_pixels, iterate_images
from vit.runtime.drive import is_drive_error, report_drive
from vit.runtime.places import is_archive

# Pillow warns about odd metadata and large images; neither changes the pixels. For the whole
# process: `catch_warnings` in a thread that decodes would take the other threads' warnings, too.
warnings.filterwarnings("ignore", module="PIL")

IMAGE_SUFFIXES = (
    ".avif",
    ".bmp",
    ".gif",
    ".jfif",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
# between the name of a file and the reason
UNREADABLE = " can't be read as an image: "
# photos of telephones; the package pillow-heif reads them
HEIF_SUFFIXES = (".heic", ".heif")
HEIF_HINT = "pip install '.[heic]' in the clone of vit reads .heic"
# folders that NAS, file managers, operating systems and archives make; in small letters
_SYSTEM_FOLDERS = frozenset(
    (
        "__macosx",
        "__pycache__",
        "@eadir",
        "@recently-snapshot",
        "@recycle",
        "@thumb",
        "@tmp",
        "#recycle",
        "#snapshot",
        "~snapshot",
        "$recycle.bin",
        "recycler",
        "system volume information",
        "lost+found",
        "ipod photo cache",
        "thumbnails",
        "_gsdata_",
        "_vti_cnf",
    )
)
# formats that Pillow may open, whatever a file's name is: some of its other formats start programs
IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# A small file may hold very many pixels. The threads of a pool decode images above this size one at
# a time, each in a new thread: glibc keeps the memory that a thread has used, so eight threads
# would keep eight large images.
_LARGE_PIXELS = 25_000_000
# larger images are refused; VIT_MAX_PIXELS in the environment sets another limit
_MAX_PIXELS = 100_000_000
# JPEG's own limit: a line of millions of pixels takes five times the memory of a square
_MAX_SIDE = 65_535
_MAX_PIXELS_HINT = "set VIT_MAX_PIXELS in the environment to read it"
_large_image_lock = threading.Lock()

_BANDS_HINT = "save one or three of its bands as grey or RGB, with 8 or 16 bits"

# pixels that are converted or hashed at once
_BAND_PIXELS = 2**22

# tags of TIFF
_BITS_PER_SAMPLE = 258
_SAMPLES_PER_PIXEL = 277


class DeepImage(Image.Image):
    """An upright image with more than 8 bits a channel: RGB pixels, and the values behind them.

    The RGB pixels are 16 bits scaled to 8; of floating-point values their own range is scaled.
    `vit.data.preprocess.Preprocess` scales the values by the range of the model instead.

    Args:
        values: [H, W] or [H, W, 3], integers or floats.
        limits: Smallest and largest value that the file says it may hold, or None.
        is_inverted: Large values are dark.
    """

    def __init__(
        self,
        values: np.ndarray,
        *,
        limits: tuple[float, float] | None = None,
        is_inverted: bool = False,
    ) -> None:
        super().__init__()
        self.values = values
        self.limits = limits
        self.is_inverted = is_inverted
        # not inverted: so were these files read before there were ranges
        preview = self._scale(0, 65535) if self.has_integers else self.stretch()
        self.__dict__.update(vars(preview))

    @property
    def has_integers(self) -> bool:
        """True if the values are whole numbers."""
        return self.values.dtype.kind in "iu"

    def scale(self, low: float, high: float) -> Image.Image:
        """Return RGB pixels in which values from low to high are black to white."""
        return self._scale(low, high, is_inverted=self.is_inverted)

    def stretch(self) -> Image.Image:
        """Return RGB pixels in which the smallest finite value is black and the largest white."""
        low, high = find_extremes(self.values)
        return self.scale(low, high if high > low else low + 1)

    def _scale(self, low: float, high: float, *, is_inverted: bool = False) -> Image.Image:
        height, width = self.values.shape[:2]
        rgb = Image.new("RGB", (width, height))
        band_height = max(_BAND_PIXELS // max(width, 1), 1)
        for top in range(0, height, band_height):
            band = self.values[top : top + band_height]
            pixels = scale_values(band, low, high, is_inverted=is_inverted)
            rgb.paste(Image.fromarray(pixels).convert("RGB"), (0, top))
        return rgb


def find_extremes(values: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest finite value; zeros if there is none."""
    finite = values if values.dtype.kind in "iu" else values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


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
    """Decode an image file of any mode into upright RGB.

    EXIF rotation is applied, transparency is put on white, and only the first frame of an
    animation is read. An image of more than 8 bits a channel is a `DeepImage`.

    Args:
        file: A path, or a file opened for reading bytes.
        name: Name of an opened file, for messages.
        draft_side: Pixels of a side that are enough. JPEG files are then decoded at a fraction of
            their size, down to an eighth, in less time. None decodes the full size.

    Raises:
        ValueError: The file is truncated, is not an image, has more than 100 million pixels (or
            VIT_MAX_PIXELS of the environment) or more than 65,535 a side.
        FileNotFoundError: There is no such file.
        DriveError: Its drive doesn't answer.
    """
    if isinstance(file, Path):
        try:
            with report_drive(file), open(file, "rb") as opened:
                return read_image(opened, name=str(file), draft_side=draft_side)
        except IsADirectoryError as error:
            text = "is a folder that holds no images, or can't be read"
            raise ValueError(f"{file} {text}") from error

    if is_dicom(file):
        values, limits, is_inverted = read_dicom(file, name=name, check_size=check_size)
        if values.dtype == np.uint8:
            return Image.fromarray(values).convert("RGB")
        return DeepImage(values, limits=limits, is_inverted=is_inverted)

    try:
        formats = (*IMAGE_FORMATS, "HEIF") if has_heif() else IMAGE_FORMATS
        max_pixels = _max_pixels()
        # Pillow has a limit of its own
        if max_pixels > _MAX_PIXELS:
            Image.MAX_IMAGE_PIXELS = max_pixels
        _load_plugins()
        with Image.open(file, formats=formats) as image:
            check_size(image.size)
            is_large = image.width * image.height > _LARGE_PIXELS
            if draft_side is not None:
                image.draft("RGB", (draft_side, draft_side))
            # The main thread doesn't take the lock: a process that is forked while it is held would
            # wait for ever.
            if is_large and threading.current_thread() is not threading.main_thread():
                with _large_image_lock, ThreadPoolExecutor(1) as decoder:
                    return decoder.submit(_decode, image).result()
            return _decode(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"{name}{UNREADABLE}{_explain_format(file)}") from error
    except Image.DecompressionBombError as error:
        text = f"it has more than {max_pixels:,} pixels; {_MAX_PIXELS_HINT}"
        raise ValueError(f"{name}{UNREADABLE}{text}") from error
    except Exception as error:
        if is_drive_error(error):
            raise
        # for broken bytes, Pillow's decoders raise errors of nearly any type
        reason = re.sub(r" object at 0x[0-9a-f]+", "", str(error)) or type(error).__name__
        raise ValueError(f"{name}{UNREADABLE}{reason}") from error


def read_pixels(file: Path | BinaryIO, *, name: str = "image") -> Image.Image | np.ndarray:
    """Decode an image file as `read_image` does; a plain JPEG file in less time, to an array
    [H, W, 3] of the same pixels.

    Raises the errors of `read_image`.
    """
    with suppress(OSError, ValueError):
        if isinstance(file, Path):
            with open(file, "rb") as opened:
                pixels = _decode_plain_jpeg(opened)
        else:
            pixels = _decode_plain_jpeg(file)
            file.seek(0)
        if pixels is not None:
            return pixels
    return read_image(file, name=name)


def _decode_plain_jpeg(file: BinaryIO) -> np.ndarray | None:
    """Decode a JPEG file of one scan that is upright, not large and not CMYK, and isn't cut short:
    OpenCV decodes such files, too. None for another."""
    if file.read(2) != b"\xff\xd8":
        return None
    file.seek(0)
    content = file.read()
    codes = np.frombuffer(content, np.uint8)
    # takes long to import
    import cv2

    opened = io.BytesIO(content)
    # for broken bytes, Pillow raises errors of nearly any type
    with suppress(Exception), Image.open(opened, formats=("JPEG",)) as image:
        check_size(image.size)
        is_plain = image.format == "JPEG" and image.mode in ("RGB", "L")
        is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
        # Pillow has read up to the scan, in which 0 or a restart marker follows on 0xFF
        start = opened.tell()
        following = codes[start + 1 : -1][codes[start:-2] == 0xFF]
        is_whole = content.endswith(b"\xff\xd9") and np.all(
            (following == 0) | (following & 0xF8 == 0xD0)
        )
        is_small = image.width * image.height <= _LARGE_PIXELS
        if is_plain and is_upright and is_whole and is_small:
            flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
            # None for broken bytes
            pixels: np.ndarray | None = cv2.imdecode(codes, flags)
            return pixels
    return None


@cache
def _load_plugins() -> None:
    """Load the formats that Pillow itself would load with fifty others."""
    from PIL import TiffImagePlugin, WebPImagePlugin  # noqa: F401

    # older ones have none
    with suppress(ImportError):
        from PIL import AvifImagePlugin  # noqa: F401


def check_size(size: tuple[int, int]) -> None:
    """Raise ValueError if an image of this width and height would take too much memory."""
    text = f"it has {size[0]:,} x {size[1]:,} pixels, more than"
    if size[0] * size[1] > _max_pixels():
        raise ValueError(f"{text} {_max_pixels():,}; {_MAX_PIXELS_HINT}")
    if max(size) > _MAX_SIDE:
        raise ValueError(f"{text} {_MAX_SIDE:,} a side; divide it")


def _max_pixels() -> int:
    text = os.environ.get("VIT_MAX_PIXELS") or str(_MAX_PIXELS)
    if not text.isdecimal():
        text = f"VIT_MAX_PIXELS={text} in the environment is not a number of pixels"
        raise ValueError(f"{text}; set one such as {_MAX_PIXELS}")
    return int(text)


def _explain_format(file: BinaryIO) -> str:
    """Explain why a file is not an image of a known format."""
    file.seek(0)
    header = file.read(12)
    if not header:
        return "it is empty"
    if header[4:8] == b"ftyp" and header[8:11] in (b"hei", b"hev", b"mif", b"msf"):
        return f"it is HEIC; {HEIF_HINT}"
    if header[:4] in (b"II*\0", b"MM\0*"):
        return f"it is a TIFF of a kind that Pillow doesn't read; {_BANDS_HINT}"
    return f"it is not one of {', '.join(IMAGE_FORMATS)}"


def _check_bands(image: Image.Image) -> None:
    """Raise ValueError for a TIFF of which Pillow would read some bands alone, or wrong values."""
    if image.format != "TIFF":
        return
    tags = image.tag_v2  # type: ignore[attr-defined]
    tiles = [tile for tile in image.tile if tile.args]  # type: ignore[attr-defined]
    rawmode = str(tiles[0].args[0]) if tiles else ""
    # CMYKX and RGBAX, too: bands that are neither colours nor transparency
    if "X" in rawmode:
        raise ValueError(f"it has {tags[_SAMPLES_PER_PIXEL]} bands; {_BANDS_HINT}")
    if rawmode == "R" and max(tags[_BITS_PER_SAMPLE]) > 8:
        raise ValueError(f"its bands of 16 bits lie one after the other; {_BANDS_HINT}")


def _decode(image: Image.Image) -> Image.Image:
    _check_bands(image)
    deep = _read_deep(image)
    if deep is not None:
        return deep
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB: transparency is put on white, and an image of more than
    8 bits a channel becomes a `DeepImage`."""
    if isinstance(image, DeepImage):
        return image
    deep = _read_deep(image)
    if deep is not None:
        return deep
    if image.mode == "RGB" and "transparency" not in image.info:
        return image

    # intermediate copies take up to 8 times the memory of the result, so large images are divided
    if image.width * image.height <= _BAND_PIXELS:
        return _convert(image)
    rgb = Image.new("RGB", image.size)
    for top, band in divide(image):
        rgb.paste(_convert(band), (0, top))
    return rgb


def _read_deep(image: Image.Image) -> DeepImage | None:
    """Return an upright image of more than 8 bits a channel; None for another."""
    if not is_deep(image):
        return None
    values, is_inverted = read_values(image)
    return DeepImage(values, is_inverted=is_inverted)


def divide(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Divide an image into bands from the top down, so that working on one takes little memory.

    Yields:
        (number of the first row, band).
    """
    band_height = max(_BAND_PIXELS // max(image.width, 1), 1)
    for top in range(0, image.height, band_height):
        bottom = min(top + band_height, image.height)
        yield top, image.crop((0, top, image.width, bottom))


def _convert(image: Image.Image) -> Image.Image:
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        # Pillow converts premultiplied modes only to LA and RGBA
        if image.mode in ("La", "RGBa"):
            image = image.convert(image.mode.upper())
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


@runtime_checkable
class PixelArray(Protocol):
    """An array of pixels that numpy can read, such as an array or a torch tensor."""

    # not torch's type, because files are also listed where torch isn't imported
    def __array__(self) -> np.ndarray: ...


@runtime_checkable
class ImageSet(Protocol):
    """A map-style data set of torch."""

    def __getitem__(self, index: int) -> Any: ...

    def __len__(self) -> int: ...


ImageInput = str | Path | Image.Image | PixelArray
# several may be items of a data set, which have labels
ImageInputs = ImageInput | Iterable[Any] | ImageSet


def list_images(images: ImageInputs) -> Iterator[str | Image.Image]:
    """List images, in order: each as the path of a file or as an upright PIL image in RGB.

    Args:
        images: Paths, PIL images or arrays, one or several; or a set or loader of images with
            labels, which are left out. A folder gives the image files below it, sorted. For an
            array (or torch tensor) see `convert_pixels`; several images are [N, H, W, 3] or
            [N, 3, H, W], and values of more than 8 bits become a `DeepImage`. A path that doesn't
            exist, a directory that can't be read, and in a list a folder without images, is listed
            too: reading it raises an error that names it.

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
            archives = [name for name in os.listdir(images) if is_archive(name)]
            held = (
                f", but the archive {min(archives)}; unpack it" if archives else "; check the path"
            )
            raise ValueError(f"{images} holds no images{held}")
        yield from paths
    elif isinstance(images, Image.Image):
        # Pillow would copy upright images, too
        is_upright = images.getexif().get(ExifTags.Base.Orientation, 1) == 1
        yield to_rgb(images if is_upright else ImageOps.exif_transpose(images))
    # before sequences: arrays and tensors are iterable, too
    elif isinstance(images, PixelArray):
        several: Iterable[Any] = [images]
        if isinstance(images, Iterable) and np.ndim(images) == 4:
            several = images
        for pixels in several:
            array = convert_pixels(pixels)
            if array.dtype == np.uint8:
                yield Image.fromarray(array).convert("RGB")
            else:
                yield DeepImage(array)
    else:
        for image in iterate_images(images):
            if isinstance(image, str | Path) and os.path.isdir(image):
                yield from _list_folder(image) or [str(image)]
            else:
                yield from list_images(image)


def _list_folder(folder: str | Path) -> list[str]:
    unreadable: list[str] = []
    # the same folders as in training
    files = list_files(folder, left_out=[], unreadable=unreadable)
    images = filter(is_image_name, files)
    return sorted([*images, *unreadable])


def _scan(directory: str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def is_system_folder(name: str) -> bool:
    """Return true for the name of a folder that a system or a program makes beside a user's files:
    thumbnails, waste baskets, hidden folders."""
    return name.startswith(".") or name.casefold() in _SYSTEM_FOLDERS


def list_files(
    folder: str | Path,
    *,
    left_out: list[str] | None = None,
    unreadable: list[str] | None = None,
) -> Iterator[str]:
    """List the files below a folder, those of each directory in sorted order. Links to directories
    are not followed.

    Args:
        folder: The folder.
        left_out: List that gets the folders of `is_system_folder`, which are then left out. With
            None, they are read.
        unreadable: List that gets the directories that can't be read. With None, these are errors.

    Raises:
        OSError: A directory can't be read. One of `is_system_folder` is left out instead.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        directory = waiting.pop()
        # not os.walk, which recurses: folders may be nested deeper than Python's stack
        try:
            sorted_entries = _scan(directory)
        except FileNotFoundError:
            continue
        except OSError:
            if not is_system_folder(os.path.basename(directory)):
                if unreadable is None:
                    raise
                unreadable.append(directory)
            continue

        subfolders = []
        for entry in sorted_entries:
            is_link = entry.is_symlink()
            # entry.is_dir would raise for a link that leads to itself
            is_folder = os.path.isdir(entry.path) if is_link else entry.is_dir()
            if is_folder and left_out is not None and is_system_folder(entry.name):
                left_out.append(entry.path)
                continue
            if not is_folder:
                yield entry.path
            elif not is_link:
                subfolders.append(entry.path)
        # the last directory of `waiting` is read first
        waiting += reversed(subfolders)
