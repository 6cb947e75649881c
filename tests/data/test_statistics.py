"""Two samples of one population are alike; images that were made in another way are not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from vit.data.images import read_image
from vit.data.open import open_dataset
from vit.data.sets.source import ArrayReader, ImageSource
from vit.data.statistics import measure_sharpness, sample_statistics


def cut(count: int, *, seed: int, side: int = 96) -> list[Image.Image]:
    """Square parts of scikit-learn's two photographs."""
    rng, pictures = np.random.default_rng(seed), load_sample_images().images
    places = [(pictures[number % 2], *rng.integers(0, 300, 2)) for number in range(count)]
    return [Image.fromarray(pixels[top : top + side, left : left + side]) for pixels, top, left in places]


def build(images: list[Image.Image]) -> ImageSource:
    pixels = np.stack([np.asarray(image) for image in images])
    labels, ids = np.zeros(len(images), dtype=np.int64), [str(number) for number in range(len(images))]
    return ImageSource(name="parts", class_names=("a",), labels=labels, ids=ids, reader=ArrayReader(pixels))


def resize(images: list[Image.Image], how: Image.Resampling) -> ImageSource:
    return build([image.resize((48, 48), how) for image in images])


def compare(first: ImageSource, second: ImageSource) -> dict[str, Any]:
    return sample_statistics(first, count=200).compare(sample_statistics(second, count=200))


@pytest.mark.parametrize("seed", range(4))
def test_samples_of_one_population_are_alike(seed: int) -> None:
    first, second = (resize(cut(200, seed=2 * seed + half), Image.Resampling.BICUBIC) for half in (0, 1))
    assert compare(first, second) == {}


def test_splits_of_the_digits_are_alike() -> None:
    dataset = open_dataset("digits")
    assert compare(dataset.split("train"), dataset.split("test")) == {}


def test_another_filter_brightness_and_size_are_told_by_their_values() -> None:
    parts, others = cut(200, seed=0), cut(200, seed=1)
    bicubic = resize(parts, Image.Resampling.BICUBIC)
    found = compare(bicubic, resize(others, Image.Resampling.BILINEAR))
    assert list(found) == ["sharpness"]
    assert found["sharpness"][0] > found["sharpness"][1]
    darker = [image.point(lambda value: value // 2) for image in others]
    found = compare(bicubic, resize(darker, Image.Resampling.BICUBIC))
    assert list(found) == ["brightness"]
    assert found["brightness"][1] == pytest.approx(found["brightness"][0] / 2, rel=0.1)
    found = compare(bicubic, build([image.resize((64, 64), Image.Resampling.BICUBIC) for image in others]))
    assert found["size"] == (48, 64)


@pytest.mark.parametrize("quality", [30, 50, 75, 95])
def test_jpeg_quality_is_read_from_the_file(tmp_path: Path, quality: int) -> None:
    cut(1, seed=0)[0].save(tmp_path / "a.jpg", quality=quality)
    kind, found = read_image(tmp_path / "a.jpg").info["encoding"]
    assert (kind, found) == ("JPEG", pytest.approx(quality, abs=1))
    cut(1, seed=0)[0].save(tmp_path / "a.png")
    kind, found = read_image(tmp_path / "a.png").info["encoding"]
    assert kind == "PNG"
    assert np.isnan(found)


def test_sharpness_by_hand() -> None:
    checkers = np.indices((16, 16)).sum(axis=0) % 2 * 1.0
    assert np.isnan(measure_sharpness(checkers))  # at half the size nothing is left
    stripes = np.tile(np.repeat([0.0, 1.0], 2), (16, 4))
    # each pixel of a stripe 2 wide has one neighbour of the other stripe: 1; of a stripe 1 wide, at half the size: 2
    assert measure_sharpness(stripes) == pytest.approx(0.5)
    assert np.isnan(measure_sharpness(np.zeros((4, 4))))
