"""Explanations: every method with its checks, one copy in and one out for each batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.runtime.conftest import Count, Meter
from vit.bundle import load_model
from vit.explanation.explain import collect_explanations, fit_settings
from vit.explanation.items import items_from_images
from vit.explanation.methods.table import METHODS, MapOptions
from vit.explanation.render.explained import ExplainedImage, Settings

MODELS = {
    "4×4 patches, each left out": {"reg_tokens": 1},
    "6×6 patches, by the removal gradient": {"img_size": 24, "global_pool": "avg"},
    "attention pooling": {"global_pool": "attention", "mlp": "relu2"},
}
SETTINGS = {
    "every method": Settings(tuple(METHODS), batch_size=2),
    "three classes": Settings(("gae", "libra-removal", "rollout"), target="top3", batch_size=2),
    "a class": Settings(("legrad", "rollout"), target="bee", batch_size=2, precision="bfloat16"),
    "options": Settings(
        ("rollout", "raw", "removal-gradient"),
        MapOptions(head_fusion="max", discard_ratio=0.5, layer=None, head=None, passes=3),
        batch_size=2,
    ),
}
CASES = [(model, "every method") for model in MODELS] + [(next(iter(MODELS)), name) for name in list(SETTINGS)[1:]]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_explanations_equal_the_cpus_with_one_copy_in_and_one_out(
    meter: Meter, table: Callable[..., None], save_model: Any, tmp_path: Path, model: str, name: str
) -> None:
    path = save_model(tmp_path / "model.safetensors", **MODELS[model])
    pixels = np.random.default_rng(0).integers(0, 256, (5, 30, 30, 3), dtype=np.uint8)
    counts: list[Count] = []

    def explain(device: str) -> list[ExplainedImage]:
        bundle, found = load_model(path, device=device), list[ExplainedImage]()
        settings = fit_settings(bundle, replace(SETTINGS[name]))

        def observe(batch: list[ExplainedImage]) -> None:
            counts.append(meter.read())
            found.extend(batch)

        items = items_from_images([Image.fromarray(image) for image in pixels])
        collect_explanations(bundle, items, settings, observers=[observe], token_bytes=50_000)
        return found

    found = explain("npu")
    table(f"explanation batch: {name}; {model}", max(counts[1:]))
    assert set(counts[1:]) == {Count(1, 1, 0)}, meter.lines
    for image, expected in zip(found, explain("cpu"), strict=True):  # to the last bit
        assert image.targets == expected.targets
        assert np.array_equal(image.probabilities, expected.probabilities)
        for one, other in zip(image.maps, expected.maps, strict=True):
            assert np.array_equal(one.values, other.values), one.method.name
            assert (one.entropy, one.prefix_mass) == (other.entropy, other.prefix_mass)
            assert one.sanity_check == other.sanity_check, one.method.name
        assert image.tokens is not None
        assert len(image.tokens.attention) == len(expected.tokens.attention) > 1
        for one, other in zip(image.tokens.attention, expected.tokens.attention, strict=True):
            assert np.array_equal(one.rows.values, other.rows.values)
            assert np.array_equal(one.rows.maxima, other.rows.maxima)
