"""The images of a run: found once, split as said, prepared as the pretrained weights were."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import save_noise
from vit.config import load_config
from vit.data.preprocess import Preprocess
from vit.training.data import TrainingData, build_data, build_dataset

PRETRAINED = Preprocess(
    (16, 16), crop_pct=0.8, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), interpolation="bilinear"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """train/ and valid/ of two classes."""
    names = [f"train/{'ab'[number % 2]}/{number}.png" for number in range(40)]
    names += [f"valid/{'ab'[number % 2]}/{number}.png" for number in range(8)]
    save_noise(tmp_path / "images", names)
    return tmp_path / "images"


def build(root: Path, *overrides: str, pretrained: Preprocess | None = None) -> TrainingData:
    config = load_config(
        None, ["data.name=folder", f"data.root={root}", "data.image_size=8", *overrides]
    )
    return build_data(
        config, build_dataset(config), device=torch.device("cpu"), pretrained=pretrained
    )


@pytest.mark.extended
def test_pretrained_weights_bring_crop_interpolation_and_normalisation(root: Path) -> None:
    data = build(root, "model.init=timm:x", pretrained=PRETRAINED)
    assert data.preprocess == Preprocess(
        (8, 8), crop_pct=0.8, mean=PRETRAINED.mean, std=PRETRAINED.std, interpolation="bilinear"
    )
    assert data.train.pixels is not None
    # the cache holds what that preprocessing crops from
    expected = data.preprocess.to_uint8(data.train.image(3))
    np.testing.assert_array_equal(data.preprocess.crop(data.train.pixels[3]), expected)
    assert not np.array_equal(
        Preprocess((8, 8), crop_pct=0.8).to_uint8(data.train.image(3)), expected
    )


def test_without_pretrained_weights_the_training_images_are_measured(root: Path) -> None:
    data = build(root)
    assert (data.preprocess.crop_pct, data.preprocess.interpolation) == (1.0, "bicubic")
    assert data.train.pixels is not None
    pixels = np.asarray(data.train.pixels, dtype=np.float64) / 255
    np.testing.assert_allclose(data.preprocess.mean, pixels.mean(axis=(0, 1, 2)), atol=5e-5)
    np.testing.assert_allclose(data.preprocess.std, pixels.std(axis=(0, 1, 2)), atol=5e-5)


def test_twelve_bits_are_scaled_by_the_range_of_the_training_images(root: Path) -> None:
    for number, path in enumerate(sorted(root.rglob("*.png"))):
        values = np.random.default_rng(number).integers(0, 4096, (20, 24), dtype=np.uint16)
        Image.fromarray(values).save(path)
    data = build(root)
    assert data.preprocess.value_range == (0, 4095)
    assert data.train.pixels is not None
    expected = data.preprocess.to_uint8(data.train.image(3))
    np.testing.assert_array_equal(data.train.pixels[3], expected)


def test_the_main_process_decides_for_all_where_images_are_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherProcess:
        def broadcast(self, value: object) -> object:
            assert value == "resident"
            return "workers"

    monkeypatch.setattr("vit.training.data.current_process", OtherProcess)
    data = build(root)
    assert (data.config.data.pipeline, data.train.pixels) == ("workers", None)
