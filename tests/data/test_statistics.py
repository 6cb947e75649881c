"""What is measured of a sample of images before a run."""

from pathlib import Path

import numpy as np
from PIL import Image

from vit.data.dataset import ImageDataset
from vit.data.open import open_dataset
from vit.data.statistics import measure_mean_and_std, measure_sample


def write_images(root: Path, sizes: list[tuple[int, int]]) -> ImageDataset:
    """Images of these widths and heights, in two classes."""
    for number, size in enumerate(sizes):
        file = root / "ab"[number % 2] / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(file)
    return open_dataset("folder", root=root).split("all")


def test_the_shorter_side_is_the_median_of_those_that_can_be_read(tmp_path: Path) -> None:
    dataset = write_images(tmp_path, [(10, 20), (30, 20), (50, 40), (40, 60), (90, 90)])
    assert measure_sample(dataset, count=5) == (40, True)
    Image.new("RGB", (90, 90), "red").save(tmp_path / "a" / "04.png")
    assert measure_sample(dataset, count=5) == (40, False)
    (tmp_path / "a" / "04.png").write_text("not an image")
    assert measure_sample(dataset, count=5) == (30, True)


def test_the_standard_deviation_of_one_colour_is_not_zero() -> None:
    mean, std = measure_mean_and_std(np.full((2, 4, 4, 3), 51, dtype=np.uint8))
    assert mean == (0.2, 0.2, 0.2)
    assert std == (round(1 / 255, 4),) * 3
