"""What is captured is what the model computed, and the model is left as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.explanation.model_zoo import MODELS
from vit.explanation.capture.forward import capture_attention
from vit.model.logits import compute_logits

Build = Callable[..., tuple[nn.Module, Tensor]]
FAMILIES = [
    "ours",
    "ours-registers-norms",
    "timm",
    "timm-qk-norm",
    "timm-eva",
    "timm-rotary",
    "torchvision",
    "hugging-face",
]


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    output = model(images)
    return getattr(output, "logits", output)


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gradients", [False, True])
def test_logits_are_bit_equal_with_and_without_capture(
    build: Build, family: str, gradients: bool
) -> None:
    model, images = build(family)
    with torch.set_grad_enabled(gradients):
        expected = logits_of(model, images)
        with capture_attention(model, gradients=gradients) as record:
            assert torch.equal(logits_of(model, images), expected)
    assert len(record.attentions) == 3
    assert count_hooks(model) == 0


def attend(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    """Attention with its weights in the autograd graph, where `weights` collects them."""
    attention = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(dim=-1)
    attention.retain_grad()
    weights.append(attention)
    return attention @ value


weights: list[Tensor] = []


@pytest.mark.parametrize("family", ["ours", "timm", "timm-eva", "timm-rotary", "hugging-face"])
def test_gradients_equal_autograd_through_explicit_attention(
    build: Build, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = build(family)
    model, images = model.double(), images.double()
    with capture_attention(model, gradients=True) as record:
        ours_ = record.gradients(logits_of(model, images)[:, 1])
    weights.clear()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        logits_of(model, images)[:, 1].sum().backward()
    assert len(weights) == len(ours_) == 3
    for gradient, attention in zip(ours_, weights, strict=True):
        assert attention.grad is not None
        assert (gradient - attention.grad).abs().max() < 1e-10 * attention.grad.abs().max() + 1e-14


STEP = 1e-5
QUICK = ("ours", "ours-explicit", "timm", "torchvision", "hugging-face")


@pytest.mark.parametrize(
    "family",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.extended)
        for name in ("ours-explicit", *MODELS)
    ],
)
def test_a_penalty_on_attention_trains_the_weights(build: Build, family: str) -> None:
    """In training mode: its derivative along a random direction of all weights."""
    model, images = build(family.removesuffix("-explicit"))
    model, images = model.double().train(), images.double()
    if family == "ours-explicit":
        for block in model.blocks:
            block.attn.backend = "explicit"

    def penalise() -> Tensor:
        torch.manual_seed(0)
        with capture_attention(model, gradients=True) as record:
            compute_logits(model, images)
        columns = torch.linspace(0, 1, record.attentions[0].shape[-1], dtype=torch.float64)
        return torch.stack([(a.square() @ columns).mean() for a in record.attentions]).sum()

    weights = list(model.parameters())
    gradients = torch.autograd.grad(penalise(), weights, allow_unused=True)
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(weight.shape, generator=generator) for weight in weights]
    slope = sum(
        (gradient * step).sum()
        for gradient, step in zip(gradients, steps, strict=True)
        if gradient is not None
    )
    penalties = []
    for sign in (STEP, -2 * STEP):
        for weight, step in zip(weights, steps, strict=True):
            weight.data += sign * step
        penalties.append(penalise())
    expected = (penalties[0] - penalties[1]) / (2 * STEP)
    assert abs(slope - expected) < 1e-3 * abs(expected)


def test_hooks_are_removed_when_the_model_raises(ours: Build) -> None:
    model, _ = ours()
    with pytest.raises(ValueError, match="set_input_size"), capture_attention(model):
        model(torch.zeros(1, 3, 30, 48))
    assert count_hooks(model) == 0


def test_a_bypassed_layer_is_an_error_also_after_a_whole_pass(ours: Build) -> None:
    model, images = ours()
    with torch.no_grad(), capture_attention(model) as record:
        model(images)
        model.blocks[1].forward = lambda tokens, *args, **options: tokens
        model(images)
        with pytest.raises(RuntimeError, match="1 of 3 attention layers were not captured"):
            _ = record.attentions


def test_a_model_in_training_is_captured_as_it_runs(ours: Build) -> None:
    """Its last block asks only for the class token; attention and gradient are of that row."""
    model, images = ours()
    model, images = model.double(), images.double()
    found = {}
    for training in (False, True):
        with capture_attention(model.train(training), gradients=True) as record:
            gradients = record.gradients(model(images)[:, 1])
        found[training] = record.attentions, gradients
    for trained, at_rest in zip(found[True], found[False], strict=True):
        assert trained[-1].shape == (2, 3, 1, 25)
        assert (trained[-1] - at_rest[-1][:, :, :1]).abs().max() < 1e-12
        assert (trained[0] - at_rest[0]).abs().max() < 1e-12
