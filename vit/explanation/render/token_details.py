"""What each token attends to, the class that it alone would give, and what it is like
(`token_features`), in few bytes: what a page shows of a token. A row of attention is stored as
8-bit fractions of its maxima. What does not fit the given bytes is left out: single heads first,
then layers, then features, then rollout."""

from itertools import accumulate
from typing import NamedTuple

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
from vit.explanation.targets import OutputKind, compute_probabilities
from vit.model.logits import at_least_float32
from vit.options import MapOptions

MAX_LENS_TARGETS = 3


class QuantisedRows(NamedTuple):
    """Rows of attention. Columns are the prefix tokens, then the patches; entry [i, j] · maxima[i,
    0 for a prefix token, else 1] / 255 is what row i takes from column j."""

    values: UInt8[Tensor, "rows N"]
    maxima: Float[Tensor, "rows 2"]


class TokenAttention(NamedTuple):
    """A row for each token. `layer` None is rollout; `head` None is the mean over heads."""

    layer: int | None
    head: int | None
    rows: QuantisedRows


class LogitLens(NamedTuple):
    """The classifier on each token that leaves a layer: the class that it alone would give, its
    probability, and those of the first classes that are explained."""

    classes: Int[Tensor, "L N"]
    probabilities: Float[Tensor, "L N"]
    target_probabilities: Float[Tensor, "T L N"]


class TokenDetails(NamedTuple):
    """What is kept of the tokens of one image. Tensors, of which `copy_to_host` brings those of a
    batch at once."""

    num_layers: int
    num_heads: int
    prefix_names: tuple[str, ...]
    attention: list[TokenAttention]
    # what the pooled feature takes in each layer and head, uᵀA: L · H rows
    pooled: QuantisedRows | None
    # None where no token alone can be classified
    lens: LogitLens | None
    # None where the blocks' tokens were not kept
    features: TokenFeatures | None = None
    # what the score of the first class that is explained would lose without each head
    head_effects: Float[Tensor, "L H"] | None = None


def measure_tokens(
    forward: Forward,
    image: int,
    *,
    targets: Int[Tensor, " T"],
    temperature: float,
    max_bytes: int,
    kind: OutputKind = "classes",
    head_effects: Float[Tensor, "L H"] | None = None,
    options: MapOptions | None = None,
) -> TokenDetails:
    """The details of one image of the batch.

    Args:
        forward: a forward pass; the logit lens needs the tokens that leave each block
            (`run_forward(block_tokens=True)`).
        image: its place in the batch.
        targets: the classes that are explained.
        temperature: of the model file, by which logits are divided.
        max_bytes: of all details together; what does not fit is left out.
        kind: of the model's outputs; the logit lens is one of classes or labels.
        head_effects: of the image, see `vit.explanation.heads`.
        options: of the rollout, those of the map that stands beside. None: its defaults.
    """
    options = options or MapOptions()
    layers = forward.record.layers
    num_heads = layers[0].num_heads
    num_tokens = layers[0].num_tokens
    one = slice(image, image + 1)
    targets = targets[:MAX_LENS_TARGETS]

    # bytes of each part; of the lens, two a class and one a probability
    sizes = {
        "lens": (3 + len(targets)) * len(layers) * num_tokens,
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
    totals = zip(sizes, accumulate(sizes.values()), strict=True)
    parts = {name for name, total in totals if total <= max_bytes}

    lens = None
    if "lens" in parts and kind in ("classes", "labels"):
        lens = _compute_lens(forward, image, targets, temperature, kind)
    pooled = None
    if "pooled" in parts:
        pool_weights = at_least_float32(forward.pool_weights[one])[:, None, None]
        pooled_rows = [
            (pool_weights @ at_least_float32(layer.attention(one)))[0, :, 0] for layer in layers
        ]
        pooled = _quantise(torch.cat(pooled_rows), forward)  # [L·H, N]
    features = None
    if "features" in parts:
        features = measure_features(forward, image, max_bytes=sizes["features"])
    attention = []
    if "rollout" in parts:
        # fused one layer after another: of 4,096 tokens the heads of all layers would take 10 GB
        fuse = HEAD_FUSIONS[options.head_fusion]
        fused = [fuse(layer.attention(one), dim=1, keepdim=True) for layer in layers]
        rollout = attention_rollout(
            fused,
            discard_ratio=options.discard_ratio,
            residual=options.residual,
            start_layer=options.start_layer,
            num_prefix_tokens=forward.num_prefix_tokens,
        )[0]
        attention.append(TokenAttention(None, None, _quantise(rollout, forward)))
    if "layers" in parts:
        # a layer's row is the mean of its heads, whatever the rollout makes of them
        means = fused
        if options.head_fusion != "mean":
            means = [layer.attention(one).mean(dim=1, keepdim=True) for layer in layers]
        for number, mean in enumerate(means):
            attention.append(TokenAttention(number, None, _quantise(mean[0, 0], forward)))
    if "heads" in parts:
        for number, layer in enumerate(layers):
            for head, rows in enumerate(layer.attention(one)[0]):  # [N, N]
                attention.append(TokenAttention(number, head, _quantise(rows, forward)))

    return TokenDetails(
        num_layers=len(layers),
        num_heads=num_heads,
        prefix_names=_name_prefix_tokens(forward),
        attention=attention,
        pooled=pooled,
        lens=lens,
        features=features,
        head_effects=head_effects,
    )


@torch.no_grad()
def _compute_lens(
    forward: Forward,
    image: int,
    targets: Int[Tensor, " T"],
    temperature: float,
    kind: OutputKind,
) -> LogitLens | None:
    """nostalgebraist's logit lens (2020) on a vision transformer's tokens."""
    layer_probabilities = []
    for layer in forward.record.layers:
        if layer.block_tokens is None:
            return None
        try:
            logits = classify_token(forward, at_least_float32(layer.block_tokens[image].detach()))
        except ValueError:  # a classifier that is not known: the page does without
            return None
        probabilities = compute_probabilities(logits / temperature, kind)
        layer_probabilities.append(probabilities.float())  # [N, C]

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
    num_registers = count_prefix_tokens(forward.model) - len(names)
    names += [f"register {number + 1}" for number in range(num_registers)]
    num_prompts = forward.num_prefix_tokens - len(names)
    names += [f"prompt {number + 1}" for number in range(num_prompts)]
    return tuple(names[: forward.num_prefix_tokens])


def _quantise(rows: Float[Tensor, "rows N"], forward: Forward) -> QuantisedRows:
    """Rows as 8-bit fractions of their maxima, of prefix tokens and of patches."""
    parts = [rows[:, : forward.num_prefix_tokens], rows[:, forward.num_prefix_tokens :]]
    # padded, since a model may have no prefix
    maxima = torch.stack([F.pad(part, (0, 1)).amax(dim=1) for part in parts], dim=1)
    tiny = torch.finfo(rows.dtype).tiny
    fractions = [
        part / maximum[:, None].clamp_min(tiny)
        for part, maximum in zip(parts, maxima.T, strict=True)
    ]
    values = (torch.cat(fractions, dim=1) * 255).round().to(torch.uint8)
    return QuantisedRows(values, maxima.float())
