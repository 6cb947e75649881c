"""`vit faithfulness` as a person types it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from vit.bundle import save_bundle
from vit.data.images import Preprocess
from vit.data.open import load_source
from vit.model.vision_transformer import VisionTransformer


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the digits after a few passes: right about some."""
    source = load_source("digits", split="train")
    preprocess = Preprocess(image_size=(16, 16))
    images = preprocess([source.read(index) for index in range(len(source))])
    labels = torch.from_numpy(source.labels)
    torch.manual_seed(0)
    model = VisionTransformer(img_size=16, patch_size=4, num_classes=10, embed_dim=32, depth=2, num_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(4):
        for chosen in torch.randperm(len(images)).split(64):
            loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    config = {"data": {"name": "digits"}}
    save_bundle(path, model, preprocess=preprocess, class_names=source.class_names, config=config, data={})
    return path


def run(*arguments: object) -> Result:
    from vit.cli.faithfulness import faithfulness

    app = typer.Typer()
    app.command()(faithfulness)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_it_measures_the_methods_asked_for_on_the_models_own_data(model_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = run(model_file, "--methods", "rollout,gae", "--images", 16, "--output", output)
    assert result.exit_code == 0, result.output
    figures = json.loads((output / "faithfulness.json").read_text())
    assert figures["num_images"] == 16
    assert figures["split"] == "test"
    assert len(set(figures["image_ids"])) == 16
    assert set(figures["metrics"]["deletion"]["methods"]) == {
        "rollout", "gae", "oracle", "random", "centre", "edges",
    }  # fmt: skip
    assert {"faithfulness.md", "faithfulness.png", "faithfulness.npz"} <= {p.name for p in output.iterdir()}


def test_the_same_seed_measures_the_same(model_file: Path, tmp_path: Path) -> None:
    arrays = []
    for name in ("first", "second"):
        run(model_file, "--methods", "rollout", "--images", 8, "--output", tmp_path / name)
        with np.load(tmp_path / name / "faithfulness.npz") as stored:
            arrays.append({key: stored[key] for key in stored.files})
    assert all(np.array_equal(values, arrays[1][key]) for key, values in arrays[0].items())


def test_mistakes_get_a_sentence(model_file: Path, tmp_path: Path) -> None:
    unknown = run(model_file, "--methods", "lrp", "--output", tmp_path / "out")
    assert "unknown method 'lrp'" in str(unknown.exception)
    absent = run(model_file, "--data", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert "nowhere is no data set" in str(absent.exception)
    assert not (tmp_path / "out").exists()
