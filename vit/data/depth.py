"""Images of more than 8 bits a channel: their values, and how these become RGB pixels."""

import warnings
from typing import Any

import numpy as np
from PIL import Image, ImageOps

# tags of TIFF
_BITS_PER_SAMPLE = 258
_SAMPLE_FORMAT = 339
# rows that are scaled at once: float64 takes much memory
_ROWS = 256


class DeepImage(Image.Image):
    """An upright image with more than 8 bits a channel: RGB pixels, and the values behind them.

    The RGB pixels are 16 bits scaled to 8; of floating-point values their own range is scaled.
    `vit.data.preprocess.Preprocess` scales the values by the range of the model instead.

    Args:
        values: [H, W] or [H, W, 3], integers or floats.
    """

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.values = values
        preview = self.scale(0, 65535) if values.dtype.kind in "iu" else self.stretch()
        self.__dict__.update(vars(preview))

    def scale(self, low: float, high: float) -> Image.Image:
        """Return RGB pixels in which values from low to high are black to white; NaN is black."""
        pixels = np.empty(self.values.shape, dtype=np.uint8)
        for top in range(0, len(pixels), _ROWS):
            band = self.values[top : top + _ROWS].astype(np.float64)
            scaled = np.nan_to_num((band - low) / (high - low) * 255, nan=0.0)
            pixels[top : top + _ROWS] = np.rint(np.clip(scaled, 0, 255))
        return Image.fromarray(pixels).convert("RGB")

    def stretch(self) -> Image.Image:
        """Return RGB pixels in which the smallest finite value is black and the largest white."""
        low, high = find_extremes(self.values)
        return self.scale(low, high if high > low else low + 1)


def find_extremes(values: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest finite value; zeros if there is none."""
    finite = values if values.dtype.kind in "iu" else values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def is_deep(image: Image.Image) -> bool:
    """Return true for more than 8 bits a channel; for colours only before the file is decoded."""
    return image.mode.startswith("I") or image.mode == "F" or _has_deep_colours(image)


def read_deep(image: Any) -> DeepImage:
    """Read an image of `is_deep`, which is in memory or not decoded yet.

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
        return DeepImage(np.ascontiguousarray(colours[..., ::-1]))
    tags = getattr(image, "tag_v2", {})
    values = np.asarray(ImageOps.exif_transpose(image))
    values = values.astype(values.dtype.newbyteorder("="))
    # Pillow's pixels are signed
    if tags.get(_BITS_PER_SAMPLE) == (32,) and tags.get(_SAMPLE_FORMAT, (1,)) == (1,):
        values = values.view(np.uint32)
    return DeepImage(values)


def guess_range(values: np.ndarray) -> tuple[float, float]:
    """Return the values of one image that become black and white, for a model of 8-bit images: 0 to
    the largest value of 8, 10, 12, 14 or 16 bits. A warning names it.

    Raises:
        ValueError: Values are negative, larger, or no whole numbers.
    """
    high = values.max()
    if values.dtype.kind == "f" or values.min() < 0 or high > 65535:
        raise ValueError(
            "floating-point, negative or 32-bit values have no fixed range in a model that was"
            " trained on images of 8 bits; save it with 8 or 16 bits a channel"
        )
    top = next(2**bits - 1 for bits in (8, 10, 12, 14, 16) if high < 2**bits)
    if top < 65535:
        warnings.warn(
            f"16-bit images with values up to {top} are scaled by 0 to {top}, since the model was"
            " trained on images of 8 bits; save them with 8 bits if that is wrong",
            stacklevel=2,
        )
    return 0, top


def _has_deep_colours(image: Any) -> bool:
    """Return true for colours of 16 bits without transparency, in a file that isn't decoded yet."""
    tiles = getattr(image, "tile", None) or ()
    # the order of bytes in the file, such as "RGB;16B"
    return image.mode == "RGB" and any("RGB;16" in str(tile.args) for tile in tiles)
