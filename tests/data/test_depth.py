"""Images of more than 8 bits a channel are scaled by one range, that of the training images."""

import struct
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset, ImageRule
from vit.data.depth import DeepImage
from vit.data.images import read_image
from vit.data.open import open_dataset, open_passed
from vit.data.preprocess import Preprocess
from vit.data.statistics import choose_value_range, measure_value_range

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
EIGHT_BITS = np.rint(RAMP / 4095 * 255).astype(np.uint8)


def write(folder: Path, *images: np.ndarray, suffix: str = "png", **options: Any) -> ImageDataset:
    """Write each image into each of two classes."""
    for name in ("ant", "bee"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, values in enumerate(images):
            Image.fromarray(values).save(folder / name / f"{number}.{suffix}", **options)
    return open_dataset("folder", root=folder).split("all")


def scale(dataset: ImageDataset, index: int = 0) -> np.ndarray:
    """Return the first channel of an image as a model sees it that was trained on these images."""
    value_range = measure_value_range(dataset)
    height, width = np.asarray(dataset.image(index)).shape[:2]
    pixels = Preprocess((height, width), value_range=value_range).to_uint8(dataset.image(index))
    return pixels[..., 0]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_twelve_bits_fill_the_range_wherever_they_are_in_sixteen(
    tmp_path: Path, suffix: str
) -> None:
    low = write(tmp_path / "low", RAMP, suffix=suffix)
    high = write(tmp_path / "high", RAMP * 16, suffix=suffix)
    assert measure_value_range(low) == (0, 4095)
    assert measure_value_range(high) == (0, 65520)
    np.testing.assert_array_equal(scale(low), EIGHT_BITS)
    np.testing.assert_array_equal(scale(high), EIGHT_BITS)


def test_eight_bits_have_no_range_and_nan_is_black(tmp_path: Path) -> None:
    assert measure_value_range(write(tmp_path / "eight", EIGHT_BITS)) is None
    # a dark image doesn't change the others
    mixed = write(tmp_path / "mixed", EIGHT_BITS, RAMP // 100, RAMP)
    np.testing.assert_array_equal(scale(mixed, 0), EIGHT_BITS)
    assert scale(mixed, 1).max() == round(40 / 4095 * 255)
    values = (RAMP / 4095).astype(np.float32)
    values[0, 5:7] = np.nan, np.inf
    dataset = write(tmp_path / "floats", values, suffix="tif")
    assert measure_value_range(dataset) == (0, 1)
    assert scale(dataset)[0, 5:8].tolist() == [0, 255, 0]


@pytest.mark.parametrize(
    ("missing", "values"),
    [
        ("-9999", (RAMP / 8190).astype(np.float32)),
        ("-3.4028234663852886e+38", (RAMP / 8190).astype(np.float32)),
        ("-9999", RAMP.astype(np.int32)),
        ("65535", RAMP),
    ],
)
def test_values_that_a_geotiff_names_as_missing_are_black_and_no_part_of_the_range(
    tmp_path: Path, missing: str, values: np.ndarray
) -> None:
    values = values.copy()
    values[:8] = float(missing)
    dataset = write(tmp_path, values, suffix="tif", tiffinfo={42113: missing})
    low, high = measure_value_range(dataset) or (0, 0)
    assert 0 <= low < high <= 4095
    pixels = scale(dataset)
    assert (pixels[:8] == 0).all()
    assert len(np.unique(pixels[8:])) > 100


@pytest.mark.parametrize("text", ["none", "", "nan", "1 2"])
def test_a_geotiff_that_names_no_number_as_missing_keeps_its_values(
    tmp_path: Path, text: str
) -> None:
    dataset = write(tmp_path, RAMP, suffix="tif", tiffinfo={42113: text})
    assert measure_value_range(dataset) == measure_value_range(write(tmp_path, RAMP, suffix="png"))


@pytest.mark.parametrize(
    ("low", "high", "bits", "expected"),
    [
        # hundredths of a kelvin: 0 to 32767 would leave 31 levels
        (27315, 31100, 0x7FFF, (27315, 31100)),
        (7, 7, 7, (7, 8)),
        (0.2, 0.9, None, (0, 1)),
        (280.5, 310.25, None, (280.5, 310.25)),
    ],
)
def test_the_range_is_that_of_the_bits_in_use(
    low: float,
    high: float,
    bits: int | None,
    expected: tuple[float, float],
) -> None:
    assert choose_value_range(low, high, bits=bits) == expected


def build_tiff(
    content: bytes, shape: tuple[int, int], *, bits: int, kind: int = 1, bands: int = 1
) -> bytes:
    """Return a TIFF that Pillow doesn't write, of one grey band or of three colours, one after the
    other. `kind` is its SampleFormat."""
    height, width = shape
    tags = {
        256: width, 257: height, 258: bits, 259: 1, 262: 1 + (bands > 1), 273: 8, 277: bands,
        278: height, 279: len(content), 284: 1 + (bands > 1), 339: kind,
    }  # fmt: skip
    header = struct.pack("<2sHI", b"II", 42, 8 + len(content))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return header + content + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(
    ("values", "value_range"),
    [
        ((RAMP.astype(np.int16) - 1024), (-1024, 3071)),
        ((RAMP.astype(np.uint32) * 2**20), (0, 4095 * 2**20)),
        ((RAMP / 4095 * 30 + 280).astype(np.float32), (280, 310)),
    ],
)
def test_negative_long_and_floating_point_values(
    tmp_path: Path, values: np.ndarray, value_range: tuple[float, float]
) -> None:
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        content = build_tiff(
            values.tobytes(), values.shape, bits=8 * values.dtype.itemsize, kind=kind
        )
        (tmp_path / name / "0.tif").write_bytes(content)
    dataset = open_dataset("folder", root=tmp_path).split("all")
    assert measure_value_range(dataset) == pytest.approx(value_range)
    low, high = value_range
    expected = np.rint((values.astype(np.float64) - low) / (high - low) * 255)
    assert np.abs(scale(dataset).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_colours_of_sixteen_bits_keep_all_of_them(tmp_path: Path, suffix: str) -> None:
    """Pillow would keep the high bytes alone."""
    colours = np.stack([RAMP, RAMP[::-1], RAMP.T], axis=-1)
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        # compressed; OpenCV's order is blue, green, red
        cv2.imwrite(str(tmp_path / name / f"0.{suffix}"), colours[..., ::-1])
    dataset = open_dataset("folder", root=tmp_path).split("all")
    image = dataset.image(0)
    assert isinstance(image, DeepImage)
    np.testing.assert_array_equal(image.values, colours)
    assert np.abs(np.asarray(image).astype(int) - (colours >> 4)).max() <= 1
    assert measure_value_range(dataset) == (0, 4095)
    np.testing.assert_array_equal(scale(dataset), EIGHT_BITS)


def test_bands_of_sixteen_bits_that_lie_one_after_the_other_are_refused(tmp_path: Path) -> None:
    tiff = build_tiff(bytes(8 * 8 * 3 * 2), (8, 8), bits=16, bands=3)
    (tmp_path / "a.tif").write_bytes(tiff)
    with pytest.raises(ValueError, match="bands of 16 bits lie one after the other"):
        read_image(tmp_path / "a.tif")


def test_a_deep_image_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(RAMP).save(tmp_path / "turned.png", exif=exif)
    image = read_image(tmp_path / "turned.png")
    assert isinstance(image, DeepImage)
    np.testing.assert_array_equal(image.values, np.rot90(RAMP, -1))


def test_arrays_from_python_have_a_range() -> None:
    for values, value_range in (
        (np.stack([RAMP] * 4), (0, 4095)),
        # from 0 to 1, as torchvision's tensors are
        (np.stack([RAMP] * 4) / 4095, None),
        (np.stack([RAMP] * 4) / 10 - 204.75, (-204.75, 204.75)),
        (np.stack([np.stack([RAMP] * 3, axis=-1)] * 4).astype(np.int32) - 2000, (-2000, 2095)),
    ):
        items = list(zip(values, [0, 1, 0, 1], strict=True))
        dataset = open_passed(items, rule=ImageRule()).split("all")
        assert measure_value_range(dataset) == value_range
        np.testing.assert_array_equal(scale(dataset), EIGHT_BITS)


def test_a_model_of_eight_bits_refuses_deeper_images(tmp_path: Path) -> None:
    """Divided by 257, 12 bits would leave 17 grey levels."""
    Image.fromarray(RAMP).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match="trained on images of 8 bits; save it with 8 bits"):
        Preprocess((64, 64)).to_uint8(read_image(tmp_path / "deep.png"))


def test_pixels_of_another_range_are_decoded_anew(tmp_path: Path) -> None:
    dataset = write(tmp_path, RAMP)
    for high in (4095.0, 2047.0):
        preprocess = Preprocess((16, 16), value_range=(0.0, high))
        pixels = decode_dataset(dataset, preprocess).pixels
        assert pixels is not None
        np.testing.assert_array_equal(pixels[0], preprocess.to_uint8(dataset.image(0)))
