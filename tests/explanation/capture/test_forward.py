"""Maps are read where the model reads, and lie on the grid of the real input."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from vit.explanation.capture import layers
from vit.explanation.capture.forward import (
    capture_attention,
    compute_entropy,
    run_forward,
    split_prefix,
)
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import list_methods
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


@pytest.mark.parametrize("pool", ["avg", "max", "map"])
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
        if pool == "map":
            attend = model.attn_pool
            query = attend.q(attend.latent).reshape(1, 1, attend.num_heads, -1).transpose(1, 2)
            key = (
                attend.kv(tokens).unflatten(-1, (2, attend.num_heads, -1))[:, :, 0].transpose(1, 2)
            )
            weights = (query @ key.transpose(-2, -1) * attend.scale).softmax(dim=-1)
            expected = weights.mean(dim=(1, 2))
        else:
            winners = torch.nn.functional.one_hot(tokens.argmax(dim=1), 24).float().mean(dim=1)
            expected = {"avg": torch.full_like(winners, 1 / 24), "max": winners}[pool]
    assert (pool_weights - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("prefix", "arguments"),
    [(0, {"global_pool": "avg"}), (1, {}), (5, {"reg_tokens": 4})],
)
def test_prefix_tokens_are_dropped_and_their_share_reported(
    ours: Build, prefix: int, arguments: dict
) -> None:
    model, images = ours(**arguments)
    _, _, (maps,) = compute_maps(model, images)
    assert maps.values.shape == (2, 1, 4, 6)
    assert (maps.values.sum(dim=(-1, -2)) + maps.prefix_mass - 1).abs().max() < 1e-5
    assert bool((maps.prefix_mass > 0).all()) == (prefix > 0)


def test_the_grid_follows_an_input_of_another_size(from_timm: Build) -> None:
    model, _ = from_timm(dynamic_img_size=True)
    _, _, (maps,) = compute_maps(model, torch.randn(1, 3, 128, 48))
    assert maps.values.shape == (1, 1, 8, 3)


@pytest.mark.parametrize("method", list_methods())
@pytest.mark.parametrize("family", ["ours", "timm", "timm-eva", "torchvision", "hugging-face"])
def test_every_method_explains_every_family(build: Build, method: str, family: str) -> None:
    model, images = build(family)
    forward, targets, (maps,) = compute_maps(model, images, methods=[method])
    assert maps.values.dtype == torch.float32
    assert torch.isfinite(maps.values).all()
    if method != "attn-gradcam":  # whose positive part can be nothing
        assert maps.values.std() > 0
    assert torch.equal(targets[:, 0], forward.logits.argmax(dim=1))


@pytest.mark.parametrize(
    "family",
    ["ours", "ours-registers-norms", "timm-eva", "timm-rotary", "torchvision", "hugging-face"],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_queries_and_keys_computed_again_give_the_same_attention(
    build: Build, family: str, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = build(family)
    with torch.set_grad_enabled(gradients):
        with capture_attention(model, gradients=gradients) as kept:
            model(images)
        monkeypatch.setattr(layers, "_MAX_TOKEN_BYTES", 0)
        with capture_attention(model, gradients=gradients) as recomputed:
            model(images)
    assert all(layer.query is None for layer in recomputed.layers)
    for expected, found in zip(kept.attentions, recomputed.attentions, strict=True):
        assert (expected - found).abs().max() < 1e-6


def test_chosen_classes_give_different_maps_and_agnostic_methods_one(ours: Build) -> None:
    model, images = ours()
    _, targets, (agnostic, specific) = compute_maps(
        model,
        images,
        methods=["rollout", "gae"],
        target=replace(CLASS, choose=lambda logits: logits.topk(3).indices),
    )
    assert targets.shape == (2, 3)
    assert agnostic.values.shape == (2, 1, 4, 6)
    assert specific.values.shape == (2, 3, 4, 6)
    assert (specific.values[:, 0] - specific.values[:, 1]).abs().max() > 1e-4


@pytest.mark.parametrize("head", [2, "mean"])
def test_raw_is_the_class_tokens_attention_and_sums_to_one_with_the_prefix(
    ours: Build, head: int | str
) -> None:
    model, images = ours()
    with torch.no_grad(), capture_attention(model) as record:
        model(images)
    options = {"layer": 1, "head": head}
    _, _, (maps,) = compute_maps(model, images, methods=["raw"], options=options)
    rows = record.attentions[1][:, :, 0, 1:]
    expected = rows.mean(dim=1) if head == "mean" else rows[:, 2]
    assert (maps.values[:, 0].flatten(1) - expected).abs().max() < 1e-6
    assert (maps.values.sum(dim=(-1, -2)) + maps.prefix_mass - 1).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("raw", {"layer": 3}, "layer 3 is outside -3 to 2"),
        ("raw", {"head": 3}, "head 3 is outside 0 to 2"),
        ("gae", {"start_layer": 3}, "start_layer 3 is outside 0 to 2"),
        ("gae", {"head": 3}, "head is no option of the methods gae; they have start_layer"),
        ("gae", {"start_layer": "x"}, "start_layer 'x': input should be a valid integer"),
        ("rolout", {}, "unknown method 'rolout'; known: rollout"),
    ],
)
def test_what_a_method_cannot_do_is_said(
    ours: Build, method: str, options: dict, message: str
) -> None:
    model, images = ours()
    with pytest.raises(ValueError, match=message):
        compute_maps(model, images, methods=[method], options=options)


def test_entropy_runs_from_zero_to_log_of_the_patches() -> None:
    one_hot = torch.zeros(1, 4, 6)
    one_hot[0, 1, 2] = 3.0
    assert compute_entropy(one_hot) == 0
    assert torch.allclose(compute_entropy(torch.ones(1, 4, 6)), torch.tensor(24.0).log())
    assert compute_entropy(torch.zeros(1, 4, 6)) == 0


def test_a_planted_sink_shows_in_the_prefix_mass() -> None:
    mass = torch.full((1, 1, 10), 0.01)
    mass[..., 0] = 0.91
    _, prefix = split_prefix(mass, num_prefix_tokens=1, grid=(3, 3))
    assert abs(float(prefix) - 0.91) < 1e-6
