"""Predictions and maps of a GPU, beside the CPU's, in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vit
from tests.conftest import SaveModel
from vit.explanation.methods.registry import list_methods

pytestmark = pytest.mark.usefixtures("exact_products")
BOUND = 1e-4


@pytest.fixture
def model(save_model: SaveModel, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model" / "model.safetensors")


def test_predictions_agree(device: torch.device, model: Path, photos: Path) -> None:
    on_device, on_cpu = (
        vit.predict(model, photos, device=str(place), precision="float32")
        for place in (device, "cpu")
    )
    pairs = zip(on_device.predictions, on_cpu.predictions, strict=True)
    for prediction, expected in pairs:
        probabilities = {name: value for _, name, value in prediction.classes}
        expected_probabilities = {name: value for _, name, value in expected.classes}
        assert probabilities == pytest.approx(expected_probabilities, abs=BOUND)


def test_maps_of_every_method_agree(device: torch.device, model: Path, photos: Path) -> None:
    on_device, on_cpu = (
        vit.explain(model, photos / "ant", methods=list_methods(), device=str(place)).maps
        for place in (device, "cpu")
    )
    for method, expected in on_cpu.items():
        scale = float(expected.abs().max())
        assert float((on_device[method].cpu() - expected).abs().max()) <= BOUND * scale, method


def test_faithfulness_agrees(device: torch.device, model: Path, photos: Path) -> None:
    results: list[Any] = [
        vit.measure_faithfulness(model, data=photos, methods=("rollout", "gae"), device=str(place))
        for place in (device, "cpu")
    ]
    gains, expected = (result.values["srg"] for result in results)
    assert gains.keys() == expected.keys()
    for name, gain in gains.items():
        assert np.mean(gain) == pytest.approx(np.mean(expected[name]), abs=10 * BOUND), name
