"""The nearest training photos on pages: named as in the model file, drawn from the training folder
alone."""

import base64
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.browser import NASTY_CLASS, name_training_photos
from tests.conftest import SaveModel, hash_images
from vit.bundle import Bundle
from vit.data.images import read_image
from vit.evaluation.report.training_photos import Neighbour, find_training_photos

SIDE = 60


def decode_picture(address: str | None) -> Image.Image:
    assert address is not None
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def find(bundle: Bundle, pixels: list[np.ndarray], *classes: int) -> list[list[Neighbour]]:
    return find_training_photos(bundle, pixels, [classes or (0, 1) for _ in pixels], side=SIDE)


def read_pixels(bundle: Bundle, name: str) -> np.ndarray:
    photo = read_image(Path(bundle.config["data"]["root"]) / name)
    return bundle.preprocess.to_uint8(photo)


def test_of_each_class_the_nearest_is_found(named_bundle: Bundle) -> None:
    named = named_bundle.metadata["conformal"]["training_images"]
    for name, label in named:
        pixels = [read_pixels(named_bundle, name)]
        # the photo itself; of class 5 the file has none
        ((own,),) = find(named_bundle, pixels, label, 5)
        assert (own.path, own.class_name) == (name, named_bundle.class_names[label])
        assert own.similarity == pytest.approx(1, abs=1e-3)
        ((other,),) = find(named_bundle, pixels, 1 - label)
        assert other.class_name == named_bundle.class_names[1 - label]
        assert other.similarity < 0.999
        assert other.picture not in (None, own.picture)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "ant/../../secret.png",
        "./ant/in.png",
        "ABSOLUTE",
        "ant/gone.png",
    ],
)
def test_a_name_is_never_opened_as_a_path(
    save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    photos = tmp_path / "photos"
    for path in ("photos/ant/in.png", "photos/bee/in.png", "secret.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), "red").save(tmp_path / path)
    if name == "ABSOLUTE":
        name = str(tmp_path / "secret.png")
    # of a file of class names that isn't there training would tell
    data = {"name": "folder", "root": str(photos), "class_names": str(tmp_path / "words.txt")}
    model = save_model(
        tmp_path / "m.safetensors",
        class_names=("ant", "bee"),
        config={"data": data},
        training_hashes=hash_images(tmp_path.rglob("*.png")),
    )
    bundle = name_training_photos(model, [(name, 0), ("bee/in.png", 1)], np.ones((2, 24)))

    opened: list[Path] = []

    def record(path: Path, **options: Any) -> Image.Image:
        opened.append(path)
        return read_image(path, **options)

    monkeypatch.setattr("vit.data.sources.base.read_image", record)
    ((hostile, good),) = find(bundle, [np.zeros((16, 16, 3), "u1")])
    assert (hostile.path, hostile.picture) == (name, None)
    assert good.picture is not None
    assert opened == [photos / "bee" / "in.png"]


def test_a_table_that_names_other_folders_is_not_followed(
    save_model: SaveModel, tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (20, 20), "red").save(tmp_path / "secret.png")
    Image.new("RGB", (20, 20), "red").save(photos / "in.png")
    (photos / "labels.csv").write_text("path,label\n../secret.png,ant\nin.png,bee\n")
    config = {"data": {"name": "folder", "root": str(photos)}}
    model = save_model(
        tmp_path / "m.safetensors",
        class_names=("ant", "bee"),
        config=config,
        training_hashes=hash_images(tmp_path.rglob("*.png")),
    )
    bundle = name_training_photos(model, [("../secret.png", 0)], np.ones((1, 24)))
    ((found,),) = find(bundle, [np.zeros((16, 16, 3), "u1")], 0)
    assert found.picture is None


def test_names_are_told_where_the_folder_is_gone_or_would_be_downloaded(
    named_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = named_bundle.metadata["conformal"]["training_images"]
    pixels = [read_pixels(named_bundle, named[0][0])]

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it would be downloaded")

    for data in (
        {"name": "folder", "root": str(tmp_path / "gone")},
        {"name": "cifar10", "root": str(tmp_path)},
        {"name": "imagenette", "root": str(tmp_path)},
        {"name": "imagenette"},
        {"name": "webdataset", "root": "s3://bucket/shards"},
        {},
    ):
        bundle = replace(named_bundle, config={"data": data})
        with monkeypatch.context() as patch:
            patch.setattr("socket.getaddrinfo", refuse)
            ((first, _),) = find(bundle, pixels)
        assert (first.path, first.picture) == (named[0][0], None)

    # another image lies there now, as where the file of a stranger names a folder of this machine
    photos = tmp_path / "photos"
    shutil.copytree(named_bundle.config["data"]["root"], photos)
    bundle = replace(named_bundle, config={"data": {"name": "folder", "root": str(photos)}})
    place = photos / named[0][0]
    for change in (Image.new("RGB", (60, 40), "blue").save, lambda path: path.write_text("none")):
        change(place)
        ((first, second),) = find(bundle, pixels)
        assert (first.path, first.picture) == (named[0][0], None)
        assert second.picture is not None


def test_the_digits_come_with_scikit_learn(tiny_bundle: Bundle) -> None:
    height, width = tiny_bundle.preprocess.image_size
    pixels = [np.zeros((height, width, 3), "u1")]
    ((first,),) = find(tiny_bundle, pixels, 0)
    assert first.path.startswith("digits/")
    assert decode_picture(first.picture).size == (SIDE, SIDE)
    assert NASTY_CLASS not in first.class_name
    assert find(replace(tiny_bundle, likeness=None, metadata={}), pixels) == [[]]
