"""Features of images: what the head reads, in the order of the images."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import vit
from tests.conftest import SaveModel, save_noise
from vit.bundle import load_bundle


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return save_noise(tmp_path, ("a.png", "b.png", "c.png"))


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


def test_an_image_without_features_is_named(
    save_model: SaveModel, photos: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"broken\.png has no features"):
        vit.embed(save_model(tmp_path / "model.safetensors"), [*photos, tmp_path / "broken.png"])


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
