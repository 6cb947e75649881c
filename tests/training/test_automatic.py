"""Images alone: the configuration is chosen for them, says why, and is one that could have been
written by hand."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

import vit.training.automatic as automatic
from tests.conftest import Launcher, SaveModel
from tests.recipe_step import RECIPE_NAMES
from vit.bundle import load_bundle
from vit.config import load_config
from vit.training import default_weights
from vit.training.automatic import choose_config
from vit.training.recipe import find_recipe

# photos start from pretrained weights otherwise
RANDOM = ["model.init=null"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two photographs of scikit-learn's, in 30 parts of 90 × 100 pixels each: two classes."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir()
        for number in range(30):
            top, left = rng.integers(0, (pixels.shape[0] - 90, pixels.shape[1] - 100))
            part = Image.fromarray(pixels[top : top + 90, left : left + 100])
            part.save(folder / name / f"{number}.jpg", quality=90)
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 of each of scikit-learn's digits, as files of 8 × 8 pixels."""
    folder, data = tmp_path_factory.mktemp("digits"), load_digits()
    for label in range(10):
        (folder / str(label)).mkdir()
        for number, pixels in enumerate(data.images[data.target == label][:40]):
            Image.fromarray(np.round(pixels * 255 / 16).astype(np.uint8)).save(
                folder / str(label) / f"{number}.png"
            )
    return folder


def test_one_word_trains_and_evaluates(cli: Launcher, digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    outcome = cli.succeed("train", digits, "-o", run, "--minutes", "0.02", "train.device=cpu")
    assert "8 (the images' own size)" in outcome.text
    assert "0.02 minutes (--minutes) on this CPU" in outcome.text
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert (written["data"]["name"], written["data"]["root"]) == ("folder", str(digits))
    cli.succeed("evaluate", run, "-o", tmp_path / "evaluation", "--device", "cpu")
    assert load_bundle(run).class_names == tuple("0123456789")
    # the same command goes on, whatever would be measured now; and the file is a configuration like
    # any other
    assert "resuming" in cli.succeed("train", digits, "-o", run, "--resume").text
    assert load_config(run / "config.yaml") == load_config(written)


def test_few_photographs_get_a_small_model_and_many_epochs(photos: Path) -> None:
    config, choices, _ = choose_config(photos, RANDOM)
    assert (config.data.image_size, config.model.patch_size) == (64, 8)  # of 90 × 100 pixels
    assert config.augment.resized_crop_scale == (0.35, 1.0)
    assert (config.augment.cutmix, config.optimizer.weight_decay) == (1.0, 0.1)
    recipe = load_config(find_recipe("folder/small"))  # which is trained by its name as it is
    assert (recipe.augment.cutmix, recipe.optimizer.weight_decay) == (0.0, 0.01)
    assert config.train.batch_size == 8  # of 44
    assert config.train.image_sizes is None
    assert config.train.epochs == 150
    assert config.train.max_minutes == 5
    assert "at most 5 minutes (--minutes) on this CPU" in choices["time"]
    assert set(choices) == {"recipe", "image size", "time"}


def test_many_photographs_get_the_larger_model_where_the_minutes_hold_it(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "_ENOUGH_PHOTOS", 40)
    config, choices, _ = choose_config(photos, RANDOM)
    size = (config.model.embed_dim, config.data.image_size)
    assert (*size, config.model.drop_path_rate) == (256, 88, 0.1)
    config, choices, _ = choose_config(photos, [*RANDOM, "train.max_minutes=0.02"])
    assert (config.model.embed_dim, config.data.image_size) == (128, 64)
    assert "minutes too short" in choices["image size"]
    # a GPU's minutes hold it
    monkeypatch.setattr(automatic, "choose_device", lambda name: torch.device("cuda"))
    config, _, _ = choose_config(photos, [*RANDOM, "train.max_minutes=0.02"])
    assert (config.model.embed_dim, config.train.batch_size) == (256, 32)


def test_classes_of_very_different_sizes_are_told_by_macro_f1(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "photos")
    folder = tmp_path / "photos"
    assert choose_config(folder, RANDOM)[0].train.select_by == "top1"
    rarest = sorted(each for each in folder.iterdir() if each.is_dir())[0]
    for photo in sorted(rarest.iterdir())[3:]:
        photo.unlink()
    config, choices, _ = choose_config(folder, RANDOM)
    assert config.train.select_by == "macro_f1"
    assert choices["best model"] == "by macro F1: all classes count alike"
    config, _, _ = choose_config(folder, [*RANDOM, "train.select_by=top1"])
    assert config.train.select_by == "top1"


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_small_images_without_colours_get_the_recipe_of_such_images(
    tmp_path: Path, mode: str
) -> None:
    rng = np.random.default_rng(0)
    for name in ("boot", "shirt"):
        (tmp_path / name).mkdir()
        for number in range(30):
            shape = (28, 28) if mode == "L" else (28, 28, 3)
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    family = "fashion_mnist" if mode == "L" else "cifar10"
    _, choices, _ = choose_config(tmp_path, ["train.device=cpu"])
    assert choices["recipe"].startswith(f"{family}/cpu-20-minutes")
    config, choices, _ = choose_config(tmp_path, ["train.device=cpu", "train.max_minutes=0.001"])
    assert choices["recipe"].startswith(f"{family}/cpu")
    assert "20-minutes" not in choices["recipe"]
    assert config.train.batch_size == 8  # the power of two near √(2n)
    assert (config.data.image_size, config.model.patch_size) == (28, 4)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.image_size=64"], {"data.image_size": 64, "model.patch_size": 8}),
        (["data.image_size=[64, 96]"], {"data.image_size": (64, 96), "model.patch_size": 8}),
        (["model.patch_size=16"], {"data.image_size": 64}),
        (
            ["train.epochs=3"],
            {"train.epochs": 3, "train.evaluate_every_epochs": 1, "train.batch_size": 8},
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_given_holds_and_what_depends_on_it_follows(
    photos: Path, overrides: list[str], expected: dict[str, Any]
) -> None:
    config, choices, _ = choose_config(photos, [*RANDOM, *overrides])
    found = {
        key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in expected
    }
    assert found == expected
    # The user's own length holds.
    assert ("time" in choices) == ("train.epochs=3" not in overrides)


def test_init_fine_tunes_at_the_models_own_size(
    cli: Launcher, photos: Path, save_model: SaveModel, tmp_path: Path
) -> None:
    path = save_model(tmp_path / "first" / "model.safetensors")  # of 16-pixel images
    outcome = cli.succeed(
        "train",
        photos,
        "-o",
        tmp_path / "run",
        "--init",
        path.parent,
        "train.epochs=1",
        "train.device=cpu",
    )
    config = load_config(tmp_path / "run" / "config.yaml")
    assert config.model.init == str(path)
    assert (config.data.image_size, config.data.crop_pct) == (16, None)
    assert (config.optimizer.layer_decay, config.optimizer.name) == (0.7, "adamw")
    assert "folder/finetune" in outcome.text
    assert load_bundle(tmp_path / "run").preprocess.std == load_bundle(path).preprocess.std


def test_photos_start_from_weights_that_were_downloaded(
    photos: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_weights, "has_weights", lambda repository: True)
    config, choices, _ = choose_config(photos, ["model.freeze=6"])
    assert config.model.init == "timm:vit_small_patch14_dinov2.lvd142m"
    assert config.data.image_size == 224
    assert "Apache-2.0, 88 MB; --init none trains from scratch" in choices["weights"]
    # what the user asks for, or the images are, isn't changed
    for overrides in (RANDOM, ["model.depth=3"], ["data.image_size=64"]):
        assert choose_config(photos, overrides)[0].model.init is None
    assert choose_config(digits)[0].model.init is None


def test_without_a_network_photos_are_trained_from_scratch_and_it_is_said(
    photos: Path, cli: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, choices, _ = choose_config(photos)
    assert "can't be downloaded (HF_HUB_OFFLINE is set)" in choices["weights"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    config, choices, _ = choose_config(photos)
    assert "http://127.0.0.1:9 does not answer" in choices["weights"]
    assert config.model.init is None
    monkeypatch.setattr(default_weights, "is_reachable", lambda: True)
    monkeypatch.setattr(default_weights, "_DOWNLOAD", "import time; time.sleep(60)")
    monkeypatch.setattr(default_weights, "_SECONDS", 0.1)
    _, choices, _ = choose_config(photos)
    assert "took over 0.1 s; hf download timm/vit_small_patch14" in choices["weights"]
    # what the run began with, it goes on with
    run = ["train", photos, "-o", tmp_path / "run", "train.device=cpu"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "can't be downloaded" in cli.succeed(*run, "train.max_steps=1").text
    monkeypatch.setattr(default_weights, "has_weights", lambda repository: True)
    assert "resuming" in cli.succeed(*run, "--resume").text


def test_recipes_are_listed_with_what_they_are_for(cli: Launcher) -> None:
    shown = cli.succeed("recipes").out
    assert "CIFAR-10 in minutes on 2 CPU cores" in shown
    assert all(name in shown for name in RECIPE_NAMES)


def test_init_is_not_the_run_in_output_and_keeps_its_architecture(
    cli: Launcher, tiny_run: Path, empty_yaml: Path, tmp_path: Path
) -> None:
    start = ["train", empty_yaml, "data.image_size=8", "train.device=cpu", "--init"]
    told = cli.fail(*start, tiny_run, "model.patch_size=4", "-o", tmp_path / "larger")
    assert "model.patch_size (4, 4): the weights of --init have (2, 2)" in told
    for key, value in (("embed_dim", 96), ("num_heads", 7), ("pos_embed", "sincos")):
        told = cli.fail(*start, tiny_run, f"model.{key}={value}", "-o", tmp_path / "larger")
        assert f"model.{key} {value}: the weights of --init have " in told
    message = cli.fail(*start, tiny_run, "-o", tiny_run, "--overwrite")
    assert "is the run in --output" in message
    assert (tiny_run / "model.safetensors").exists()
    missing = cli.fail(*start, tmp_path / "nowhere", "-o", tmp_path / "x")
    assert "nowhere does not exist; a model is" in missing
