"""A run on images of more than 8 bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

import vit
from vit.bundle import load_bundle

TINY: dict[str, Any] = {
    "model": {"patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "train": {"batch_size": 64, "epochs": 2, "device": "cpu", "precision": "float32"},
}


def write_digits(folder: Path, *, top: int, count: int = 20, more: int = 0) -> Path:
    """Write digits of each class as files in which white is `top`; noise up to `more`."""
    digits = load_digits()
    random = np.random.default_rng(0)
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
        for number, image in enumerate(digits.images[digits.target == label][:count]):
            values = np.rint(image * top / 16) + random.integers(0, more + 1, image.shape)
            values = np.clip(values, 0, top).astype(np.uint8 if top < 256 else np.uint16)
            Image.fromarray(values).save(folder / str(label) / f"{number:03d}.png")
    return folder


def train(folder: Path, output: Path, **data: Any) -> Path:
    data = {"name": "folder", "root": str(folder), "image_size": 8} | data
    vit.train(TINY | {"data": data}, output=output)
    return output


@pytest.mark.extended
def test_a_copy_of_twelve_bits_trains_to_the_same_weights(tmp_path: Path) -> None:
    runs = [
        train(write_digits(tmp_path / str(top), top=top), tmp_path / f"run{top}")
        for top in (255, 4095)
    ]
    eight, twelve = (load_file(run / "model.safetensors") for run in runs)
    assert eight.keys() == twelve.keys()
    for name, values in eight.items():
        np.testing.assert_array_equal(twelve[name], values, err_msg=name)
    bundles = [load_bundle(run) for run in runs]
    assert bundles[0].preprocess.value_range is None
    assert bundles[1].preprocess.value_range == (0, 4095)
    assert bundles[0].data["splits"] == bundles[1].data["splits"]

    # another folder than the training's, of which no image reaches the range
    dark = write_digits(tmp_path / "dark", top=1000, count=3)
    assert vit.evaluate(bundles[1], data=dark).evaluation.num_images == 30
