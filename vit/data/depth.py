"""Values of more than 8 bits a channel: read from an image, and scaled to 8 bits.

The program of an export holds this file, so it needs numpy and Pillow alone.
"""

import io
import os
import sys
import warnings
from functools import cache
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps

# Pillow's decoders give the high bytes of 16-bit colours. Of the other order of bytes they give
# the low ones.
_OTHER_BYTES = {
    f"{bands};16{order}": f"{bands};16{other}"
    for bands in ("RGB", "RGBA")
    for order, other in (
        ("B", "L"),
        ("L", "B"),
        # the order of this machine, used for compressed TIFF
        ("N", "B" if sys.byteorder == "little" else "L"),
    )
}
# grey with transparency of 16 bits, whose four bytes are read as four channels
_GREY_AND_ALPHA = "LA;16B"
# tags of TIFF
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_MIN_SAMPLE_VALUE = 280
_MAX_SAMPLE_VALUE = 281
_SAMPLE_FORMAT = 339


def is_deep(image: Image.Image) -> bool:
    """Return true for more than 8 bits a channel; of colours only before the file is decoded."""
    is_colour = _find_rawmode(image) in (*_OTHER_BYTES, _GREY_AND_ALPHA)
    return image.mode.startswith("I") or image.mode == "F" or is_colour


def refuse_dicom(path: Any) -> None:
    """Raise ValueError for DICOM, which the programs of exports don't read."""
    with open(path, "rb") as file:
        if file.read(132)[128:] == b"DICM":
            hint = "give it to `vit predict`, or save its rescaled values as TIFF"
            raise ValueError(f"{path} is DICOM, which an export doesn't read; {hint}")


def read_values(image: Image.Image) -> tuple[np.ndarray, tuple[float, float] | None, bool]:
    """Read the values of a deep image, which is in memory or not decoded yet.

    Returns:
        The upright values [H, W] or [H, W, 3]; the smallest and the largest value that the file
        says it may hold, or None; and true if large ones are dark (WhiteIsZero).
    """
    limits = _read_limits(image)
    tags = getattr(image, "tag_v2", {})
    if image.mode not in ("RGB", "RGBA"):
        values = np.asarray(ImageOps.exif_transpose(image))
        values = values.astype(values.dtype.newbyteorder("="))
        # Pillow's pixels are signed
        if tags.get(_BITS_PER_SAMPLE) == (32,) and tags.get(_SAMPLE_FORMAT, (1,)) == (1,):
            values = values.view(np.uint32)
        return values, limits, tags.get(_PHOTOMETRIC) == 0

    other_image = _open_again(image)
    rawmode = _OTHER_BYTES.get(_find_rawmode(image), "RGBA")
    other_image.tile = [
        tile._replace(args=rawmode if isinstance(tile.args, str) else (rawmode, *tile.args[1:]))
        for tile in other_image.tile
    ]
    high, low = (np.asarray(ImageOps.exif_transpose(each)) for each in (image, other_image))
    if rawmode == "RGBA":
        high, low = low[..., [0, 0, 0, 2]], low[..., [1, 1, 1, 3]]
    return _put_on_white(high.astype(np.uint16) * 256 + low), limits, False


def guess_range(values: np.ndarray, limits: tuple[float, float] | None) -> tuple[float, float]:
    """Return the values of one image that become black and white, for a model of 8-bit images.

    They are the limits that the file says; otherwise 0 to the largest value of 8, 10, 12, 14 or 16
    bits, and a warning names it.

    Raises:
        ValueError: Values are negative, larger, or no whole numbers.
    """
    low, high = values.min(), values.max()
    if limits is not None and limits[0] <= low and high <= limits[1]:
        return limits
    if values.dtype.kind == "f" or low < 0 or high > 65535:
        raise ValueError(
            "floating-point, negative or 32-bit values have no fixed range in a model that was"
            " trained on images of 8 bits; save it with 8 or 16 bits a channel"
        )
    top = next(2**bits - 1 for bits in (8, 10, 12, 14, 16) if high < 2**bits)
    if top < 65535:
        _say_guess(top)
    return 0, top


@cache
def _say_guess(top: int) -> None:
    """Warn once of a range that was guessed."""
    warnings.warn(
        f"16-bit images with values up to {top} are scaled by 0 to {top}, since the model was trained"
        " on images of 8 bits; save them with 8 bits if that is wrong",
        stacklevel=2,
    )


def _put_on_white(values: np.ndarray) -> np.ndarray:
    """Put colours on the largest value of as many bits as they have; [H, W, 3] or [H, W, 4]."""
    colours, alpha = values[..., :3], values[..., 3:]
    white = 2 ** int(colours.max()).bit_length() - 1
    # by rows, because numbers of 64 bits take much memory
    for row in np.flatnonzero((alpha < 65535).any(axis=(1, 2))):
        opacity = alpha[row] / 65535
        colours[row] = np.rint(colours[row] * opacity + white * (1 - opacity))
    return colours


def scale_values(
    values: np.ndarray, low: float, high: float, *, is_inverted: bool = False
) -> np.ndarray:
    """Scale values from low to high to uint8, and clip the others. NaN becomes 0.

    Args:
        values: Numbers of any type.
        low, high: Values that become 0 and 255.
        is_inverted: Large values are dark.
    """
    scaled = np.nan_to_num((values.astype(np.float64) - low) / (high - low) * 255, nan=0.0)
    pixels = np.rint(np.clip(scaled, 0, 255)).astype(np.uint8)
    return 255 - pixels if is_inverted else pixels


def _read_limits(image: Image.Image) -> tuple[float, float] | None:
    """Return the smallest and the largest value that the file says it may hold."""
    file = getattr(image, "fp", None)
    if image.format == "PNG" and file is not None:
        bits = _read_significant_bits(file)
        return (0.0, 2.0**bits - 1) if bits else None
    tags = getattr(image, "tag_v2", {})
    if _MAX_SAMPLE_VALUE in tags:
        low = np.min(tags.get(_MIN_SAMPLE_VALUE, 0))
        return float(low), float(np.max(tags[_MAX_SAMPLE_VALUE]))
    bits = np.max(tags.get(_BITS_PER_SAMPLE, 0))
    # 16 and 32 say nothing: they are the sizes of memory
    return (0.0, 2.0**bits - 1) if 8 < bits < 16 else None


def _read_significant_bits(file: IO[bytes]) -> int:
    """Return the bits in the chunk sBIT of a PNG file; 0 without one."""
    place = file.tell()
    file.seek(8)
    bits = 0
    while len(header := file.read(8)) == 8:
        length, kind = int.from_bytes(header[:4], "big"), header[4:]
        if kind in (b"sBIT", b"IDAT", b"IEND"):
            bits = max(file.read(length)) if kind == b"sBIT" and 0 < length <= 4 else 0
            break
        file.seek(length + 4, os.SEEK_CUR)
    file.seek(place)
    return bits


def _find_rawmode(image: Any) -> str:
    """Return the order of the bytes in the file of a colour image that is not decoded yet."""
    tiles = getattr(image, "tile", None)
    if image.mode not in ("RGB", "RGBA") or not tiles or not tiles[0].args:
        return ""
    arguments = tiles[0].args
    return arguments if isinstance(arguments, str) else str(arguments[0])


def _open_again(image: Any) -> Any:
    place = image.fp.tell()
    image.fp.seek(0)
    content = io.BytesIO(image.fp.read())
    image.fp.seek(place)
    return Image.open(content, formats=[image.format])
