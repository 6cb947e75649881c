"""LibraGrad's gradients: complete in float64 for every supported architecture, with the forward
pass untouched."""

import re
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vit.explanation.methods.maps as map_computation
from tests.explanation.model_zoo import MODELS, build
from vit.explanation import targets
from vit.explanation.capture.forward import capture_attention, run_forward
from vit.explanation.methods.gradients import compute_difference_x_gradient, compute_fullgrad_plus
from vit.explanation.methods.libra import LibraGradients
from vit.explanation.methods.maps import compute_maps
from vit.model.logits import compute_logits
from vit.model.vision_transformer import VisionTransformer

CLASS = 3
ADDED = re.compile(
    r"bias$|beta$|tokens?$|pos_embed|pos_embedding|position_embedding|class_embedding"
)


def classes_of(images: Tensor) -> Tensor:
    return torch.full((len(images),), CLASS)


def added_tensors(model: nn.Module) -> list[Tensor]:
    """Every parameter and buffer that is added to the signal; nothing else requires a gradient."""
    tensors = [
        *model.named_parameters(),
        *((n, b) for n, b in model.named_buffers() if b.is_floating_point()),
    ]
    model.requires_grad_(False)
    return [tensor.requires_grad_() for name, tensor in tensors if ADDED.search(name)]


@pytest.mark.parametrize("name", MODELS)
def test_the_logit_is_the_sum_of_input_times_gradient_over_inputs_and_biases(name: str) -> None:
    model, images = build(name)
    model, images = model.double(), images.double().requires_grad_()
    added = added_tensors(model)
    with LibraGradients():
        logit = compute_logits(model, images)[:, CLASS].sum()
    parts = [images, *added]
    gradients = torch.autograd.grad(logit, parts, allow_unused=True)
    total = sum(
        (part * gradient).sum()
        for part, gradient in zip(parts, gradients, strict=True)
        if gradient is not None
    )
    torch.testing.assert_close(total, logit, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_results_of_the_forward_pass_are_bit_equal(name: str) -> None:
    model, images = build(name)
    expected = compute_logits(model, images)
    with LibraGradients(), capture_attention(model) as record:
        logits = compute_logits(model, images)
        attentions = record.attentions
    with capture_attention(model) as record:
        compute_logits(model, images)
    assert torch.equal(logits, expected)
    assert all(map(torch.equal, attentions, record.attentions))


def test_plain_gradients_are_not_complete() -> None:
    model, images = build("timm")
    model, images = model.double(), images.double().requires_grad_()
    added = added_tensors(model)
    logit = compute_logits(model, images)[:, CLASS].sum()
    gradients = torch.autograd.grad(logit, [images, *added])
    total = sum(
        (part * gradient).sum() for part, gradient in zip([images, *added], gradients, strict=True)
    )
    assert abs(total - logit) > 1e-2 * abs(logit)


def test_the_tokens_that_enter_a_block_and_the_later_biases_give_the_logit() -> None:
    model, images = build("ours")
    model, images = model.double(), images.double()
    with LibraGradients():
        forward = run_forward(model, images, gradients=True)
    logit = forward.logits[:, CLASS]
    inputs = [layer.block_input for layer in forward.record.layers]
    expected = sum(
        (x * torch.autograd.grad(logit.sum(), x, retain_graph=True)[0]).sum(dim=-1) for x in inputs
    )
    found = compute_fullgrad_plus(forward, classes_of(images))
    torch.testing.assert_close(found, expected.detach())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    with LibraGradients():
        forward = run_forward(model, images, gradients=True)
    total = compute_fullgrad_plus(forward, classes_of(images)).sum(dim=-1)
    torch.testing.assert_close(
        total, len(inputs) * forward.logits[:, CLASS].detach(), rtol=1e-9, atol=0
    )


RULES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (F.gelu, lambda x: (1 + torch.erf(x / 2**0.5)) / 2),  # the gradient is the gate Φ(x)
    "silu": (F.silu, torch.sigmoid),
    "square": (torch.square, lambda x: x),
    "softmax": (lambda x: x.softmax(dim=-1) * 2 + x, torch.ones_like),
    "product": (lambda x: x * (3 * x), lambda x: 3 * x),  # (3x + 3x) / 2
}


@pytest.mark.parametrize("rule", RULES)
def test_gradients_worked_by_hand(rule: str) -> None:
    function, gradient = RULES[rule]
    x = torch.tensor([-2.0, -0.5, 0.0, 0.25, 3.0], dtype=torch.float64, requires_grad=True)
    with LibraGradients():
        result = function(x)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], gradient(x.detach()))


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.LayerNorm(4, bias=False), nn.RMSNorm(4, eps=0.1)]
)
def test_input_times_gradient_of_a_norm_is_its_result_without_the_bias(norm: nn.Module) -> None:
    norm = norm.double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, dtype=torch.float64)
    with LibraGradients():
        result = norm(x)
    (gradient,) = torch.autograd.grad((result @ weights).sum(), x)
    assert torch.equal(result, norm(x))
    bias = getattr(norm, "bias", None)
    expected = (result - (0 if bias is None else bias)) @ weights
    torch.testing.assert_close((x * gradient).sum(dim=-1), expected)


def test_painted_patches_have_no_input_times_gradient() -> None:
    """From the mean colour: 0 for a patch of that colour, and (x - mean)·∂f/∂x summed over the
    others."""
    model, images = build("ours")
    model, images = model.double(), images.double()
    images[:, :, :8, :8] = images[:, :, 8:].mean(dim=(-2, -1), keepdim=True)
    images[:, :, :8, 8:] = images[:, :, :8, :8].mean(
        dim=(-2, -1), keepdim=True
    )  # so that the mean is that colour
    with LibraGradients():
        forward = run_forward(model, images, gradients=True)
    logit = forward.logits[:, CLASS]
    found = compute_difference_x_gradient(forward, classes_of(images))
    (gradient,) = torch.autograd.grad(logit.sum(), forward.images)
    product = ((images - images.mean(dim=(-2, -1), keepdim=True)) * gradient).sum(dim=1)
    expected = product.unflatten(1, (4, 8)).unflatten(3, (6, 8)).sum(dim=(2, 4)).flatten(1)
    torch.testing.assert_close(found[:, 1:], expected)
    assert found[:, 0].abs().max() == 0
    assert found[:, 1].abs().max() < 1e-12 * found.abs().max()


def test_the_combination_is_the_mean_of_standardised_maps() -> None:
    model, images = build("ours-registers-norms")
    parts = ["libra-fullgrad", "libra-input-x-gradient", "removal-gradient"]
    _, _, (*maps, combined) = compute_maps(model, images, methods=[*parts, "libra-removal"])
    values = torch.stack([of_method.values[:, 0].flatten(1) for of_method in maps])
    expected = (values / values.std(dim=-1, keepdim=True)).mean(dim=0)
    torch.testing.assert_close(combined.values[:, 0].flatten(1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", ["gradients", "nothing"])
def test_the_combination_runs_the_model_twice_for_any_number_of_classes(
    monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    model, images = build("ours")
    counted = []
    monkeypatch.setattr(
        map_computation,
        "run_forward",
        lambda *args, **options: counted.append(1) or run_forward(*args, **options),
    )
    several: dict = {
        "methods": ["libra-removal"],
        "target": replace(targets.CLASS, choose=lambda logits: logits.topk(3, dim=1).indices),
    }
    _, _, (maps,) = compute_maps(model, images, **several, keep=keep)
    assert maps.values.shape[1] == 3
    assert len(counted) == 2


class SavedBytes:
    """Counts what autograd keeps for backward passes."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def pack(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        self.now += kept.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(kept, self._forget, kept.nbytes)
        return kept

    def _forget(self, num_bytes: int) -> None:
        self.now -= num_bytes


def measure_saved_bytes(methods: list[str]) -> int:
    """The peak, of a small model with as many tokens as an image of 1,024 pixels has at a patch
    size of 32."""
    model = VisionTransformer(
        img_size=128, patch_size=4, num_classes=4, embed_dim=24, depth=3, num_heads=2
    )
    saved = SavedBytes()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: kept):
        compute_maps(model, torch.randn(1, 3, 128, 128), methods=methods, verify=False)
    return saved.peak


def test_the_combination_keeps_one_graph_at_a_time() -> None:
    """Of two passes the one with LibraGrad's rules keeps more: that is all there is at once."""
    torch.manual_seed(0)
    peak = measure_saved_bytes(["libra-removal"])
    libra = measure_saved_bytes(["libra-fullgrad", "libra-input-x-gradient"])
    own = measure_saved_bytes(["removal-gradient"])

    assert own > 0.2 * libra
    assert peak <= 1.02 * libra
