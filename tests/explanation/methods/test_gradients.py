"""Class-specific maps against loops written out image by image in float64, and against finite
differences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vit.explanation.capture import watch
from vit.explanation.capture.forward import Forward, capture_attention, run_forward
from vit.explanation.methods.gradients import (
    compute_difference_x_gradient,
    compute_gae,
)

Build = Callable[..., tuple[nn.Module, Tensor]]
CLASS = 3


def attention_and_gradient(model: nn.Module, image: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """[H, N, N] of each layer, first layer first, for one image [1, 3, H, W]."""
    with capture_attention(model, gradients=True) as record:
        gradients = record.gradients(model(image)[:, CLASS])
    return [attention[0] for attention in record.attentions], [
        gradient[0] for gradient in gradients
    ]


def record(model: nn.Module, images: Tensor) -> tuple[Forward, Tensor]:
    """What the methods take."""
    forward = run_forward(model, images, gradients=True)
    return forward, torch.full((len(images),), CLASS)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_gae_equals_the_published_loop(ours: Build, pool: str) -> None:
    model, images = ours(global_pool=pool)
    model, images = model.double(), images.double()
    arguments = record(model, images)
    found = compute_gae(*arguments)
    for image in range(2):
        relevance = torch.eye(arguments[0].pool_weights.shape[1], dtype=torch.float64)
        for attention, gradient in zip(
            *attention_and_gradient(model, images[image : image + 1]), strict=True
        ):
            relevance = relevance + (gradient * attention).clamp(min=0).mean(dim=0) @ relevance
        # without the identity, which a mean over the patches would show in every one of them
        relevance = relevance - torch.eye(len(relevance), dtype=torch.float64)
        expected = relevance[0] if pool == "token" else relevance.mean(dim=0)
        assert (found[image] - expected).abs().max() < 1e-10


def test_gae_of_a_few_query_rows_at_a_time_is_the_same(
    ours: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = ours(global_pool="avg")
    arguments = record(model.double(), images.double())
    whole = compute_gae(*arguments)
    monkeypatch.setattr(watch, "CHUNK_ELEMENTS", 3 * 25 * 7)  # seven of 24 rows
    assert (compute_gae(*arguments) - whole).abs().max() < 1e-12


def test_input_x_gradient_equals_central_differences(ours: Build) -> None:
    model, images = ours()
    model, images = model.double(), images[:1].double()
    arguments = record(model, images)
    found = compute_difference_x_gradient(*arguments)[0]
    assert found[0] == 0  # the class token has no pixels
    patch = torch.zeros_like(images)
    # row 1, column 2 of 4×6 patches
    even = images - images.mean(dim=(-2, -1), keepdim=True)
    patch[..., 8:16, 16:24] = even[..., 8:16, 16:24]
    with torch.no_grad():
        expected = (model(images + 1e-5 * patch) - model(images - 1e-5 * patch))[0, CLASS] / 2e-5
    assert abs(found[1 + 6 + 2] - expected) < 1e-4 * abs(expected)
