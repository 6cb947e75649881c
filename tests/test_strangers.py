"""A report on the model file of a stranger shows no photos of this machine; on the user's own it
does."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit
from tests.browser import name_training_photos
from tests.conftest import SaveModel, hash_images
from vit.bundle import Bundle
from vit.data.open import open_dataset

CLASSES = ("ant", "bee")


def save_photos(folder: Path, *, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    names = [f"{name}/{number}.png" for name in CLASSES for number in range(10)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / name)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strangers")
    save_photos(folder / "private", seed=0)
    # what the stranger trained on has the same names
    save_photos(folder / "elsewhere", seed=1)
    return folder


def save_trained(folder: Path, save_model: SaveModel, *, on: str) -> Bundle:
    """A model file that names the folder "private" and was trained on the images in `on`."""
    train = open_dataset("folder", root=folder / on).split("train")
    config = {"data": {"name": "folder", "root": str(folder / "private")}}
    path = save_model(
        folder / f"{on}.safetensors",
        class_names=CLASSES,
        config=config,
        training_hashes=hash_images(folder / on / name for name in train.ids),
    )
    names = [(name, label) for name, label in zip(train.ids, train.labels.tolist(), strict=True)]
    features = np.random.default_rng(0).normal(size=(len(names), 24))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return name_training_photos(path, names, features)


@pytest.fixture(scope="module")
def stranger(folder: Path, save_model: SaveModel) -> Bundle:
    return save_trained(folder, save_model, on="elsewhere")


@pytest.fixture(scope="module")
def own(folder: Path, save_model: SaveModel) -> Bundle:
    return save_trained(folder, save_model, on="private")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Image.Image]:
    """The training photos whose pictures were put into a page or an answer."""
    pictures: list[Image.Image] = []

    def encode(photo: Image.Image, *, side: int) -> str:
        pictures.append(photo)
        return "data:image/jpeg;base64,"

    monkeypatch.setattr("vit.evaluation.report.training_photos.encode_photo", encode)
    return pictures


def report(bundle: Bundle, photo: Path, output: Path) -> None:
    # its labels are noise, so there are errors
    result = vit.evaluate(bundle, data=photo.parents[1])
    assert not result.scores.correct.all()
    result.save(output)


def test_pictures_of_training_photos_are_shown_if_their_pixels_are_recorded(
    folder: Path,
    stranger: Bundle,
    own: Bundle,
    shown: list[Image.Image],
    tmp_path: Path,
) -> None:
    photo = folder / "elsewhere/ant/0.png"
    report(stranger, photo, tmp_path / "stranger")
    assert not shown
    report(own, photo, tmp_path / "own")
    assert shown
