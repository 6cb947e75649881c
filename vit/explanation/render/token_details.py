"""The details of tokens that a page shows, in few bytes: the attention of each token, the
prediction from this token alone, and its features (`token_features`).

A row of attention is stored as 8-bit fractions of its maxima. Parts that don't fit the given bytes
are left out: single heads first, then layers, then features, then rollout.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.explanation.capture.forward import Forward, classify_token
from vit.explanation.capture.tokens import count_prefix_tokens
from vit.explanation.methods.rollout import HEAD_FUSIONS, attention_rollout
from vit.explanation.render.token_features import (
    TokenFeatures,
    count_feature_bytes,
    measure_features,
)
from vit.model.logits import at_least_float32

MAX_LENS_TARGETS = 3
ToProbabilities = Callable[[Tensor], Tensor]


class QuantisedRows(NamedTuple):
    """Rows of attention. Columns are the prefix tokens, then the patches. Row i takes
    values[i, j] · maxima[i, 0 for a prefix token, else 1] / 255 from column j."""

    values: UInt8[Tensor, "rows N"]
    maxima: Float[Tensor, "rows 2"]


class TokenAttention(NamedTuple):
    """Attention with a row for each token. `layer` None is rollout; `head` None is the mean of
    heads."""

    layer: int | None
    head: int | None
    rows: QuantisedRows


class LogitLens(NamedTuple):
    """The classifier on each output token of each layer: the class that it predicts, its
    probability, and the probabilities of the first classes that are explained."""

    classes: Int[Tensor, "L N"]
    probabilities: Float[Tensor, "L N"]
    target_probabilities: Float[Tensor, "T L N"]


class TokenDetails(NamedTuple):
    """The details of the tokens of one image. Tensors, so that `copy_to_host` copies those of a
    batch at once.

    Attributes:
        num_layers: Number of layers.
        num_heads: Number of heads in each layer.
        prefix_names: Names of the prefix tokens.
        attention: Attention of the tokens.
        pooled: Attention of the pooled feature in each layer and head, uᵀA: L · H rows.
        lens: Predictions from single tokens; None if the model can't classify them.
        features: Features of the tokens; None if the blocks' tokens were not kept.
        head_effects: Loss of the first explained class's score without each head.
    """

    num_layers: int
    num_heads: int
    prefix_names: tuple[str, ...]
    attention: list[TokenAttention]
    pooled: QuantisedRows | None
    lens: LogitLens | None
    features: TokenFeatures | None = None
    head_effects: Float[Tensor, "L H"] | None = None


def measure_tokens(
    forward: Forward,
    image: int,
    *,
    targets: Int[Tensor, " T"],
    max_bytes: int,
    to_probabilities: ToProbabilities | None = None,
    rollout_options: Mapping[str, Any] | None = None,
) -> TokenDetails:
    """Measure the details of one image of the batch.

    Args:
        forward: A forward pass. The logit lens and the features need the output of each block
            (`run_forward(block_tokens=True)`).
        image: Place of the image in the batch.
        targets: Classes that are explained.
        max_bytes: Largest size of all details together; parts that don't fit are left out.
        to_probabilities: Function from logits to probabilities. None: no logit lens.
        rollout_options: Options of the rollout, see `attention_rollout`.
    """
    layers = forward.record.layers
    targets = targets[:MAX_LENS_TARGETS]
    sizes = _measure_sizes(forward, num_targets=len(targets), max_bytes=max_bytes)
    # the most important parts first, until the bytes are spent
    totals = zip(sizes, accumulate(sizes.values()), strict=True)
    parts = {name for name, total in totals if total <= max_bytes}

    lens = None
    if "lens" in parts and to_probabilities is not None:
        lens = _compute_lens(forward, image, targets, to_probabilities)
    pooled = None
    if "pooled" in parts:
        one = slice(image, image + 1)
        pool_weights = at_least_float32(forward.pool_weights[one])[:, None, None]
        pooled_rows = [
            (pool_weights @ at_least_float32(layer.attention(one)))[0, :, 0] for layer in layers
        ]
        pooled = _quantise(torch.cat(pooled_rows), forward)  # [L·H, N]
    features = None
    if "features" in parts:
        features = measure_features(forward, image, max_bytes=sizes["features"])
    return TokenDetails(
        num_layers=len(layers),
        num_heads=layers[0].num_heads,
        prefix_names=_name_prefix_tokens(forward),
        attention=_measure_attention(forward, image, parts, rollout_options or {}),
        pooled=pooled,
        lens=lens,
        features=features,
    )


def _measure_sizes(forward: Forward, *, num_targets: int, max_bytes: int) -> dict[str, int]:
    """Return the size of each part in bytes, the most important part first."""
    layers = forward.record.layers
    num_heads = layers[0].num_heads
    num_tokens = layers[0].num_tokens
    sizes = {
        # two bytes for a class and one for a probability
        "lens": (3 + num_targets) * len(layers) * num_tokens,
        "pooled": len(layers) * num_heads * num_tokens,
        "rollout": num_tokens**2,
        "features": 0,
        "layers": len(layers) * num_tokens**2,
        "heads": len(layers) * num_heads * num_tokens**2,
    }
    # features take as many directions as there is room for
    if layers[0].block_tokens is not None:
        room = max_bytes - sizes["lens"] - sizes["pooled"] - sizes["rollout"]
        sizes["features"] = min(count_feature_bytes(forward), max(room, 0))
    return sizes


def _measure_attention(
    forward: Forward, image: int, parts: Collection[str], rollout_options: Mapping[str, Any]
) -> list[TokenAttention]:
    """Compute the attention of the tokens: rollout, then layers, then single heads."""
    layers = forward.record.layers
    one = slice(image, image + 1)
    attention = []
    if "rollout" in parts:
        # fused layer by layer: for 4,096 tokens the heads of all layers would take 10 GB
        options = dict(rollout_options)
        fusion = options.pop("head_fusion", "mean")
        fuse = HEAD_FUSIONS[fusion]
        fused = [fuse(layer.attention(one), dim=1, keepdim=True) for layer in layers]
        rollout = attention_rollout(fused, **options)[0]
        attention.append(TokenAttention(None, None, _quantise(rollout, forward)))
    if "layers" in parts:
        # a layer's row is the mean of its heads for any fusion of the rollout
        means = fused
        if fusion != "mean":
            means = [layer.attention(one).mean(dim=1, keepdim=True) for layer in layers]
        for number, mean in enumerate(means):
            attention.append(TokenAttention(number, None, _quantise(mean[0, 0], forward)))
    if "heads" in parts:
        for number, layer in enumerate(layers):
            for head, rows in enumerate(layer.attention(one)[0]):  # [N, N]
                attention.append(TokenAttention(number, head, _quantise(rows, forward)))
    return attention


@torch.no_grad()
def _compute_lens(
    forward: Forward,
    image: int,
    targets: Int[Tensor, " T"],
    to_probabilities: ToProbabilities,
) -> LogitLens | None:
    """Compute nostalgebraist's logit lens (2020) for a vision transformer's tokens."""
    layer_probabilities = []
    for layer in forward.record.layers:
        if layer.block_tokens is None:
            return None
        try:
            logits = classify_token(forward, at_least_float32(layer.block_tokens[image].detach()))
        except ValueError:  # the classifier is unknown, so the page has no lens
            return None
        layer_probabilities.append(to_probabilities(logits).float())  # [N, C]

    maxima = [probabilities.max(dim=-1) for probabilities in layer_probabilities]
    return LogitLens(
        classes=torch.stack([maximum.indices for maximum in maxima]),
        probabilities=torch.stack([maximum.values for maximum in maxima]),
        target_probabilities=torch.stack(
            [probabilities[:, targets].T for probabilities in layer_probabilities], dim=1
        ),
    )


def _name_prefix_tokens(forward: Forward) -> tuple[str, ...]:
    names = []
    if getattr(forward.model, "cls_token", True) is not None:
        names.append("class token")
    if getattr(forward.model, "dist_token", None) is not None:
        names.append("distillation token")
    # prompts are the prefix tokens that no model counts
    num_registers = count_prefix_tokens(forward.model) - len(names)
    names += [f"register {number + 1}" for number in range(num_registers)]
    num_prompts = forward.num_prefix_tokens - len(names)
    names += [f"prompt {number + 1}" for number in range(num_prompts)]
    return tuple(names[: forward.num_prefix_tokens])


def _quantise(rows: Float[Tensor, "rows N"], forward: Forward) -> QuantisedRows:
    """Convert rows to 8-bit fractions of their maxima over prefix tokens and over patches."""
    # a register may draw so much that patches would have few of the 256 levels
    parts = [rows[:, : forward.num_prefix_tokens], rows[:, forward.num_prefix_tokens :]]
    # padded, because a model may have no prefix token
    maxima = torch.stack([F.pad(part, (0, 1)).amax(dim=1) for part in parts], dim=1)
    tiny = torch.finfo(rows.dtype).tiny
    fractions = [
        part / maximum[:, None].clamp_min(tiny)
        for part, maximum in zip(parts, maxima.T, strict=True)
    ]
    values = (torch.cat(fractions, dim=1) * 255).round().to(torch.uint8)
    return QuantisedRows(values, maxima.float())
