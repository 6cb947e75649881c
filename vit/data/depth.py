"""Values of more than 8 bits a channel: read from an image, and scaled to 8 bits."""

import warnings
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageOps

# tags of TIFF
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC = 262
_SAMPLE_FORMAT = 339


def is_deep(image: Image.Image) -> bool:
    """Return true for more than 8 bits a channel; for colours only before the file is decoded."""
    return image.mode.startswith("I") or image.mode == "F" or _has_deep_colours(image)


def read_values(image: Any) -> tuple[np.ndarray, bool]:
    """Read the values of a deep image, which is in memory or not decoded yet.

    Returns:
        The upright values [H, W] or [H, W, 3]; and true if large ones are dark (WhiteIsZero).

    Raises:
        ValueError: It is damaged.
    """
    if _has_deep_colours(image):
        # takes long to import; Pillow keeps the high bytes alone
        import cv2

        image.fp.seek(0)
        content = np.frombuffer(image.fp.read(), np.uint8)
        colours: np.ndarray | None = cv2.imdecode(content, cv2.IMREAD_ANYDEPTH | cv2.IMREAD_COLOR)
        if colours is None:
            raise ValueError("its colours of 16 bits are damaged")
        # from blue, green, red
        return np.ascontiguousarray(colours[..., ::-1]), False
    tags = getattr(image, "tag_v2", {})
    values = np.asarray(ImageOps.exif_transpose(image))
    values = values.astype(values.dtype.newbyteorder("="))
    # Pillow's pixels are signed
    if tags.get(_BITS_PER_SAMPLE) == (32,) and tags.get(_SAMPLE_FORMAT, (1,)) == (1,):
        values = values.view(np.uint32)
    return values, tags.get(_PHOTOMETRIC) == 0


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


def _has_deep_colours(image: Any) -> bool:
    """Return true for colours of 16 bits without transparency, in a file that isn't decoded yet."""
    tiles = getattr(image, "tile", None) or ()
    # the order of bytes in the file, such as "RGB;16B"
    return image.mode == "RGB" and any("RGB;16" in str(tile.args) for tile in tiles)
