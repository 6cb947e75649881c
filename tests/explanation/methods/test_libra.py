"""LibraGrad's gradients: complete in float64 for every supported architecture, with the forward
pass untouched."""

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers import SimpleNorm
from torch import Tensor, nn
from torch.nn import functional as F

from tests.explanation.model_zoo import MODELS, build, build_timm
from vit.explanation import targets
from vit.explanation.capture.forward import Forward, capture_attention, run_forward
from vit.explanation.methods import maps
from vit.explanation.methods.libra import LibraGradients
from vit.explanation.methods.maps import compute_maps
from vit.model.logits import compute_logits

CLASS = 3
ADDED = re.compile(
    r"bias$|beta$|tokens?$|pos_embed|pos_embedding|position_embedding|class_embedding"
)


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


RULES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (F.gelu, lambda x: (1 + torch.erf(x / 2**0.5)) / 2),  # the gradient is the gate Φ(x)
    "silu": (F.silu, torch.sigmoid),
    "square": (torch.square, lambda x: x),
    "softmax": (lambda x: x.softmax(dim=-1) * 2 + x, torch.ones_like),
    "product": (lambda x: x * (3 * x), lambda x: 3 * x),  # (3x + 3x) / 2
    "power": (lambda x: (x + 4) ** 3, lambda x: (x + 4) ** 2),
    "square root": (lambda x: torch.sqrt(x + 4), lambda x: (x + 4) ** -0.5),
    "division": (lambda x: x / (x * x).sum().sqrt(), lambda x: torch.ones_like(x) / x.norm()),
    "reciprocal": (lambda x: x * (1 / x.exp()), lambda x: (-x).exp()),
    # of f(x) = f(0) + x · g, and the slope at 0
    "tanh": (torch.tanh, lambda x: (x.tanh() / x).nan_to_num(1.0)),
    "elu, in place": (lambda x: F.elu(x * 1, inplace=True), lambda x: elu_gate(x)),
    # gates, which are constants where they multiply a signal
    "gelu written out": (
        lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        lambda x: (1 + torch.erf(x / 2**0.5)) / 2,
    ),
    "hard gate": (lambda x: F.hardsigmoid(x[None])[0] * x, lambda x: (x / 6 + 0.5).clamp(0, 1)),
    "gate in place": (lambda x: (x * 1).mul_(x.sigmoid()), torch.sigmoid),
}


def elu_gate(x: Tensor) -> Tensor:
    return torch.where(x < 0, x.expm1() / x, 1.0)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_worked_by_hand(rule: str) -> None:
    function, gradient = RULES[rule]
    x = torch.tensor([-2.0, -0.5, 0.0, 0.25, 3.0], dtype=torch.float64, requires_grad=True)
    with LibraGradients():
        result = function(x)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], gradient(x.detach()))


def divide_in_place(x: Tensor) -> Tensor:
    x = x * 1
    x /= x.norm(dim=-1, keepdim=True)
    return x


WEIGHT = torch.linspace(-1, 2, 24, dtype=torch.float64)
# functions without a constant
WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    **{f.__name__: f for f in (F.elu, F.celu, F.selu, F.relu6, F.hardtanh, F.softsign)},
    "layer norm": lambda x: F.layer_norm(x, (24,), WEIGHT),
    "rms norm": lambda x: F.rms_norm(x, (24,), WEIGHT),
    "rms norm, written": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "layer norm, written": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "group norm": lambda x: F.group_norm(x, 4, WEIGHT),
    "group norm of places": lambda x: F.group_norm(x.reshape(2, 6, 2, 2), 3),
    "simple norm": SimpleNorm(24).double().requires_grad_(False),
    "division in place": divide_in_place,
    "cosine of normalised vectors": lambda x: 20 * F.normalize(x) @ F.normalize(WEIGHT[None]).T,
    "cosine by the norm": lambda x: (x / x.norm(dim=-1, keepdim=True)) @ WEIGHT,
    "matrix product": lambda x: (x[:, :, None] @ x[:, None, :]).sum(dim=-1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_function_that_is_written_out_is_complete(name: str) -> None:
    """The result is the sum of input times gradient, and stays as it is, also in place."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, generator=generator, dtype=torch.float64, requires_grad=True)
    with LibraGradients():
        result = WRITTEN[name](x)
    assert torch.equal(result, WRITTEN[name](x))
    (gradient,) = torch.autograd.grad((result * result.detach()).sum(), x)
    torch.testing.assert_close((x * gradient).sum(), result.square().sum())


def test_outputs_of_a_softmax_are_refused() -> None:
    model, images = build("timm")
    with pytest.raises(ValueError, match=r"ends in a softmax.* such as gae"):
        compute_maps(nn.Sequential(model, nn.Softmax(-1)), images, methods=["libra-fullgrad"])


@pytest.mark.parametrize(
    ("function", "is_constant"),
    [
        (lambda features: F.normalize(features) @ torch.arange(1.0, 25), False),
        (lambda features: features[:, 0] / features[:, 1], False),
        (lambda features: features.softmax(dim=1)[:, 0], True),
    ],
)
def test_a_target_follows_the_rules_too(
    function: Callable[[Tensor], Tensor], is_constant: bool
) -> None:
    """A constant by LibraGrad's rules, which leaves no map, keeps its own gradient."""
    torch.manual_seed(0)
    model = build_timm(num_classes=0).eval()
    target = targets.build_target(function, (), "features")
    forward, classes, _ = compute_maps(
        model, torch.randn(2, 3, 64, 96), methods=["libra-fullgrad"], target=target
    )
    score = forward.score(classes[:, 0])
    (gradient,) = torch.autograd.grad(score.sum(), forward.logits)
    total = (forward.logits * gradient).sum(dim=1)
    assert torch.allclose(total, score, rtol=1e-4) is not is_constant
    assert gradient.abs().max() > 0


def test_the_combination_is_the_mean_of_standardised_maps() -> None:
    name = "libra-removal"
    model, images = build("ours-registers-norms")
    parts = ["libra-fullgrad", "libra-input-x-gradient", "removal-gradient"]
    _, _, (*found, combined) = compute_maps(model, images, methods=[*parts, name])
    values = torch.stack([of_method[:, 0].flatten(1) for of_method in found])
    expected = (values / values.std(dim=-1, keepdim=True)).mean(dim=0)
    torch.testing.assert_close(combined[:, 0].flatten(1), expected, rtol=1e-4, atol=1e-5)


def test_the_combination_keeps_one_graph_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two passes, the first is freed before the second one."""
    passes: list[weakref.ref[Forward]] = []

    def run(*args: Any, **options: Any) -> Forward:
        assert [earlier() for earlier in passes] == [None] * len(passes)
        forward = run_forward(*args, **options)
        passes.append(weakref.ref(forward))
        return forward

    monkeypatch.setattr(maps, "run_forward", run)
    compute_maps(*build("ours"), methods=["libra-removal"])
    assert len(passes) == 2
