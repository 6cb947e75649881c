"""DICOM files, which the package pydicom reads (the extra "dicom")."""

import importlib.util
from functools import cache
from typing import BinaryIO

import numpy as np
from PIL import Image

from vit.data.depth import DeepImage, check_size

DICOM_SUFFIX = ".dcm"
DICOM_HINT = "pip install '.[dicom]' in the clone of vit reads .dcm"


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
