"""Explanations: every method with its checks, one copy in for each batch, and no wait."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.runtime.conftest import Count, Meter
from vit.bundle import open_model
from vit.explanation.explain import Explainer
from vit.explanation.items import items_from_images
from vit.explanation.methods.registry import list_methods
from vit.explanation.records import ImageResult

MODELS = {
    "4×4 patches, each left out": {"reg_tokens": 1},
    "6×6 patches, by the removal gradient": {"img_size": 24, "global_pool": "avg"},
    "squared ReLU": {"mlp": "relu2"},
}
SETTINGS = {
    "every method": {"methods": list_methods()},
    "what is predicted": {"methods": ("gae", "libra-removal", "rollout")},
    "options": {
        "methods": ("rollout", "removal-gradient"),
        "map_options": {"head_fusion": "max", "discard_ratio": 0.5},
    },
}
CASES = [
    ("4×4 patches, each left out", "what is predicted"),
    *(
        pytest.param(model, name, marks=pytest.mark.extended)
        for model, name in [
            ("squared ReLU", "every method"),
            ("4×4 patches, each left out", "every method"),
            ("4×4 patches, each left out", "options"),
            ("6×6 patches, by the removal gradient", "every method"),
        ]
    ),
]


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_explanations_equal_the_cpus_with_one_copy_in_and_one_out(
    meter: Meter,
    table: Callable[..., None],
    save_model: Any,
    tmp_path: Path,
    architecture: str,
    name: str,
) -> None:
    path = save_model(tmp_path / "model.safetensors", **MODELS[architecture])
    pixels = np.random.default_rng(0).integers(0, 256, (3, 30, 30, 3), dtype=np.uint8)
    counts: list[Count] = []

    def explain(device: str) -> list[ImageResult]:
        options: dict[str, Any] = {"num_tested": 9, "num_attended": 9, "batch_size": 2}
        items = items_from_images([Image.fromarray(image) for image in pixels])
        images: list[ImageResult] = []
        model = open_model(path, device=device)
        for batch in Explainer(model, items, **options, **SETTINGS[name]):
            images += batch
            counts.append(meter.read())
        return images

    found = explain("npu")
    table(f"explanation batch: {name}; {architecture}", max(counts[1:]))
    assert {(count.copies_in, count.waits) for count in counts[1:]} == {(1, 0)}, meter.lines
    for image, expected in zip(found, explain("cpu"), strict=True):  # to the last bit
        assert np.array_equal(image.probabilities, expected.probabilities)
        for one, other in zip(image.maps, expected.maps, strict=True):
            assert np.array_equal(one.values, other.values), one.method.name
            assert one.target == other.target, one.method.name
            assert one.sanity_check == other.sanity_check, one.method.name
        assert image.attention is not None
        assert image.attention.keys() == expected.attention.keys() == {"heads", "flow"}
        for part, values in image.attention.items():
            assert np.array_equal(values, expected.attention[part]), part
