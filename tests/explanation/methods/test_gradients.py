"""Class-specific maps against loops written out image by image in float64, and against finite
differences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vit.explanation.capture import layers
from vit.explanation.capture.forward import Forward, capture_attention, run_forward
from vit.explanation.methods.gradients import (
    compute_attention_gradcam,
    compute_cdam,
    compute_gae,
    compute_gradient_rollout,
    compute_input_x_gradient,
    compute_legrad,
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
    monkeypatch.setattr(layers, "CHUNK_ELEMENTS", 3 * 25 * 7)  # seven of 24 rows
    assert (compute_gae(*arguments) - whole).abs().max() < 1e-12


def test_gradient_rollout_equals_rollout_of_each_layers_own_gradient(ours: Build) -> None:
    model, images = ours()
    model, images = model.double(), images.double()
    arguments = record(model, images)
    found = compute_gradient_rollout(*arguments)
    attentions, gradients = attention_and_gradient(model, images[:1])
    expected = torch.eye(25, dtype=torch.float64)
    mirrored = torch.eye(25, dtype=torch.float64)
    for index, (attention, gradient) in enumerate(zip(attentions, gradients, strict=True)):
        expected = mix((attention * gradient).mean(dim=0)) @ expected
        mirrored = mix((attention * gradients[-1 - index]).mean(dim=0)) @ mirrored
    assert (found[0] - expected[0]).abs().max() < 1e-10
    assert (
        found[0] - mirrored[0]
    ).abs().max() > 1e-3  # pairing layers the wrong way round would show


def mix(weighted: Tensor) -> Tensor:
    weighted = weighted.clamp(min=0)
    sums = weighted.sum(dim=-1, keepdim=True)
    rows = torch.where(sums > 0, weighted / sums, torch.eye(len(weighted), dtype=weighted.dtype))
    return 0.5 * rows + 0.5 * torch.eye(len(weighted), dtype=weighted.dtype)


def test_attention_gradcam_equals_its_formula(ours: Build) -> None:
    model, images = ours()
    model, images = model.double(), images.double()
    arguments = record(model, images)
    found = compute_attention_gradcam(*arguments)
    for image in range(2):
        attentions, gradients = attention_and_gradient(model, images[image : image + 1])
        weights = gradients[-1][:, 0, 1:].mean(dim=-1)  # [H]
        expected = (attentions[-1][:, 0] * weights[:, None]).mean(dim=0).clamp(min=0)
        assert (found[image] - expected).abs().max() < 1e-12


def test_legrad_equals_its_formula_on_torchvisions_layers(build: Build) -> None:
    """The score of layer l is torchvision's head on the normalised mean of its tokens, class token
    included."""
    model, images = build("torchvision")
    model, images = model.double(), images.double()
    arguments = record(model, images)
    found = compute_legrad(*arguments)
    for image in range(2):
        expected = torch.zeros(17, dtype=torch.float64)
        for block in range(3):
            expected += legrad_of_layer(model, images[image : image + 1], block) / 3
        assert (found[image] - expected).abs().max() < 1e-10


def legrad_of_layer(model: nn.Module, image: Tensor, index: int) -> Tensor:
    """mean over heads and queries of (∂s/∂A)⁺ by autograd through attention written out."""
    tokens = (
        torch.cat([model.class_token, model._process_input(image)], dim=1)
        + model.encoder.pos_embedding
    )
    for block in model.encoder.layers[:index]:
        tokens = block(tokens)
    block = model.encoder.layers[index]
    module, inputs = block.self_attention, block.ln_1(tokens)
    heads = torch.nn.functional.linear(inputs, module.in_proj_weight, module.in_proj_bias)
    query, key, value = heads.unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    attention = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(dim=-1)
    tokens = tokens + module.out_proj((attention @ value).transpose(1, 2).flatten(2))
    tokens = tokens + block.mlp(block.ln_2(tokens))
    score = model.heads(model.encoder.ln(tokens.mean(dim=1)))[0, CLASS]
    (gradient,) = torch.autograd.grad(score, attention)
    return gradient[0].clamp(min=0).mean(dim=(0, 1))


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_cdam_equals_central_differences(ours: Build, pool: str) -> None:
    model, images = ours(global_pool=pool)
    model, images = model.double(), images[:1].double()
    arguments = record(model, images)
    found = compute_cdam(*arguments)[0]
    for token in (0, 5):

        def logit(scale: float, token: int = token) -> float:
            def scaled(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                tokens = args[0].clone()
                tokens[:, token] *= scale
                return (tokens, *args[1:])

            handle = model.blocks[-1].attn.register_forward_pre_hook(scaled)
            with torch.no_grad():
                result = float(model(images)[0, CLASS])
            handle.remove()
            return result

        expected = (logit(1 + 1e-5) - logit(1 - 1e-5)) / 2e-5  # d/ds f(s·T) = Σ_d T ∂f/∂T
        assert abs(float(found[token]) - expected) < 1e-4 * abs(expected) + 1e-9


def test_input_x_gradient_equals_central_differences(ours: Build) -> None:
    model, images = ours()
    model, images = model.double(), images[:1].double()
    arguments = record(model, images)
    found = compute_input_x_gradient(*arguments)[0]
    assert found[0] == 0  # the class token has no pixels
    patch = torch.zeros_like(images)
    patch[..., 8:16, 16:24] = images[..., 8:16, 16:24]  # row 1, column 2 of 4×6 patches
    with torch.no_grad():
        expected = (model(images + 1e-5 * patch) - model(images - 1e-5 * patch))[0, CLASS] / 2e-5
    assert abs(found[1 + 6 + 2] - expected) < 1e-4 * abs(expected)


def test_two_calls_give_equal_maps_and_images_do_not_mix(ours: Build) -> None:
    model, images = ours()
    for compute in (compute_gae, compute_gradient_rollout, compute_attention_gradcam, compute_cdam):
        first = compute(*record(model, images))
        assert torch.equal(first, compute(*record(model, images)))
        alone = compute(*record(model, images[1:]))
        assert (first[1] - alone[0]).abs().max() < 1e-5 * first.abs().max()


def test_explaining_leaves_modes_flags_and_gradients_alone(ours: Build) -> None:
    model, images = ours()
    model.train()
    model.blocks[1].eval()
    model.head.weight.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    compute_gae(*record(model, images))
    assert model.training
    assert not model.blocks[1].training
    assert model.blocks[2].training
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
