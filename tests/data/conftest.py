"""Small image folders and sources with known pixels."""

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit.data.dataset import ImageDataset
from vit.data.sources.base import ArrayReader

MakeFolder = Callable[..., Path]


def draw_pixels(seed: int, size: tuple[int, int] = (24, 32)) -> np.ndarray:
    """A smooth random picture [H, W, 3], so that JPEG and rescaling hardly change it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((size[1], size[0]), Image.Resampling.BICUBIC))


@pytest.fixture
def set_start_method() -> Iterator[Callable[[str], None]]:
    """Chooses how multiprocessing starts processes, until the test ends."""
    before = multiprocessing.get_start_method()
    yield partial(multiprocessing.set_start_method, force=True)
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """make_folder("train/cat/0.png", …) writes a picture in each place below a fresh root."""

    def make(*paths: str, root: str = "images", first_seed: int = 0) -> Path:
        for number, path in enumerate(paths):
            file = tmp_path / root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw_pixels(first_seed + number)).save(file)
        return tmp_path / root

    return make


@pytest.fixture
def array_source() -> ImageDataset:
    """Sixty random 12×10 pictures of three classes."""
    pixels = np.random.default_rng(7).integers(0, 256, (60, 12, 10, 3), dtype=np.uint8)
    return ImageDataset(
        name="arrays",
        class_names=("a", "b", "c"),
        labels=np.arange(60) % 3,
        ids=[f"train/{index:05d}" for index in range(60)],
        reader=ArrayReader(pixels),
    )
