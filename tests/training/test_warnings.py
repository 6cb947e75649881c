"""What is said before a run starts: each once, with the values, and nothing of a run that is as it
should be."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.conftest import TINY_RUN, Launcher

PHOTOS = [
    "data.name=folder",
    "data.image_size=16",
    "model.patch_size=8",
    "train.batch_size=16",
    "train.epochs=1",
]


def write_photos(folder: Path, *, counts: tuple[int, int], size: int = 24, seed: int = 0) -> None:
    """Parts of scikit-learn's two photographs, a class of each."""
    rng = np.random.default_rng(seed)
    for name, count, pixels in zip(
        ("china", "flower"), counts, load_sample_images().images, strict=True
    ):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            top, left = rng.integers(0, (pixels.shape[0] - size, pixels.shape[1] - size))
            part = Image.fromarray(pixels[top : top + size, left : left + size])
            part.save(folder / name / f"{number}.jpg", quality=90)


def list_warnings(cli: Launcher, tmp_path: Path, yaml: Path, *overrides: str) -> list[str]:
    settings = [
        text
        for text in TINY_RUN
        if not text.startswith(("data", "model.patch", "train.batch", "train.epochs"))
    ]
    arguments = [*settings, *PHOTOS, f"data.root={tmp_path / 'photos'}", *overrides, "--dry-run"]
    lines = cli.succeed("train", yaml, *arguments, "--output", tmp_path / "run").err.splitlines()
    return [line for line in lines if line.startswith("warning: ")]


def test_each_condition_is_one_sentence(cli: Launcher, tmp_path: Path, empty_yaml: Path) -> None:
    write_photos(tmp_path / "photos" / "train", counts=(72, 12))
    write_photos(tmp_path / "photos" / "val", counts=(30, 30), seed=1)
    found = list_warnings(cli, tmp_path, empty_yaml, "data.image_size=64", "model.patch_size=16")
    assert len(found) == 1
    assert "val is the test split" in found[0]
