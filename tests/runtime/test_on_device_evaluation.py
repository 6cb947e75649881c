"""Predictions: one copy in and one out for each batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.runtime.conftest import Count, Meter
from vit.bundle import open_model
from vit.prediction.batch_predictor import BatchPredictor


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_batch_is_copied_in_and_its_logits_out(
    meter: Meter,
    table: Callable[..., None],
    save_model: Any,
    tmp_path: Any,
    precision: str,
) -> None:
    path, counts = save_model(tmp_path / "model.safetensors"), list[Count]()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    options: dict[str, Any] = {"batch_size": 8, "precision": precision}

    def predict(device: str) -> np.ndarray:
        predictor = BatchPredictor.from_bundle(open_model(path, device=device), **options)
        return predictor.predict(
            lambda start, stop: pixels[start:stop],
            count=40,
            on_progress=lambda done: counts.append(meter.read()),
        )

    found = predict("npu")
    table(f"evaluation batch, {precision}", max(counts[1:]))
    assert set(counts[1:]) == {Count(1, 1, 0)}, meter.lines
    assert np.array_equal(found, predict("cpu"))
