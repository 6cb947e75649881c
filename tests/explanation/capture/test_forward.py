"""Maps are read where the model reads, and lie on the grid of the real input."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from vit.explanation.capture.forward import (
    run_forward,
)
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.rollout import attention_rollout
from vit.explanation.targets import CLASS

Build = Callable[..., tuple[nn.Module, Tensor]]


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_the_map_is_the_pool_weights_times_the_rollout(ours: Build, pool: str) -> None:
    model, images = ours(global_pool=pool)
    with torch.no_grad():
        _, attentions = model.forward_with_attention(images)
    if pool == "token":
        pool_weights = torch.nn.functional.one_hot(torch.zeros(2, dtype=torch.long), 25).float()
    else:
        pool_weights = torch.full((2, 24), 1 / 24)
    expected = (pool_weights[:, None] @ attention_rollout(attentions))[
        :, 0, model.num_prefix_tokens :
    ]
    _, _, (maps,) = compute_maps(model, images)
    assert maps.values.shape == (2, 1, 4, 6)
    assert (maps.values.flatten(1) - expected).abs().max() < 1e-6


def test_mean_pooling_with_prefix_tokens_reads_them_too(from_timm: Build) -> None:
    model, images = from_timm(global_pool="avg", pool_include_prefix=True, reg_tokens=2)
    pool_weights = run_forward(model, images).pool_weights
    assert torch.allclose(pool_weights, torch.full((2, 27), 1 / 27))


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_weights_of_timms_poolings_reproduce_its_pooled_feature(
    from_timm: Build, pool: str
) -> None:
    """The gradient of a linear pooling is its pool_weights: moving all of one token moves the feature by
    its share."""
    model, images = from_timm(global_pool=pool, class_token=False)
    pool_weights = run_forward(model, images).pool_weights
    assert (pool_weights.sum(dim=1) - 1).abs().max() < 1e-5
    with torch.no_grad():
        tokens = model.forward_features(images)
        winners = torch.nn.functional.one_hot(tokens.argmax(dim=1), 24).float().mean(dim=1)
        expected = {"avg": torch.full_like(winners, 1 / 24), "max": winners}[pool]
    assert (pool_weights - expected).abs().max() < 1e-6


def test_the_grid_follows_an_input_of_another_size(from_timm: Build) -> None:
    model, _ = from_timm(dynamic_img_size=True)
    _, _, (maps,) = compute_maps(model, torch.randn(1, 3, 128, 48))
    assert maps.values.shape == (1, 1, 8, 3)


def test_chosen_classes_give_different_maps_and_agnostic_methods_one(ours: Build) -> None:
    model, images = ours()
    _, targets, (agnostic, specific) = compute_maps(
        model,
        images,
        methods=["rollout", "gae"],
        target=replace(CLASS, predict=lambda logits: logits.topk(3).indices),
    )
    assert targets.shape == (2, 3)
    assert agnostic.values.shape == (2, 1, 4, 6)
    assert specific.values.shape == (2, 3, 4, 6)
    assert (specific.values[:, 0] - specific.values[:, 1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("rollout", {"start_layer": 3}, "start_layer 3 is outside 0 to 2"),
        ("gae", {"head": 3}, "head is no option of the methods gae; known: none"),
        ("rolout", {}, "unknown method 'rolout'; known: rollout"),
    ],
)
def test_what_a_method_cannot_do_is_said(
    ours: Build, method: str, options: dict, message: str
) -> None:
    model, images = ours()
    with pytest.raises(ValueError, match=message):
        compute_maps(model, images, methods=[method], options=options)
