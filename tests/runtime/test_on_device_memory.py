"""Batches that don't fit the device's memory: a pretend limit of it."""

import gc
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.pretend_device import MEMORY
from tests.runtime.conftest import Counter
from tests.training.conftest import flatten
from tests.training.test_train_step import build_step, draw_batch
from vit.bundle import open_model
from vit.data.loader import fits_in_memory
from vit.explanation.explain import Explainer
from vit.explanation.items import items_from_images
from vit.explanation.records import ImageResult
from vit.model.vision_transformer import VisionTransformer
from vit.training.train_step import TrainStep


def build() -> TrainStep:
    torch.manual_seed(0)
    model = VisionTransformer(
        8, 4, num_classes=5, embed_dim=16, depth=2, num_heads=2, drop_path_rate=0.5
    )
    return build_step(model.to("npu"), optimizer="adamw", lr=1e-3)


def read_state(step: TrainStep) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in flatten(step.state_dict()).items()}


def run_step(step: TrainStep, seed: int) -> None:
    torch.manual_seed(seed)  # as a run does before each step
    step(*(tensor.to("npu") for tensor in draw_batch(64, seed=seed)))


@pytest.mark.extended
def test_a_step_that_does_not_fit_is_repeated_in_halves_and_each_is_said(
    npu: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEMORY, "limit", 2**30)
    step = build()
    run_step(step, 1)
    checkpoint = io.BytesIO()
    torch.save(step.state_dict(), checkpoint)
    monkeypatch.setattr(MEMORY, "limit", MEMORY.allocated + 2**18)
    with pytest.warns(UserWarning, match="64 images did not fit the GPU's memory") as told:
        run_step(step, 2)
    count = step.grad_accum_steps
    assert count in (2, 4, 8, 16)
    assert 2 ** len(told) == count
    with warnings.catch_warnings(action="error"):
        run_step(step, 3)

    monkeypatch.setattr(MEMORY, "limit", 2**30)
    expected = build()
    # a step of so many micro-batches from the start, with the same random numbers
    checkpoint.seek(0)
    expected.load_state_dict(torch.load(checkpoint))
    expected.grad_accum_steps = count
    run_step(expected, 2)
    run_step(expected, 3)
    states = read_state(step), read_state(expected)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    # a resumed run decides alike
    resumed = build()
    resumed.load_state_dict(step.state_dict())
    assert resumed.grad_accum_steps == count


def test_what_torch_keeps_of_freed_tensors_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"mem_get_info": (1000, 9000), "memory_reserved": 8000, "memory_allocated": 2000}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    device = torch.device("cuda", 0)
    assert fits_in_memory(2800, device)
    assert not fits_in_memory(2801, device)


@pytest.mark.extended
def test_explanations_that_do_not_fit_are_made_in_halves(
    npu: Counter, monkeypatch: pytest.MonkeyPatch, save_model: Any, tmp_path: Path
) -> None:
    path = save_model(tmp_path / "model.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 30, 30, 3), dtype=np.uint8)

    def explain(limit: int) -> tuple[Explainer, list[ImageResult]]:
        monkeypatch.setattr(MEMORY, "limit", 2**30)
        items = items_from_images([Image.fromarray(image) for image in pixels])
        explainer = Explainer(open_model(path, device="npu"), items, ["rollout", "gae"])
        gc.collect()
        MEMORY.reset_peak()
        monkeypatch.setattr(MEMORY, "limit", MEMORY.allocated + limit)
        return explainer, [image for batch in explainer for image in batch]

    explainer, expected = explain(2**30)
    whole = MEMORY.peak - MEMORY.allocated
    assert explainer.part_size == 4 * 64
    del explainer
    explainer, explanations = explain(whole // 2)
    assert explainer.part_size in (1, 2, 4)
    for image, other in zip(explanations, expected, strict=True):
        for one, same in zip(image.maps, other.maps, strict=True):
            # batches of other sizes are rounded apart
            np.testing.assert_allclose(one.values, same.values, rtol=1e-5)
    with pytest.raises(torch.OutOfMemoryError):
        explain(2**8)
