"""Images of more than 8 bits a channel: their values, and how these become RGB pixels. The package
pydicom reads those of DICOM files (the extra "dicom")."""

import importlib.util
from functools import cache
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

DICOM_SUFFIX = ".dcm"
DICOM_HINT = "pip install '.[dicom]' in the clone of vit reads .dcm"
# rows that are scaled at once: float64 takes much memory
_ROWS = 256
# a small file may hold very many pixels
_MAX_PIXELS = 100_000_000


def check_size(size: tuple[int, int]) -> None:
    """Raise ValueError if an image of this width and height would take too much memory."""
    if size[0] * size[1] > _MAX_PIXELS:
        text = f"it has {size[0]:,} x {size[1]:,} pixels, more than {_MAX_PIXELS:,}"
        raise ValueError(f"{text}; reduce or divide it")


class DeepImage(Image.Image):
    """An upright image with more than 8 bits a channel: RGB pixels, and the values behind them,
    integers or floats [H, W] or [H, W, 3], which `Preprocess` scales by the model's range. The RGB
    pixels are scaled by the image's own range."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.values = values
        low, high = find_extremes(values)
        self.__dict__.update(vars(self.scale(low, high if high > low else low + 1)))

    def scale(self, low: float, high: float) -> Image.Image:
        """Return RGB pixels in which values from low to high are black to white; NaN is black."""
        pixels = np.empty(self.values.shape, dtype=np.uint8)
        for top in range(0, len(pixels), _ROWS):
            band = self.values[top : top + _ROWS].astype(np.float64)
            scaled = np.nan_to_num((band - low) / (high - low) * 255, nan=0.0)
            pixels[top : top + _ROWS] = np.rint(np.clip(scaled, 0, 255))
        return Image.fromarray(pixels).convert("RGB")


def find_extremes(values: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest finite value; zeros if there is none."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def is_deep(image: Any) -> bool:
    """Return true for more than 8 bits a channel; for colours only before the file is decoded."""
    return image.mode == "F" or image.mode.startswith("I") or _has_deep_colours(image)


def read_deep(image: Any) -> DeepImage:
    """Read an image of `is_deep`, in memory or not decoded yet. Raises ValueError if it is
    damaged."""
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
    values = np.asarray(ImageOps.exif_transpose(image))
    # BitsPerSample and SampleFormat of TIFF: Pillow reads unsigned numbers of 32 bits as signed
    tags = getattr(image, "tag_v2", {})
    if tags.get(258) == (32,) and tags.get(339, (1,)) == (1,):
        values = values.view(np.uint32)
    # GDAL's missing pixels; NaN for a text that is no number
    if missing := tags.get(42113):
        values = np.where(values == float(np.genfromtxt([missing], delimiter="\n")), np.nan, values)
    return DeepImage(values.astype(values.dtype.newbyteorder("=")))


def _has_deep_colours(image: Any) -> bool:
    """Return true for colours of 16 bits without transparency, in a file that isn't decoded yet."""
    # the order of bytes in the file, such as "RGB;16B"
    tiles = getattr(image, "tile", ())
    return image.mode == "RGB" and any("RGB;16" in str(tile.args) for tile in tiles)


@cache
def has_dicom() -> bool:
    """Return true if the package for it is installed."""
    return importlib.util.find_spec("pydicom") is not None


def is_dicom(file: BinaryIO) -> bool:
    """Return true if an opened file begins like DICOM."""
    file.seek(128)
    is_marked = file.read(4) == b"DICM"
    file.seek(0)
    return is_marked


def read_dicom(file: BinaryIO) -> Image.Image:
    """Read the first frame, with its rescale slope and intercept, clipped to its first window. For
    broken bytes and colours of more than 8 bits, pydicom and Pillow raise errors of nearly any
    type."""
    if not has_dicom():
        raise ValueError(f"it is DICOM; {DICOM_HINT}")
    import pydicom
    from pydicom.pixels.utils import pixel_array

    dataset = pydicom.dcmread(file)
    check_size((dataset.Columns, dataset.Rows))
    # colours are converted to RGB
    stored = pixel_array(dataset, index=0)
    if stored.ndim == 3:
        return Image.fromarray(stored)

    slope = float(dataset.get("RescaleSlope") or 1)
    intercept = float(dataset.get("RescaleIntercept") or 0)
    is_whole = slope.is_integer() and intercept.is_integer()
    values = (stored * slope + intercept).astype(np.int32 if is_whole else np.float32)
    # the smallest and the largest value that could be stored, or those of the first window
    least = -(2 ** (dataset.BitsStored - 1)) if dataset.PixelRepresentation else 0
    ends = [least * slope + intercept, (least + 2**dataset.BitsStored - 1) * slope + intercept]
    # one number, or several windows
    centres, widths = (np.ravel(dataset.get(f"Window{name}") or []) for name in ("Center", "Width"))
    if len(centres) and len(widths) and widths[0] > 1:
        # the linear function of DICOM PS3.3 C.11.2.1.2
        width = float(widths[0]) - 1
        low = float(centres[0]) - 0.5 - width / 2
        ends = [low, low + width]
        values = np.clip(values.astype(np.float32), *ends)
    # large values are dark
    if dataset.PhotometricInterpretation == "MONOCHROME1":
        values = (sum(ends) - values).astype(values.dtype)
    return DeepImage(values)
