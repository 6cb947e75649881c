"""How a model reads its tokens: which of them the class decision is made from, and where they lie on the image.

A map is uᵀM: the readout vector u says how much each output token counts in the pooled feature, M which input tokens it
came from. Reading mean-pooled models at the class token (or at token 0 where there is none) is a common mistake.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from vit.explanation.capture.capture import AttentionRecord, capture_attention
from vit.explanation.capture.layers import SUPPORTED
from vit.model.logits import compute_logits

Images = Float[Tensor, "B 3 height width"]  # as the model takes them
PatchMaps = Float[Tensor, "B rows columns"]
Grid = tuple[int, int]  # (rows, columns) of patches


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
    tokens: Float[Tensor, "B N D"] | None  # before pooling, where the model shows them
    pooling: dict[str, Tensor]  # what an attention pooling computed, see `_capture_pooling`


def run_forward(model: nn.Module, images: Images, *, gradients: bool = False, grid: Grid | None = None) -> Forward:
    """Run `model` in evaluation mode with its attention recorded; modes and flags go back afterwards. With `gradients`
    the autograd graph is kept from the images on, without the parameters. `grid` is that of all patches where some are
    left out (`keep_tokens`)."""
    if gradients:
        images = images.detach().clone().requires_grad_()
    with (
        _evaluation_mode(model),
        torch.set_grad_enabled(gradients),
        capture_attention(model, gradients=gradients) as record,
        _capture_pooling(model) as pooling,
    ):
        tokens, logits = _run(model, images)
        num_tokens, num_prefix = record.layers[0].num_tokens, count_prefix_tokens(model)
        readout = _compute_readout(model, logits.new_zeros(len(images), num_tokens), tokens, pooling)
    grid = grid or find_grid(model, (images.shape[-2], images.shape[-1]), num_tokens - num_prefix)
    return Forward(model, images, logits, record, readout, num_prefix, grid, tokens, pooling)


def _run(model: Any, images: Tensor) -> tuple[Tensor | None, Tensor]:
    """The tokens before pooling, where the model shows them, and the logits."""
    if hasattr(model, "forward_features") and hasattr(model, "forward_head"):
        tokens = model.forward_features(images)
        return tokens, model.forward_head(tokens)
    return None, compute_logits(model, images)


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


def classify_token(model: Any, token: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
    """The logits if every token before the final norm were `token`: the classifier without its pooling."""
    if hasattr(model, "forward_head") and hasattr(model, "norm"):
        alike = token[:, None].expand(-1, count_prefix_tokens(model) + 1, -1)
        logits: Tensor = model.forward_head(model.norm(alike))
    elif hasattr(model, "heads"):  # torchvision
        logits = model.heads(model.encoder.ln(token))
    elif hasattr(model, "vit") and hasattr(model, "classifier"):  # Hugging Face
        logits = model.classifier(model.vit.layernorm(token))
    else:
        raise ValueError(f"{type(model).__name__} has no classifier that LeGrad knows; known: {SUPPORTED}")
    return logits


def count_prefix_tokens(model: nn.Module) -> int:
    """Tokens in front of the patches: class, distillation, registers."""
    prefix = getattr(model, "num_prefix_tokens", None)
    return prefix if isinstance(prefix, int) else 1  # torchvision's and Hugging Face's ViT: the class token


def find_grid(model: nn.Module, size: tuple[int, int], num_patches: int) -> tuple[int, int]:
    """(rows, columns) of patches on an input of `size` (height, width)."""
    height, width = size
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple) and (height // patch[0]) * (width // patch[1]) == num_patches:
        return height // patch[0], width // patch[1]
    rows = max(round(math.sqrt(num_patches * height / width)), 1)  # square patches
    if rows * (num_patches // rows) != num_patches:
        raise ValueError(f"{num_patches} patches do not tile an input of {height}×{width} pixels")
    return rows, num_patches // rows


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


@torch.no_grad()
def _compute_readout(
    model: Any, readout: Float[Tensor, "B N"], tokens: Tensor | None, pooling: dict[str, Tensor]
) -> Float[Tensor, "B N"]:
    """Fill the zeros of `readout` with how much each token counts in the pooled feature."""
    num_tokens, num_prefix = readout.shape[1], count_prefix_tokens(model)
    pool = getattr(model, "global_pool", "token")  # torchvision's and Hugging Face's ViT read the class token
    first = 0 if getattr(model, "pool_include_prefix", False) else num_prefix
    if pool == "token":
        distilled = getattr(model, "head_dist", None) is not None
        readout[:, : 1 + distilled] = 1 / (1 + distilled)
    elif pool == "avg":
        readout[:, first:] = 1 / (num_tokens - first)
    elif pool in ("max", "avgmax"):
        assert tokens is not None
        winners = F.one_hot(tokens[:, first:].argmax(dim=1), num_tokens - first).float()  # [B, D, N]: of each channel
        maxima = winners.mean(dim=1)
        readout[:, first:] = maxima if pool == "max" else 0.5 / (num_tokens - first) + 0.5 * maxima
    elif pool == "attention":
        readout[:, num_prefix:] = model.compute_pool_weights(tokens)
    elif pool == "map" and pooling:
        query, key = pooling["q_norm"], pooling["k_norm"]
        attention = (query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)).softmax(dim=-1)  # [B, H, latents, N]
        readout[:, num_tokens - key.shape[-2] :] = attention.mean(dim=(1, 2))
    else:
        raise ValueError(f"unknown pooling {pool!r}; known: token, avg, max, avgmax, attention, map")
    return readout


@contextmanager
def _capture_pooling(model: Any) -> Iterator[dict[str, Tensor]]:
    """What attention pooling computes: q_norm, k_norm, kv and heads (its result before the projection) of timm's
    (`global_pool="map"`), and pooled, the pooled feature, of ours. Nothing for other models."""
    captured: dict[str, Tensor] = {}

    def keep_output(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        captured[name] = output

    def keep_input(name: str, module: nn.Module, args: Any) -> None:
        captured[name] = args[0]

    handles: list[RemovableHandle] = []
    if hasattr(pool := getattr(model, "attn_pool", None), "latent"):
        handles += [
            getattr(pool, name).register_forward_hook(partial(keep_output, name)) for name in ("q_norm", "k_norm", "kv")
        ]
        handles.append(pool.proj.register_forward_pre_hook(partial(keep_input, "heads")))
    elif getattr(model, "seq_pool", None) is not None:
        handles.append(model.fc_norm.register_forward_pre_hook(partial(keep_input, "pooled")))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
