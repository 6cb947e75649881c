"""Values of more than 8 bits a channel: read from an image, and scaled to 8 bits.

The program of an export holds this file, so it needs numpy and Pillow alone.
"""

import io
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageOps

# Pillow's decoders give the high bytes of 16-bit colours. Of the other order of bytes they give
# the low ones.
_OTHER_BYTES = {
    "RGB;16B": "RGB;16L",
    "RGB;16L": "RGB;16B",
    # the order of this machine, used for compressed TIFF
    "RGB;16N": "RGB;16B" if sys.byteorder == "little" else "RGB;16L",
}
# tags of TIFF
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_SAMPLE_FORMAT = 339


def is_deep(image: Image.Image) -> bool:
    """Return true for more than 8 bits a channel; of colours only before the file is decoded."""
    return image.mode.startswith("I") or image.mode == "F" or _find_rawmode(image) in _OTHER_BYTES


def read_values(image: Image.Image) -> tuple[np.ndarray, bool]:
    """Read the values of a deep image, which is in memory or not decoded yet.

    Returns:
        The upright values [H, W] or [H, W, 3], and true if large ones are dark (WhiteIsZero).
    """
    tags = getattr(image, "tag_v2", {})
    if image.mode != "RGB":
        values = np.asarray(ImageOps.exif_transpose(image))
        values = values.astype(values.dtype.newbyteorder("="))
        # Pillow's pixels are signed
        if tags.get(_BITS_PER_SAMPLE) == (32,) and tags.get(_SAMPLE_FORMAT, (1,)) == (1,):
            values = values.view(np.uint32)
        return values, tags.get(_PHOTOMETRIC) == 0

    low_image = _open_again(image)
    rawmode = _OTHER_BYTES[_find_rawmode(image)]
    low_image.tile = [
        tile._replace(args=rawmode if isinstance(tile.args, str) else (rawmode, *tile.args[1:]))
        for tile in low_image.tile
    ]
    high, low = (np.asarray(ImageOps.exif_transpose(each)) for each in (image, low_image))
    return high.astype(np.uint16) * 256 + low, False


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


def _find_rawmode(image: Any) -> str:
    """Return the order of the bytes in the file of an RGB image that is not decoded yet."""
    tiles = getattr(image, "tile", None)
    if image.mode != "RGB" or not tiles or not tiles[0].args:
        return ""
    arguments = tiles[0].args
    return arguments if isinstance(arguments, str) else str(arguments[0])


def _open_again(image: Any) -> Any:
    place = image.fp.tell()
    image.fp.seek(0)
    content = io.BytesIO(image.fp.read())
    image.fp.seek(place)
    return Image.open(content, formats=[image.format])
