"""One recorded forward pass of a batch, and how its tokens are to be read: a map is uᵀM, where the readout u says how
much each output token counts in the pooled feature, and M which input tokens it came from."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.capture import AttentionRecord, capture_attention
from vit.explanation.capture.pooling import (
    capture_attention_pooling,
    capture_last_tokens,
    compute_readout,
    tells_pooling,
)
from vit.explanation.capture.tokens import Grid as Grid
from vit.explanation.capture.tokens import check_places, count_prefix_tokens, find_grid, replace_blocks
from vit.model.logits import compute_logits

Images = Float[Tensor, "B 3 height width"]  # as the model takes them
PatchMaps = Float[Tensor, "B rows columns"]


@dataclass
class Forward:
    """One recorded forward pass of a batch and how its tokens are to be read."""

    model: nn.Module
    images: Images
    logits: Float[Tensor, "B C"]
    record: AttentionRecord
    readout: Float[Tensor, "B N"]  # rows sum to one
    num_prefix_tokens: int
    grid: Grid
    tokens: Float[Tensor, "B N D"]  # what is pooled: after the last norm, in the graph with gradients
    pooling: dict[str, Tensor]  # what an attention pooling computed, see `capture_attention_pooling`
    plain: "Forward | None" = None  # of a pass within LibraGradients: the same with the model's own, where it was run


@torch.inference_mode(False)  # there is no graph in it, and a graph is what gradients and readouts come from
def run_forward(
    model: nn.Module,
    images: Images,
    *,
    gradients: bool = False,
    grid: Grid | None = None,
    block_tokens: bool = False,
    verify: bool = True,
) -> Forward:
    """Run `model` in evaluation mode with its attention recorded; modes and flags go back afterwards. With `gradients`
    the autograd graph is kept from the images on, without the parameters. `grid` is that of all patches where some are
    left out (`keep_tokens`); `verify` the capture unless that of an earlier pass was. Raises ValueError for a model
    whose attention or readout is not understood."""
    if next(model.parameters()).is_inference():
        name = type(model).__name__
        raise ValueError(f"{name}'s weights were made within torch.inference_mode; load it outside, to differentiate")
    if gradients:
        images = images.detach().clone().requires_grad_()
    pooling: dict[str, Tensor] = {}
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_evaluation_mode(model))
        enter(torch.set_grad_enabled(gradients))
        record = enter(capture_attention(model, gradients=gradients, block_tokens=block_tokens, verify=verify))
        if tells_pooling(model):
            pooling, net = enter(capture_attention_pooling(model)), cast("Any", model)
            tokens = net.forward_features(images)
            logits = net.forward_head(tokens)
            num_prefix, found = _find_places(model, images, record, grid)
            readout = compute_readout(model, tokens, pooling, num_prefix_tokens=num_prefix)
        else:
            last = enter(capture_last_tokens(model, record.blocks))
            logits = compute_logits(model, images)
            num_prefix, found = _find_places(model, images, record, grid)
            readout, tokens = last.measure_readout(logits)
            logits, tokens = (logits, tokens) if gradients else (logits.detach(), tokens.detach())
    if not tells_pooling(model) and grid is None:
        with _evaluation_mode(model):
            check_places(model, images[:1], num_prefix=num_prefix, grid=found)
    return Forward(model, images, logits, record, readout, num_prefix, found, tokens, pooling)


def _find_places(model: nn.Module, images: Images, record: AttentionRecord, grid: Grid | None) -> tuple[int, Grid]:
    """The number of prefix tokens, and the grid of the patches."""
    first, shapes = record.layers[0], {(layer.batch, layer.num_tokens) for layer in record.layers}
    if len(shapes) > 1 or first.batch != len(images):
        raise ValueError(
            f"{type(model).__name__} attends within windows, in branches or between fewer and fewer patches, so no "
            "attention between all of its input patches exists to be explained"
        )
    prefix, size = count_prefix_tokens(model), (images.shape[-2], images.shape[-1])
    return prefix, grid or find_grid(model, size, first.num_tokens - prefix)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no parameter that asks for a gradient, for as long as this lasts."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval().requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)


def classify_token(forward: Forward, token: Float[Tensor, "K D"]) -> Float[Tensor, "K C"]:
    """The logits if every token that leaves the encoder were `token`, for each of K: the classifier without its
    pooling. Where the model doesn't show it, one image runs with `token` in the place of what the blocks give."""
    alike, net = token[:, None].expand(-1, forward.num_prefix_tokens + 1, -1), cast("Any", forward.model)
    if tells_pooling(net):
        logits: Tensor = net.forward_head(net.norm(alike))
        return logits
    with _evaluation_mode(forward.model), replace_blocks(forward.record.blocks, lambda *args, **options: alike):
        try:
            return compute_logits(forward.model, forward.images[:1].detach())
        except RuntimeError as error:  # a shape
            name = type(forward.model).__name__
            raise ValueError(f"{name} can't classify a single patch, which LeGrad asks for: {error}") from error


def split_prefix(
    mass: Float[Tensor, "*batch N"], *, num_prefix_tokens: int, grid: Grid
) -> tuple[Float[Tensor, "*batch rows columns"], Float[Tensor, "*batch"]]:
    """The patches' mass on their grid, and the fraction (0 to 1, of absolute values) that lies in prefix tokens."""
    patches = torch.unflatten(mass[..., num_prefix_tokens:], -1, grid)
    total = mass.abs().sum(dim=-1)
    prefix = mass[..., :num_prefix_tokens].abs().sum(dim=-1)
    return patches, torch.where(total > 0, prefix / total.clamp_min(torch.finfo(mass.dtype).tiny), 0.0)


def compute_entropy(maps: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    """Entropy in nats of the maps' absolute values taken as a distribution: 0 (one patch) to log(patches)."""
    mass = maps.flatten(-2).abs()
    distribution = mass / mass.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
    entropy: Tensor = torch.special.entr(distribution).sum(dim=-1)
    return entropy
