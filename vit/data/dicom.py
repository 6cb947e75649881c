"""DICOM files, which the package pydicom reads (the extra "dicom")."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, BinaryIO

import numpy as np

from vit.runtime.drive import is_drive_error

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


def read_dicom(
    file: BinaryIO, *, name: str, check_size: Callable[[tuple[int, int]], None]
) -> tuple[np.ndarray, tuple[float, float] | None, bool]:
    """Read the first frame, with its rescale slope and intercept, clipped to its first window.

    Args:
        file: The opened file.
        name: Its name, for messages.
        check_size: Function that raises ValueError for a (width, height) that is too large.

    Returns:
        Values [H, W] or uint8 [H, W, 3]; the range that the window or the stored bits give; and
        true if large values are dark (MONOCHROME1).

    Raises:
        ValueError: It can't be read.
    """
    if not has_dicom():
        raise ValueError(f"{name} can't be read as an image: it is DICOM; {DICOM_HINT}")
    import pydicom
    from pydicom.pixels.utils import pixel_array

    try:
        dataset = pydicom.dcmread(file)
        check_size((dataset.Columns, dataset.Rows))
        # colours are converted to RGB
        stored = pixel_array(dataset, index=0)
        if stored.ndim == 3:
            if stored.dtype != np.uint8:
                raise ValueError("its colours have more than 8 bits; save it with 8 bits")
            return stored, None, False
        return _rescale(dataset, stored)
    except Exception as error:
        if is_drive_error(error):
            raise
        # for broken bytes, the decoders raise errors of nearly any type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name} can't be read as an image: {reason}") from error


def _rescale(
    dataset: Any, stored: np.ndarray
) -> tuple[np.ndarray, tuple[float, float] | None, bool]:
    slope = float(dataset.get("RescaleSlope") or 1)
    intercept = float(dataset.get("RescaleIntercept") or 0)
    values = stored.astype(np.int32)
    bits = int(dataset.BitsStored)
    limits = None
    if bits < 16 and not dataset.PixelRepresentation:
        ends = intercept, intercept + slope * (2**bits - 1)
        limits = min(ends), max(ends)
    if slope == int(slope) and intercept == int(intercept):
        values = values * int(slope) + int(intercept)
    else:
        values = (values * slope + intercept).astype(np.float32)

    centre, width = (_first(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
    if centre is not None and width is not None and width > 1:
        # the linear function of DICOM PS3.3 C.11.2.1.2
        low = centre - 0.5 - (width - 1) / 2
        limits = low, low + width - 1
        values = np.clip(values.astype(np.float32), *limits)
    return values, limits, dataset.PhotometricInterpretation == "MONOCHROME1"


def _first(value: Any) -> float | None:
    """Return a number, or the first one of several."""
    if value is None or value == "":
        return None
    return float(value[0] if isinstance(value, Sequence) and not isinstance(value, str) else value)
