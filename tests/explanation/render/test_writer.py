"""Exports are exact, repeatable and survive bad images."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import SaveModel, save_noise
from vit.api import explain
from vit.bundle import Bundle, load_bundle
from vit.data.preprocess import Preprocess
from vit.explanation.records import ImageResult
from vit.explanation.render.overlay import blend

NAMES = ("cat", "<img src=x onerror=alert(1)>", "dog/wolf", "3", "été")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Bundle:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    return load_bundle(save_model(path, class_names=NAMES))


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """Four images of different sizes, two with the same stem, and a broken one."""
    folder = tmp_path / "photos"
    for name, size in {
        "a/one.png": (30, 20),
        "b/one.png": (20, 30),
        "two.jpg": (16, 16),
        "é.webp": (48, 64),
    }.items():
        save_noise(folder, [name], size=size)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 nothing")
    return sorted(str(path) for path in folder.rglob("*.*"))


@pytest.fixture
def readable(photos: list[str]) -> list[str]:
    return [path for path in photos if "broken" not in path]


def export(bundle: Bundle, photos: list[str], output: Path, **choices: object) -> dict:
    settings = {"methods": ("rollout",), "batch_size": 2} | choices
    explain(bundle, photos, output=output, **settings)
    return json.loads((output / "manifest.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_same_input_gives_the_same_bytes(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    formats = ("png", "npz", "html", "svg", "pdf")
    for name in ("first", "second"):
        export(bundle, photos[-2:-1], tmp_path / name, methods="gae", formats=formats)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    # figures have editable text
    (svg,) = (tmp_path / "first").glob("two.gae.svg")
    assert ">two</text>" in svg.read_text(encoding="utf-8")
    assert (tmp_path / "first" / "two.gae.pdf").read_bytes().startswith(b"%PDF-")


def test_a_written_result_is_the_one_in_memory(
    bundle: Bundle, readable: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, readable, tmp_path / "out", methods=("rollout", "gae"))
    found = explain(bundle, readable, methods=("rollout", "gae"), batch_size=2)
    assert found.maps["gae"].shape == (4, 4, 4)
    assert [image.path for image in found.images] == readable
    assert all(len(of_image) == 1 for of_image in found.checks["gae"])
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        for row, entry in enumerate(manifest["images"]):
            for described in entry["maps"]:
                values = arrays[described["map_key"]]
                assert values.dtype == np.float32
                assert np.array_equal(values, found.maps[described["method"]][row].numpy())
    for image in found.images:
        assert image.maps[1].target["index"] == image.probabilities.argmax()
        for result in image.maps:
            with Image.open(tmp_path / "out" / f"{result.key}.png") as written:
                expected = blend(
                    image.photo, result.values, image.geometry, signed=result.method.signed
                )
                assert np.array_equal(np.asarray(written), np.asarray(expected))
    with Image.open(tmp_path / "out" / "index.png") as sheet:
        # two rows of a photo and two maps beside each other, two below
        assert sheet.width == pytest.approx(6 * 230, abs=40)


def test_the_manifest_says_how_each_map_was_made(
    bundle: Bundle, photos: list[str], readable: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, photos, tmp_path / "out", methods=("gae",), target="dog/wolf")
    assert manifest["parameters"]["methods"] == ["gae"]
    assert manifest["parameters"]["target"] == "dog/wolf"
    assert manifest["model_sha256"] == bundle.sha256
    assert [entry["path"] for entry in manifest["images"]] == readable
    (bad,) = manifest["unreadable"]
    assert bad["path"].endswith("broken.jpg")
    assert "broken.jpg" in bad["reason"]
    first, second, *_ = manifest["images"]
    assert (first["name"], second["name"]) == ("a-one", "b-one")
    assert first["size"] == [20, 30]
    assert first["box"] == [0.0, 5.0, 20.0, 25.0]
    assert first["predicted"]["name"] == NAMES[first["predicted"]["index"]]
    assert 0 < first["predicted"]["probability"] <= 1
    (found,) = first["maps"]
    assert found["map_key"] == "a-one.gae.dog_wolf"
    assert (tmp_path / "out" / "a-one.gae.dog_wolf.png").is_file()
    assert found["target"]["name"] == "dog/wolf"
    assert found["caption"].startswith("evidence for dog/wolf")
    assert {"verdict", "reason", "p_value"} == found["sanity_check"].keys()


def test_an_unknown_option_is_refused(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="unknown option of gae 'heads'"):
        explain(bundle, Image.new("RGB", (16, 16)), methods="gae", map_options={"heads": 3})


def test_two_classes_of_one_file_name_have_maps_of_their_own(
    bundle: Bundle, readable: list[str], tmp_path: Path
) -> None:
    """Of three labels that are predicted."""
    named = replace(
        bundle, class_names=("a:b", "a?b", "A|b", "c", "d"), data={"task": "multilabel"}
    )
    point = {"rule": "f1", "thresholds": dict.fromkeys(named.class_names, 0.0)}
    named = replace(named, metadata={"operating_point": point})
    manifest = export(named, readable[:1], tmp_path / "out", methods=("gae",))
    maps = manifest["images"][0]["maps"]
    assert len({result["target"]["name"] for result in maps}) == 5
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        assert len({key.casefold() for key in arrays}) == 5
    assert len(list((tmp_path / "out").glob("*.gae.*.png"))) == 5


def test_a_model_that_is_nearly_sure_is_not_told_as_sure() -> None:
    geometry = Preprocess(image_size=(16, 16)).geometry((16, 16))
    told = {"index": 0, "name": "cat", "probability": 0.9998}
    image = ImageResult("cat.png", "cat", geometry, None, prediction=told)
    assert image.describe_prediction() == "predicted cat  99.98 %"


def test_a_notebook_shows_the_pictures_of_a_result(bundle: Bundle, readable: list[str]) -> None:
    explanations = explain(bundle, readable[:1], methods="rollout")
    with Image.open(io.BytesIO(explanations._repr_jpeg_())) as picture:
        difference = np.subtract(picture, explanations.draw_sheet(), dtype=np.int16)
    assert np.abs(difference).mean() < 3  # of 255: it is compressed
