"""The Python interface: each function on tiny data, and what its result saves is what the command
writes."""

import importlib
import inspect
import json
import pkgutil
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from tests.conftest import Launcher, save_noise
from vit.bundle import Bundle
from vit.config import load_config
from vit.model.vision_transformer import VisionTransformer
from vit.training.recipe import find_recipe

ROOT = Path(__file__).parents[1]
FUNCTIONS = (
    "audit",
    "compare",
    "embed",
    "evaluate",
    "explain",
    "measure_faithfulness",
    "measure_robustness",
    "predict",
    "train",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    save_noise(folder, ("0.png", "1.png", "2.png"))
    return folder


@pytest.fixture(scope="module")
def pictures(photos: Path) -> list[Image.Image]:
    return [Image.open(path).convert("RGB") for path in sorted(photos.iterdir())]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# --- names
# -------------------------------------------------------------------------------------------------


def test_modules_hide_no_function() -> None:
    """A module that is imported becomes an attribute of its package, under its own name."""
    for module in pkgutil.walk_packages(vit.__path__, "vit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in FUNCTIONS:
        function = getattr(vit, name)
        assert inspect.isfunction(function), name
    for name in vit.__all__:
        getattr(vit, name)


def test_an_unknown_name_comes_with_the_known_ones() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'fit'; it has Bundle, .*VisionTransformer, .*train"
    ):
        _ = vit.fit  # type: ignore[attr-defined]
    assert set(FUNCTIONS) <= set(dir(vit)) == set(vit.__all__)


def test_recipes_are_found_by_name_and_packaged() -> None:
    assert find_recipe("cifar10/cpu") == ROOT / "configs" / "cifar10" / "cpu.yaml"
    assert find_recipe("own.yml") == Path("own.yml")
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert load_config(find_recipe(path.relative_to(ROOT / "configs").with_suffix("")))
    with pytest.raises(
        FileNotFoundError,
        match=r"cifar10/gpu is no configuration .*packaged recipes: .*cifar10/cpu",
    ):
        find_recipe("cifar10/gpu")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    assert wheel["force-include"]["configs"] == "vit/configs"


def test_the_page_of_the_api_names_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    named = set(re.findall(r"^::: vit\.(\w+)$", page, flags=re.MULTILINE))
    assert named == set(vit.__all__) - {"__version__"}


def test_the_help_of_a_function_fits_80_columns() -> None:
    """`help()` indents a docstring by four columns."""
    for name in vit.__all__:
        value = getattr(vit, name)
        if inspect.isfunction(value):
            lines = (inspect.getdoc(value) or "").splitlines()
            assert max(map(len, lines)) <= 76, (name, max(lines, key=len))


def test_every_public_name_says_how_it_is_used() -> None:
    for name in vit.__all__:
        value = getattr(vit, name)
        if callable(value):
            text = inspect.getdoc(value) or ""
            assert "Example:\n    >>> " in text, name
        if inspect.isfunction(value):
            assert name not in FUNCTIONS or ("Returns:" in text and "Raises:" in text), name
            for parameter in inspect.signature(value).parameters:
                assert f"    {parameter}: " in text, (name, parameter)


# --- evaluate and compare
# ----------------------------------------------------------------------------------


def plain(directory: Path) -> dict[str, Any]:
    """An evaluation without what depends on the moment."""
    found = json.loads((directory / "evaluation.json").read_text())
    found["conditions"] = {
        key: value for key, value in found["conditions"].items() if key not in ("time", "command")
    }
    return {key: value for key, value in found.items() if key != "model"}


def test_an_evaluation_saves_what_the_command_writes(
    tiny_run: Path, tmp_path: Path, cli: Launcher
) -> None:
    arguments = ("--precision", "float32", "--num-examples", 2, "--output", tmp_path / "command")
    cli.succeed("evaluate", tiny_run, *arguments)
    result = vit.evaluate(vit.load_bundle(tiny_run), precision="float32", num_examples=2)
    result.save(tmp_path / "saved")
    saved, written = contents(tmp_path / "saved"), contents(tmp_path / "command")
    assert saved.keys() == written.keys()
    assert plain(tmp_path / "saved") == plain(tmp_path / "command")
    assert saved["predictions.csv"] == written["predictions.csv"]
    with pytest.raises(FileExistsError, match="already holds files"):
        result.save(tmp_path / "saved")
    result.save(tmp_path / "saved", overwrite=True)


# --- predict and explain
# -----------------------------------------------------------------------------------


def test_predictions_save_the_lines_that_the_command_prints(
    tiny_run: Path, photos: Path, tmp_path: Path, cli: Launcher
) -> None:
    (tmp_path / "broken.png").write_bytes(b"not an image")
    vit.predict(tiny_run, [photos, tmp_path / "broken.png"]).save(tmp_path / "saved")
    printed = cli.succeed("predict", tiny_run, photos, tmp_path / "broken.png").out
    assert (tmp_path / "saved" / "predictions.jsonl").read_text() == printed
    assert "error" in json.loads(printed.splitlines()[-1])


def test_an_explanation_writes_what_the_command_writes(
    tiny_run: Path, photos: Path, tmp_path: Path, cli: Launcher
) -> None:
    methods = ("rollout", "gae")
    arguments = ["--method", ",".join(methods), "--format", "png,npz,html"]
    cli.succeed("explain", tiny_run, photos, *arguments, "--output", tmp_path / "command")
    formats = ("png", "npz", "html")
    found = vit.explain(
        tiny_run, photos, methods=methods, output=tmp_path / "function", formats=formats
    )
    with np.load(tmp_path / "command" / "maps.npz") as arrays:
        for method in methods:
            expected = np.stack([arrays[f"{number}.{method}"] for number in range(3)])
            assert np.array_equal(found.maps[method].numpy(), expected)
    assert contents(tmp_path / "function") == contents(tmp_path / "command")


def test_images_of_any_kind_have_the_same_maps(
    tiny_bundle: Bundle, photos: Path, pictures: list[Image.Image]
) -> None:
    expected = vit.explain(tiny_bundle, photos, checks=False).maps["rollout"]
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    for images in (sorted(photos.iterdir()), pictures, arrays, torch.from_numpy(arrays)):
        maps = vit.explain(tiny_bundle, images, checks=False).maps["rollout"]
        assert torch.equal(maps, expected)
    for image in (pictures[0], arrays[0], photos / "0.png"):
        (alone,) = vit.explain(tiny_bundle, image, checks=False).maps["rollout"]
        assert torch.allclose(alone, expected[0], atol=1e-6)


def test_a_module_comes_back_with_its_modes_and_flags(pictures: list[Image.Image]) -> None:
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=3
    ).train()
    model.blocks[1].eval()
    model.head.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    options = {"methods": ("rollout", "gae"), "checks": False}
    explanations = vit.explain(model, pictures, **options)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    predictions = vit.predict(model, pictures).predictions
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="unknown class 'owl'"):
        vit.explain(model, pictures, methods="gae", target="owl")
    with pytest.raises(ValueError, match="image"):
        vit.predict(model, [3])
    assert [module.training for module in model.modules()] == modes
    # a result's bundle holds that module
    assert vit.predict(explanations.bundle, pictures).predictions == predictions
    assert [module.training for module in model.modules()] == modes
