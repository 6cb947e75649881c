"""Exports are exact, repeatable and survive interruptions and bad images."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vit.data.images import Preprocess
from vit.explanation import explain_images
from vit.explanation.explain import ExplainedImage, Settings
from vit.explanation.items import items_from_files
from vit.explanation.methods.table import METHODS, MapOptions
from vit.explanation.render.overlay import FIXED_SHARES
from vit.explanation.render.write import Results, export_maps, load_results
from vit.model.vision_transformer import VisionTransformer

NAMES = ("cat", "<img src=x onerror=alert(1)>", "dog/wolf", "3", "été")


@dataclass
class SmallBundle:
    model: nn.Module
    preprocess: Preprocess
    class_names: tuple[str, ...] = NAMES
    sha256: str = "0" * 64
    name: str = "small"


@pytest.fixture(scope="module")
def bundle() -> SmallBundle:
    torch.manual_seed(0)
    model = VisionTransformer(img_size=16, patch_size=4, num_classes=5, embed_dim=24, depth=2, num_heads=3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return SmallBundle(model.eval(), Preprocess(image_size=(16, 16)))


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
        Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(folder / name)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 nothing")
    return [str(path) for path in folder.rglob("*.*")]


def export(bundle: SmallBundle, photos: list[str], output: Path, **choices: object) -> dict:
    output.mkdir()
    export_maps(bundle, items_from_files(photos), output, Settings(**{"batch_size": 2} | choices))
    return json.loads((output / "manifest.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_input_gives_the_same_bytes(bundle: SmallBundle, photos: list[str], tmp_path: Path) -> None:
    for name in ("first", "second"):
        export(bundle, photos, tmp_path / name, methods=("rollout", "gae"))
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert first.keys() == second.keys()
    assert first == second


def test_arrays_are_the_exact_maps(bundle: SmallBundle, photos: list[str], tmp_path: Path) -> None:
    manifest = export(bundle, photos, tmp_path / "out", batch_size=16)
    readable = [entry["path"] for entry in manifest["images"]]
    expected = explain_images(bundle, [Image.open(path).convert("RGB") for path in readable])
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        for entry, values in zip(manifest["images"], expected.maps, strict=True):
            assert arrays[entry["map_key"]].dtype == np.float32
            assert np.array_equal(arrays[entry["map_key"]], values.numpy())


def test_the_manifest_says_how_each_map_was_made(
    bundle: SmallBundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, photos, tmp_path / "out")
    assert manifest["schema_version"] == 1
    assert manifest["method"] == "rollout"
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
    assert (tmp_path / "out" / entry["overlay"]).is_file()
    found = entry["maps"][0]
    assert found["class_specific"] is False
    assert found["target"] is None
    assert 0 < found["prefix_mass"] < 1
    assert {"deletion_gap", "beaten", "scrambled_correlation", "warnings"} == found["trust"].keys()


def test_a_broken_image_is_named_and_the_rest_explained(
    bundle: SmallBundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, photos, tmp_path / "out")
    assert len(manifest["images"]) == 4
    (bad,) = manifest["unreadable"]
    assert bad["path"].endswith("broken.jpg")
    assert "broken.jpg" in bad["reason"]


def test_equal_stems_in_different_folders_do_not_collide(
    bundle: SmallBundle, photos: list[str], tmp_path: Path
) -> None:
    export(bundle, photos, tmp_path / "out", trust=False)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert names == ["a-one.rollout.png", "b-one.rollout.png", "two.rollout.png", "é.rollout.png"]


class Stop(Exception):
    """Ctrl-C, as far as the export is concerned."""


def interrupt_after(batches: int) -> Iterator[None]:
    for _ in range(batches):
        yield
    raise Stop


def test_an_interrupted_export_continues_where_it_was(
    bundle: SmallBundle, photos: list[str], tmp_path: Path
) -> None:
    export(bundle, photos, tmp_path / "whole", batch_size=1)
    settings, output, items = Settings(batch_size=1), tmp_path / "parts", items_from_files(photos)
    output.mkdir()
    countdown = interrupt_after(2)
    with pytest.raises(Stop):
        export_maps(bundle, items, output, settings, on_progress=lambda count: next(countdown))
    done = load_results(output, bundle, settings)
    assert 0 < len(done.entries) < 4
    rest = [item for item in items if item.path not in done.paths]
    seen: list[str] = []

    def note(explained: list[ExplainedImage]) -> None:
        seen.extend(of_image.item.path for of_image in explained)

    export_maps(bundle, rest, output, settings, done=done, on_batch=note)
    assert not set(seen) & {entry["path"] for entry in done.entries if entry["path"] not in seen}
    assert contents(output) == contents(tmp_path / "whole")


def test_continuing_with_other_settings_or_another_model_is_refused(
    bundle: SmallBundle, photos: list[str], tmp_path: Path
) -> None:
    export(bundle, photos, tmp_path / "out", trust=False)
    settings = Settings(batch_size=2, trust=False)
    assert len(load_results(tmp_path / "out", bundle, settings).entries) == 4
    with pytest.raises(ValueError, match="another choice of residual"):
        load_results(
            tmp_path / "out", bundle, Settings(batch_size=2, trust=False, maps=MapOptions(residual=0.4))
        )
    other = SmallBundle(bundle.model, bundle.preprocess, sha256="1" * 64)
    with pytest.raises(ValueError, match="another choice of the model"):
        load_results(tmp_path / "out", other, settings)
    assert load_results(tmp_path / "nothing", bundle, settings) == Results()


def test_class_targets_have_a_map_each_and_safe_names(
    bundle: SmallBundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(
        bundle, photos, tmp_path / "out", methods=("gae", "rollout"), classes="all", trust=False
    )
    entry = manifest["images"][2]
    maps = entry["maps"]
    assert [found["target"] and found["target"]["name"] for found in maps].count(None) == 1
    assert {found["target"]["name"] for found in maps if found["target"]} == set(NAMES)
    assert all((tmp_path / "out" / found["overlay"]).is_file() for found in maps)
    assert "two.gae._img src=x onerror=alert(1)_.png" in {found["overlay"] for found in maps}
    assert all(np.isfinite(found["logit"]) for found in maps if found["target"])


@pytest.mark.parametrize(
    ("classes", "count"), [("auto", 1), ("cat", 1), ("1", 1), ("3", 1), ("top3", 3), ("all", 5)]
)
def test_classes_are_named_as_people_do(
    bundle: SmallBundle, photos: list[str], tmp_path: Path, classes: str, count: int
) -> None:
    manifest = export(
        bundle, photos[:1] + photos[2:3], tmp_path / "out", methods=("gae",), classes=classes, trust=False
    )
    for entry in manifest["images"]:
        assert len(entry["maps"]) == count
        index = {"cat": 0, "1": 1, "3": 3}.get(classes, entry["predicted"]["index"])
        assert entry["maps"][0]["target"]["index"] == index


@pytest.mark.parametrize("target", ["wolf", "5", "top0", "top9", "-1"])
def test_an_unknown_class_lists_the_known_ones(bundle: SmallBundle, target: str) -> None:
    with pytest.raises(ValueError, match=r"unknown class|asks for"):
        explain_images(bundle, [Image.new("RGB", (16, 16))], "gae", target=target)


@pytest.mark.parametrize("scale", ["image", "batch", "fixed"])
def test_scales_are_of_what_they_say(
    bundle: SmallBundle, photos: list[str], tmp_path: Path, scale: str
) -> None:
    seen: list[ExplainedImage] = []
    (tmp_path / "out").mkdir()
    settings = Settings(scale=scale, trust=False, methods=("rollout", "cdam"))
    export_maps(bundle, items_from_files(photos), tmp_path / "out", settings, on_batch=seen.extend)
    for number, name in enumerate(settings.methods):
        signed = METHODS[name].signed
        found = [of_image.maps[number] for of_image in seen]
        for one in found:
            assert one.scale is not None
            values = np.stack([other.values for other in found]) if scale == "batch" else one.values
            high = np.abs(values).max() if signed else values.max()
            assert np.isclose(one.scale.high, FIXED_SHARES if scale == "fixed" else high)
            assert np.isclose(
                one.scale.low, -one.scale.high if signed else 0 if scale == "fixed" else values.min()
            )


def test_all_layers_and_heads_are_one_sheet(bundle: SmallBundle, photos: list[str], tmp_path: Path) -> None:
    manifest = export(
        bundle, photos, tmp_path / "out", methods=("raw",), maps=MapOptions(layer=None, head=None)
    )
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        assert arrays[manifest["images"][0]["map_key"]].shape == (2, 3, 4, 4)
    assert manifest["images"][0]["maps"][0]["trust"] is None


def test_an_unknown_scale_or_method_is_said_before_any_work() -> None:
    with pytest.raises(ValueError, match="unknown scale 'log'; known: image, batch, fixed"):
        Settings(scale="log")
    with pytest.raises(ValueError, match="unknown method 'lrp'"):
        Settings(methods=("lrp",))


def test_explaining_in_parts_gives_the_same_maps(bundle: SmallBundle) -> None:
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=np.uint8)) for _ in range(5)]
    whole, parts = explain_images(bundle, images, "gae"), explain_images(bundle, images, "gae", batch_size=2)
    assert (whole.maps - parts.maps).abs().max() < 1e-5
    assert torch.equal(whole.targets, parts.targets)
    assert whole.maps.shape == (5, 4, 4)
    with pytest.raises(ValueError, match="no images"):
        explain_images(bundle, [])


def test_half_precision_is_of_the_forward_pass_alone(
    bundle: SmallBundle, photos: list[str], tmp_path: Path
) -> None:
    seen: list[ExplainedImage] = []
    (tmp_path / "out").mkdir()
    settings = Settings(precision="bfloat16", trust=False, methods=("rollout", "gae"))
    export_maps(bundle, items_from_files(photos), tmp_path / "out", settings, on_batch=seen.extend)
    for of_image in seen:
        rollout = of_image.maps[0]
        assert abs(rollout.values.sum() / (1 - rollout.prefix_mass) - 1) < 1e-5  # bfloat16 would give 1e-3
