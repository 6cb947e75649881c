"""The removal gradient against finite differences of gates in the model itself, and against cases
worked by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.explanation.model_zoo import MODELS, build
from vit.explanation.capture.forward import run_forward
from vit.explanation.methods.gradients import compute_removal_map
from vit.model.logits import compute_logits

Build = Callable[..., tuple[nn.Module, Tensor]]
CLASS, STEP = 3, 1e-4
# a maximum has no first order; how another library's attention pools is unknown
WITHOUT_GATES = ("timm-max", "hugging-face-siglip-tower")


class Gates(TorchFunctionMode):
    """A gate g_j of each token, [B, N], in every softmax over tokens: log g is added to the
    scores."""

    def __init__(self, gates: Tensor) -> None:
        super().__init__()
        self.bias = gates.log()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            bias = self.bias[:, None, None, -key.shape[-2] :].expand(
                -1, query.shape[1], query.shape[2], -1
            )
            given = kwargs.get("attn_mask")
            return func(
                query,
                key,
                value,
                attn_mask=bias if given is None else bias + given,
                scale=kwargs.get("scale"),
            )
        if func is F.multi_head_attention_forward:
            query, key, value, _size, num_heads, weight, bias, *_, out_weight, out_bias = args[:13]
            q, k, v = (
                F.linear(x, w, b)
                for x, w, b in zip(args[:3], weight.chunk(3), bias.chunk(3), strict=True)
            )
            q, k, v = (
                x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v)
            )  # from [N, B, D]
            scores = (
                q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
                + self.bias[:, None, None, -k.shape[-2] :]
            )
            heads = (scores.softmax(dim=-1) @ v).permute(2, 0, 1, 3).flatten(2)
            return F.linear(heads, out_weight, out_bias), None
        if (
            func in (Tensor.softmax, torch.softmax, F.softmax)
            and args[0].shape[-1] <= self.bias.shape[1]
        ):
            tokens = args[0].shape[-1]
            bias = self.bias[:, -tokens:].reshape(-1, *[1] * (args[0].ndim - 2), tokens)
            return func(args[0] + bias, *args[1:], **kwargs)
        return func(*args, **kwargs)


def find_last_tokens(model: nn.Module, images: Tensor, count: int) -> nn.Module:
    """The last module that gives a feature for each of `count` tokens: what is pooled."""
    given: list[nn.Module] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.shape[:-1] == (len(images), count):
            given.append(module)

    handles = [module.register_forward_hook(keep) for module in model.modules()]
    compute_logits(model, images)
    for handle in handles:
        handle.remove()
    return given[-1]


def gated_score(
    name: str, model: Any, images: Tensor, gates: Tensor, *, num_prefix: int, probability: bool
) -> Tensor:
    """The score with gates in every attention and in the mean of the pooling, which here is fed
    with scaled tokens."""
    first = 0 if "all" in MODELS[name].reads else num_prefix

    def scale(module: nn.Module, args: Any, tokens: Tensor) -> Tensor:
        weight = gates[:, first:] / gates[:, first:].mean(dim=1, keepdim=True)
        return torch.cat([tokens[:, :first], tokens[:, first:] * weight[..., None]], dim=1)

    with torch.no_grad():
        last = find_last_tokens(model, images, gates.shape[1])
        handles = [last.register_forward_hook(scale)] if "mean" in MODELS[name].reads else []
        with Gates(gates):
            logits = compute_logits(model, images)
    for handle in handles:
        handle.remove()
    return (logits.softmax(dim=1) if probability else logits)[:, CLASS]


def removal_gradient(model: nn.Module, images: Tensor, *, probability: bool) -> tuple[Tensor, int]:
    forward = run_forward(model, images, gradients=True)
    if not probability:
        forward.target = replace(forward.target, value=forward.target.score)
    classes = torch.full((len(images),), CLASS)
    return compute_removal_map(forward, classes).detach(), forward.num_prefix_tokens


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_GATES])
@pytest.mark.parametrize("probability", [False, True])
def test_it_is_the_derivative_of_gates_in_the_model(name: str, probability: bool) -> None:
    model, images = build(name)
    model, images = model.double(), images.double()
    found, num_prefix = removal_gradient(model, images, probability=probability)
    for token in (num_prefix, num_prefix + 3, found.shape[1] - 1):
        scores = []
        for step in (STEP, -STEP):
            gates = torch.ones_like(found)
            gates[:, token] += step
            options = {"num_prefix": num_prefix, "probability": probability}
            scores.append(gated_score(name, model, images, gates, **options))
        expected = (scores[0] - scores[1]) / (2 * STEP)
        assert (found[:, token] - expected).abs().max() < 1e-6 * found.abs().max()


class WeightedMean(nn.Module):
    """A classifier of a mean whose weights depend on the tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.weigh = encoder, nn.Linear(24, 1)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.encoder.forward_features(images)
        pooled = (self.weigh(tokens).softmax(dim=1).mT @ tokens)[:, 0]
        return self.encoder.forward_head(pooled[:, None])


def test_an_unknown_pooling_is_refused(from_timm: Build) -> None:
    encoder, images = from_timm(class_token=False, global_pool="avg")
    with pytest.raises(ValueError, match="WeightedMean pools by something other than a mean"):
        removal_gradient(WeightedMean(encoder), images, probability=False)
