"""Prediction reads what training reads, with or without labels: the same pixels from every form."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit.data.images import read_image
from vit.prediction.predict import list_inputs
from vit.prediction.predictor import _open_image

_COUNT = 5


def grey(number: int) -> Image.Image:
    return Image.new("RGB", (8, 6), (number * 40,) * 3)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Grey photos 0 to 4; the third is broken."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(_COUNT):
        grey(number).save(folder / f"{number}.png")
    (folder / "2.png").write_bytes(b"no image")
    return folder


def read(images: Any) -> list[tuple[str, int | None]]:
    """The name and the grey of each image; None for one that can't be read."""
    found = []
    for name, image in list_inputs(images):
        try:
            if isinstance(image, str):
                image = read_image(Path(image))
            pixels = _open_image(name, image)
            found.append((name, round(np.asarray(pixels).mean() / 40)))
        except (ValueError, OSError):
            found.append((name, None))
    return found


def write_table(photos: Path, suffix: str, labels: str) -> Path:
    rows = [(f"{number}.png", "cat") for number in (*range(_COUNT), 9)]
    path = photos / f"table{suffix}"
    sign = ";" if suffix == ".csv" else "\t"
    lines = [("image", labels), *rows]
    path.write_text("".join(f"{sign.join(row[: 1 + bool(labels)])}\n" for row in lines))
    return path


EXPECTED = [0, 1, None, 3, 4]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("labels", ["label", ""])
def test_tables_with_and_without_labels(photos: Path, suffix: str, labels: str) -> None:
    table = write_table(photos, suffix, labels)
    found = read(table)
    assert [grey for _, grey in found] == [*EXPECTED, None]
    assert [name for name, _ in found[:_COUNT]] == [
        str(photos / f"{number}.png") for number in range(_COUNT)
    ]


def test_paths_and_images_in_memory_are_mixed(photos: Path) -> None:
    assert read([grey(3), str(photos / "1.png"), np.asarray(grey(4))]) == [
        ("image 0", 3), (str(photos / "1.png"), 1), ("image 2", 4),
    ]  # fmt: skip
