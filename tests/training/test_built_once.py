"""A model is built once for a run, whatever is measured with it before; the configuration is read by
the training alone."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from tests.conftest import SaveModel
from vit.data.preprocess import Preprocess
from vit.model.vision_transformer import VisionTransformer

SMALL = ["train.device=cpu", "train.precision=float32"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The depth of each model that is built, without those that have no memory ("meta")."""
    depths: list[int] = []
    original = VisionTransformer.__init__

    def count(model: VisionTransformer, *arguments: Any, **options: Any) -> None:
        original(model, *arguments, **options)
        if next(model.parameters()).device.type != "meta":
            depths.append(len(model.blocks))

    monkeypatch.setattr(VisionTransformer, "__init__", count)
    return depths


@pytest.fixture
def weights(save_model: SaveModel, tmp_path: Path) -> Path:
    return save_model(
        tmp_path / "weights" / "model.safetensors",
        preprocess=Preprocess((8, 8)),
        img_size=8,
        patch_size=2,
        embed_dim=32,
        depth=3,
        num_heads=2,
    )


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """24 images of noise in two classes."""
    rng = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "photos" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


def test_a_recipe_builds_its_model_once(built: list[int], tmp_path: Path) -> None:
    short = ["train.epochs=1", "train.max_steps=2", *SMALL]
    vit.train("digits", output=tmp_path / "run", overrides=short)
    assert len(built) == 1


def test_images_alone_build_one_model(built: list[int], photos: Path, tmp_path: Path) -> None:
    vit.train(photos, output=tmp_path / "run", minutes=0.02, overrides=SMALL)
    assert len(built) == 1


@pytest.mark.parametrize("extra", [{"overrides": ["train.epochs=1", *SMALL]}, {"folds": 3}])
def test_pretrained_weights_are_built_once(
    built: list[int], weights: Path, photos: Path, tmp_path: Path, extra: dict[str, Any]
) -> None:
    built.clear()
    options = {"overrides": SMALL} | extra
    vit.train(photos, output=tmp_path / "run", init=weights, minutes=0.1, **options)
    # The model that ends at the probe's block takes its weights.
    assert built == [3]


def test_resuming_builds_no_more_models(built: list[int], tmp_path: Path) -> None:
    short = ["train.epochs=1", "train.max_steps=2", *SMALL]
    first = vit.train("digits", output=tmp_path / "run", overrides=short)
    built.clear()
    second = vit.train(output=tmp_path / "run", resume=True)
    assert len(built) == 1
    states = [run.bundle.model.state_dict() for run in (first, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_no_folder_below_the_training_reads_the_configuration() -> None:
    package = Path(vit.__file__).parent
    readers = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if re.search(r"^\s*(from vit\.config import|import vit\.config)", path.read_text(), re.M)
    }
    assert readers <= {"training", "cli"}
