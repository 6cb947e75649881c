"""Features of images: what the head reads, in the order of the images, in memory and in files."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import vit
from tests.conftest import Launcher, SaveModel
from tests.prediction.conftest import read_rows
from vit.bundle import load_bundle


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    return paths


def test_the_head_makes_the_logits_of_the_features(
    save_model: SaveModel, photos: list[Path], tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model.safetensors")
    features = vit.embed(model, photos, device="cpu", precision="float32", batch_size=2)
    bundle = load_bundle(model)
    assert features.shape == (3, bundle.model.embed_dim)
    assert features.dtype == np.float32

    with torch.inference_mode():
        logits = bundle.model.head(torch.from_numpy(features)).double()
    expected = torch.softmax(logits, dim=1).numpy()
    result = vit.predict(model, photos, device="cpu", precision="float32", top_k=1)
    for row, prediction in zip(expected, result.predictions, strict=True):
        index, _, probability = prediction.classes[0]
        assert row.argmax() == index
        assert row[index] == pytest.approx(probability, abs=1e-6)
        assert prediction.features is None


def test_the_command_writes_them_beside_its_predictions(
    cli: Launcher, save_model: SaveModel, photos: list[Path], tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model.safetensors")
    expected = vit.embed(model, photos, device="cpu", precision="float32")
    (tmp_path / "broken.png").write_bytes(b"no image")
    images = [photos[0], tmp_path / "broken.png", *photos[1:]]
    common = ["--device", "cpu", "--precision", "float32", "--embeddings"]
    cli.succeed("predict", model, *images, "--output", tmp_path / "out.jsonl", *common)
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["path"] for row in rows] == list(map(str, images))
    assert rows[1].get("embedding") is None
    found = np.array([row["embedding"] for row in rows if not row.get("error")], np.float32)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="has no features"):
        vit.embed(model, images)


def test_a_model_without_a_classifier_has_features_alone(photos: list[Path]) -> None:
    model = timm.create_model("test_vit", pretrained=False, num_classes=0).eval()
    bundle = vit.Bundle.from_model(model)
    features = vit.embed(bundle, photos, device="cpu", precision="float32")
    with torch.inference_mode():
        expected = model(bundle.preprocess([Image.open(path) for path in photos]))
    np.testing.assert_allclose(features, expected.numpy(), rtol=1e-5, atol=1e-6)
    dataset = [(np.zeros((8, 8, 3), np.uint8), "a")]
    for call in (
        lambda: vit.predict(bundle, photos),
        lambda: vit.evaluate(bundle, dataset=dataset),
    ):
        with pytest.raises(ValueError, match=r"has no classifier; use vit.embed"):
            call()
