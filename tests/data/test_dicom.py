"""DICOM files: stored values become those of the modality, within the window."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vit.data.depth import DeepImage
from vit.data.images import read_image
from vit.data.preprocess import Preprocess

pydicom = pytest.importorskip("pydicom")

STORED = np.arange(0, 4096, dtype=np.uint16).reshape(64, 64)


def write(path: Path, stored: np.ndarray, **elements: Any) -> Path:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = CTImageStorage
    dataset.SOPClassUID = CTImageStorage
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    is_colour = stored.ndim == 3
    dataset.Rows, dataset.Columns = stored.shape[:2]
    dataset.SamplesPerPixel = 3 if is_colour else 1
    if is_colour:
        dataset.PlanarConfiguration = 0
    dataset.PhotometricInterpretation = "RGB" if is_colour else "MONOCHROME2"
    dataset.BitsAllocated = 8 * stored.dtype.itemsize
    dataset.BitsStored = 8 if is_colour else 12
    dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    for name, value in elements.items():
        setattr(dataset, name, value)
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelData = stored.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def scale(path: Path, value_range: tuple[float, float]) -> np.ndarray:
    pixels = Preprocess((64, 64), value_range=value_range).to_uint8(read_image(path))
    return pixels[..., 0].astype(int)


def test_slope_and_intercept_give_the_values_of_the_modality(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", STORED, RescaleSlope=2, RescaleIntercept=-1024)
    image = read_image(path)
    assert isinstance(image, DeepImage)
    np.testing.assert_array_equal(image.values, 2 * STORED.astype(int) - 1024)
    signed = write(tmp_path / "b.dcm", STORED.astype(np.int16) - 2000, BitsStored=16)
    image = read_image(signed)
    assert isinstance(image, DeepImage)
    assert image.values.min() == -2000


def test_the_window_is_that_of_the_standard(tmp_path: Path) -> None:
    """PS3.3 C.11.2.1.2: y = ((x - (c - 0.5)) / (w - 1) + 0.5) * 255, clipped."""
    path = write(
        tmp_path / "a" / "a.dcm",
        STORED,
        RescaleSlope=1,
        RescaleIntercept=-1024,
        WindowCenter=[40, 300],
        WindowWidth=[400, 1500],
    )
    write(tmp_path / "b" / "b.dcm", STORED)
    hounsfield = STORED.astype(float) - 1024
    expected = np.clip(((hounsfield - 39.5) / 399 + 0.5) * 255, 0, 255)
    image = read_image(path)
    assert isinstance(image, DeepImage)
    assert np.abs(scale(path, (-160, 239)) - expected).max() <= 0.5 + 1e-9
    assert (image.values.min(), image.values.max()) == (-160, 239)


def test_monochrome1_is_white_at_zero(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", STORED, PhotometricInterpretation="MONOCHROME1")
    plain = write(tmp_path / "b.dcm", STORED)
    np.testing.assert_array_equal(scale(path, (0, 4095)), 255 - scale(plain, (0, 4095)))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", STORED)
    content = path.read_bytes()
    for length in (140, 400, len(content) - 100):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"a\.dcm can't be read as an image"):
            read_image(path)
