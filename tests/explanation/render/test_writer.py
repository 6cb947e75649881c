"""Exports are exact, repeatable and survive interruptions and bad images."""

import io
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import IPython.display
import numpy as np
import pytest
import torch
from PIL import Image

from vit.api import explain
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.explanation.render.overlay import draw_overlay
from vit.model.vision_transformer import VisionTransformer

NAMES = ("cat", "<img src=x onerror=alert(1)>", "dog/wolf", "3", "été")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=4, num_classes=5, embed_dim=24, depth=2, num_heads=3
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return Bundle(
        model.eval(), Preprocess(image_size=(16, 16)), NAMES, name="small", sha256="0" * 64
    )


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """Five images of different sizes, two with the same stem, and a broken one."""
    folder = tmp_path / "photos"
    random = np.random.default_rng(0)
    for name, size in {
        "a/one.png": (20, 30),
        "b/one.png": (30, 20),
        "two.jpg": (16, 16),
        "é.webp": (64, 48),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(
            folder / name
        )
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 nothing")
    return sorted(str(path) for path in folder.rglob("*.*"))


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
    for name in ("first", "second"):
        export(bundle, photos, tmp_path / name, methods=("rollout", "gae"))
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert first.keys() == second.keys()
    assert first == second


def test_arrays_are_the_exact_maps(bundle: Bundle, photos: list[str], tmp_path: Path) -> None:
    manifest = export(bundle, photos, tmp_path / "out", batch_size=16)
    readable = [entry["path"] for entry in manifest["images"]]
    expected = explain(bundle, [Image.open(path).convert("RGB") for path in readable])
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        for entry, values in zip(manifest["images"], expected.maps["rollout"], strict=True):
            assert arrays[entry["maps"][0]["map_key"]].dtype == np.float32
            assert np.array_equal(arrays[entry["maps"][0]["map_key"]], values.numpy())


def test_the_manifest_says_how_each_map_was_made(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, photos, tmp_path / "out")
    assert manifest["schema_version"] == 6
    assert manifest["parameters"]["methods"] == ["rollout"]
    assert manifest["model_sha256"] == "0" * 64
    assert manifest["parameters"]["residual"] == 0.5
    assert [entry["path"] for entry in manifest["images"]] == sorted(
        path for path in photos if "broken" not in path
    )
    entry = manifest["images"][0]
    assert entry["path"].endswith("a/one.png")
    assert entry["size"] == [20, 30]
    assert entry["grid"] == [4, 4]
    assert entry["box"] == [0.0, 5.0, 20.0, 25.0]
    assert entry["predicted"]["name"] == NAMES[entry["predicted"]["index"]]
    assert 0 < entry["predicted"]["probability"] <= 1
    assert (tmp_path / "out" / entry["maps"][0]["overlay"]).is_file()
    found = entry["maps"][0]
    assert found["class_specific"] is False
    assert found["target"] is None
    numbers = {"agreement", "p_value", "alternatives", "patches"}
    assert {"verdict", "reason"} | numbers == found["sanity_check"].keys()


def test_a_broken_image_is_named_and_the_rest_explained(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, photos, tmp_path / "out")
    assert len(manifest["images"]) == 4
    (bad,) = manifest["unreadable"]
    assert bad["path"].endswith("broken.jpg")
    assert "broken.jpg" in bad["reason"]


def test_equal_stems_in_different_folders_do_not_collide(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    export(bundle, photos, tmp_path / "out", checks=False)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.rollout.png"))
    assert len({name.casefold() for name in names}) == 4
    assert {"a-one.rollout.png", "b-one.rollout.png"} <= set(names)


def test_class_targets_have_a_map_each_and_safe_names(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(
        bundle,
        photos,
        tmp_path / "out",
        methods=("gae", "rollout"),
        target="all",
        checks=False,
    )
    entry = manifest["images"][2]
    maps = entry["maps"]
    assert [found["target"] and found["target"]["name"] for found in maps].count(None) == 1
    assert {found["target"]["name"] for found in maps if found["target"]} == set(NAMES)
    assert all((tmp_path / "out" / found["overlay"]).is_file() for found in maps)
    assert f"{entry['name']}.gae._img src=x onerror=alert(1)_.png" in {
        found["overlay"] for found in maps
    }
    assert all(np.isfinite(found["score"]) for found in maps if found["target"])


@pytest.mark.parametrize("target", ["wolf", "5", "top0", "top9", "-1"])
def test_an_unknown_class_lists_the_known_ones(bundle: Bundle, target: str) -> None:
    with pytest.raises(ValueError, match=r"unknown class|asks for"):
        explain(bundle, Image.new("RGB", (16, 16)), methods="gae", target=target)


def test_a_notebook_shows_the_pictures_of_a_result(bundle: Bundle, photos: list[str]) -> None:
    explanations = explain(bundle, [path for path in photos if "broken" not in path])
    assert "4 images by libra-removal, rollout" in repr(explanations)
    sheet = explanations.draw_sheet()
    shown = explanations._repr_jpeg_()
    with Image.open(io.BytesIO(shown)) as picture:
        difference = np.subtract(picture, sheet, dtype=np.int16)
    assert np.abs(difference).mean() < 3  # of 255: it is compressed

    # a cell's result is a line, and a pickled result has the photos' maps without the model
    for value in (explanations.images[0], explanations.images[0].maps[-1]):
        assert len(repr(value)) <= 300
        assert repr(value).startswith(type(value).__name__)
    pickled = pickle.dumps(explanations)
    assert b"VisionTransformer" not in pickled
    assert pickle.loads(pickled).draw_sheet().tobytes() == sheet.tobytes()


def test_show_needs_a_notebook_or_a_screen(
    bundle: Bundle, photos: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    explanations = explain(bundle, photos[:1], methods="rollout")
    shown: list[object] = []
    monkeypatch.setattr(Image.Image, "show", lambda picture, title: shown.append(title))
    monkeypatch.setattr(IPython.display, "display", shown.append)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    with pytest.warns(UserWarning, match=r"no screen .*draw_sheet\(\).save"):
        explanations.show()
    assert shown == []
    monkeypatch.setenv("DISPLAY", ":0")
    explanations.show()
    assert shown == [repr(explanations)]
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    explanations.show()
    assert shown[1] is explanations


def test_a_result_holds_what_is_written(bundle: Bundle, photos: list[str], tmp_path: Path) -> None:
    readable = [path for path in photos if "broken" not in path]
    settings = {"methods": ("rollout", "gae"), "batch_size": 2}
    written = explain(bundle, readable, output=tmp_path / "written", **settings)
    in_memory = explain(bundle, readable, **settings)
    for found in (written, in_memory):
        assert found.maps["gae"].shape == (4, 4, 4)
        assert torch.equal(found.maps["gae"], in_memory.maps["gae"])
        assert found.targets.tolist() == found.probabilities.argmax(dim=1).tolist()
        assert [path.endswith("one.png") for path in found.paths] == [True, True, False, False]
        assert all(len(of_image) == 1 for of_image in found.checks["gae"])
    with pytest.raises(ValueError, match="unknown --format 'gif'; known: html, npz, pdf, png, svg"):
        explain(bundle, readable, output=tmp_path / "gif", formats=["gif"])
    assert not (tmp_path / "gif").exists()
    with pytest.raises(ValueError, match="unknown method 'lrp'"):
        explain(bundle, readable, methods="lrp")


def test_pictures_are_the_photo_and_the_map_beside_it(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    readable = [path for path in photos if "broken" not in path and "/b/" not in path]
    export(bundle, readable, tmp_path / "out", methods=("rollout", "gae"))
    for image in explain(bundle, readable, methods=("rollout", "gae")).images:
        for result in image.maps:
            with Image.open(tmp_path / "out" / f"{result.key}.png") as written:
                expected = draw_overlay(
                    image.photo, result.shown_values, image.geometry, signed=result.method.signed
                )
                assert np.array_equal(np.asarray(written), np.asarray(expected))
    with Image.open(tmp_path / "out" / "index.png") as sheet:
        # two rows of a photo and two maps beside each other, two below
        assert sheet.width == pytest.approx(6 * 230, abs=40)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    captions = [result["caption"] for result in manifest["images"][0]["maps"]]
    name = bundle.class_names[manifest["images"][0]["maps"][1]["target"]["index"]]
    assert captions[0].startswith("attention rollout (the same for every class)")
    assert captions[1].startswith(f"evidence for {name}")


def test_two_classes_of_one_file_name_have_maps_of_their_own(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    named = replace(bundle, class_names=("a:b", "a?b", "A|b", "c", "d"))
    export(named, photos[:1], tmp_path / "out", methods=("gae",), target="all")
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        assert len({key.casefold() for key in arrays}) == 5
    assert len(list((tmp_path / "out").glob("*.gae.*.png"))) == 5


def test_figures_have_editable_text_and_the_same_bytes_each_time(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    photo = [path for path in photos if path.endswith("two.jpg")]
    for name in ("one", "two"):
        explain(bundle, photo, output=tmp_path / name, methods="gae", formats=("svg", "pdf"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    (svg,) = (tmp_path / "one").glob("*.svg")
    text = svg.read_text(encoding="utf-8")
    assert ">two.jpg</text>" in text
    assert ">predicted " in text
    (pdf,) = (tmp_path / "one").glob("*.pdf")
    assert pdf.read_bytes().startswith(b"%PDF-")
    assert not (tmp_path / "one" / "index.png").exists()
