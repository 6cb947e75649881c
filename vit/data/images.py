"""From an image file to upright RGB pixels."""

import os
import re
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vit.runtime.files import open_regular

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
# photos of telephones; the package pillow-heif reads them
HEIF_SUFFIXES = (".heic", ".heif")
HEIF_HINT = "pip install 'vit-pipeline[heic]' reads .heic"
# formats that Pillow may open, whatever a file's name is: some of its other formats start programs
IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# A small file may hold very many pixels. The threads of a pool decode images above this size one at a
# time, each in a new thread: glibc keeps the memory that a thread has used, so eight threads would
# keep eight large images.
_LARGE_PIXELS = 25_000_000
# larger images are refused; VIT_MAX_PIXELS in the environment sets another limit
_MAX_PIXELS = 100_000_000
_MAX_PIXELS_HINT = "set VIT_MAX_PIXELS in the environment to read it"
_large_image_lock = threading.Lock()

# pixels that are converted or hashed at once
_BAND_PIXELS = 2**22


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
    has_suffix = text.endswith(IMAGE_SUFFIXES) or (text.endswith(HEIF_SUFFIXES) and has_heif())
    return has_suffix and not os.path.basename(path).startswith(".")


def read_image(
    file: Path | BinaryIO, *, name: str = "image", draft_side: int | None = None
) -> Image.Image:
    """Decode an image file of any mode into upright RGB.

    EXIF rotation is applied, 16-bit grey is scaled to 8 bits, transparency is put on white, and
    only the first frame of an animation is read.

    Args:
        file: A path, or a file opened for reading bytes.
        name: Name of an opened file, for messages.
        draft_side: Pixels of a side that are enough. JPEG files are then decoded at a fraction of
            their size, down to an eighth, in less time. None decodes the full size.

    Raises:
        ValueError: The file is truncated, is not an image, or has more than 100 million pixels (or
            VIT_MAX_PIXELS of the environment).
        FileNotFoundError: There is no such file.
    """
    if isinstance(file, Path):
        try:
            with open_regular(file) as opened:
                return read_image(opened, name=str(file), draft_side=draft_side)
        except IsADirectoryError as error:
            text = "is a folder that holds no images, or can't be read"
            raise ValueError(f"{file} {text}") from error

    try:
        # Pillow warns about odd metadata and large images; neither changes the pixels
        formats = (*IMAGE_FORMATS, "HEIF") if has_heif() else IMAGE_FORMATS
        max_pixels = _max_pixels()
        # Pillow has a limit of its own
        if max_pixels > _MAX_PIXELS:
            Image.MAX_IMAGE_PIXELS = max_pixels
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=formats) as image:
            num_pixels = image.width * image.height
            if num_pixels > max_pixels:
                text = f"it has {image.width:,} x {image.height:,} pixels, more than {max_pixels:,}"
                raise ValueError(f"{text}; {_MAX_PIXELS_HINT}")
            if draft_side is not None:
                image.draft("RGB", (draft_side, draft_side))
            is_large = num_pixels > _LARGE_PIXELS
            # The main thread doesn't take the lock: a process that is forked while it is held would
            # wait for ever.
            if is_large and threading.current_thread() is not threading.main_thread():
                with _large_image_lock, ThreadPoolExecutor(1) as decoder:
                    return decoder.submit(_decode, image).result()
            return _decode(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} can't be read as an image: {_explain_format(file)}") from error
    except Image.DecompressionBombError as error:
        text = f"it has more than {max_pixels:,} pixels; {_MAX_PIXELS_HINT}"
        raise ValueError(f"{name} can't be read as an image: {text}") from error
    except Exception as error:
        # for broken bytes, Pillow's decoders raise errors of nearly any type
        reason = re.sub(r" object at 0x[0-9a-f]+", "", str(error)) or type(error).__name__
        raise ValueError(f"{name} can't be read as an image: {reason}") from error


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
    return f"it is not one of {', '.join(IMAGE_FORMATS)}"


def _decode(image: Image.Image) -> Image.Image:
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB: 16-bit grey is scaled, transparency is put on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image

    # intermediate copies take up to 8 times the memory of the result, so large images are divided
    if image.width * image.height <= _BAND_PIXELS:
        return _convert(image)
    rgb = Image.new("RGB", image.size)
    for top, band in divide(image):
        rgb.paste(_convert(band), (0, top))
    return rgb


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
    # 16-bit grey, also when Pillow widens it to 32 bits
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError(
            "floating-point pixels have no fixed range; save it with 8 or 16 bits a channel"
        )
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        # Pillow converts premultiplied modes only to LA and RGBA
        if image.mode in ("La", "RGBa"):
            image = image.convert(image.mode.upper())
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
