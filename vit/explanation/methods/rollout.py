"""Attention rollout: where, through all layers, did each token's information come from?

Abnar & Zuidema, "Quantifying Attention Flow in Transformers" (2020): every layer mixes the tokens by
Ã = residual·I + (1 - residual)·A, where A is the layer's attention fused over its heads, and the whole encoder by the
product Ã_L … Ã_1. Row i of that product says how much of every input token is in output token i.

Here A's rows sum to one whatever the fusion and the discarding (they are renormalised *before* the residual is mixed
in), so the identity has the weight that was asked for and rows of the product sum to one.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from vit.explanation.capture.layers import AttentionLayer, at_least_float32
from vit.runtime.arguments import check_choice

Layer = TypeVar("Layer")
HEAD_FUSIONS = ("mean", "max", "min")
CHUNK_ELEMENTS = 2**21  # attention weights held at once, 8 MiB: about the cache, and enough work a call


def fuse_heads(attention: Float[Tensor, "B H N N"], *, head_fusion: str = "mean") -> Float[Tensor, "B N N"]:
    """One matrix from the heads' by mean, max or min. Max and min leave rows that don't sum to one."""
    if head_fusion == "mean":
        return attention.mean(dim=1)
    return attention.amax(dim=1) if head_fusion == "max" else attention.amin(dim=1)


def discard_lowest(
    fused: Float[Tensor, "B N N"], *, discard_ratio: float, num_prefix_tokens: int = 1
) -> Float[Tensor, "B N N"]:
    """Zero the lowest `discard_ratio` of each image's patch-to-patch entries. Rows and columns of prefix tokens are
    never touched: that would cut the class token off from the patches, not remove noise."""
    patches = fused[:, num_prefix_tokens:, num_prefix_tokens:]
    count = int(discard_ratio * patches[0].numel())
    if count == 0:
        return fused
    lowest = patches.flatten(1).topk(count, dim=1, largest=False, sorted=False).indices  # [B, count]
    kept = torch.ones_like(patches).flatten(1).scatter_(1, lowest, 0.0).reshape(patches.shape)
    fused = fused.clone()
    fused[:, num_prefix_tokens:, num_prefix_tokens:] *= kept
    return fused


def normalise_rows(matrix: Float[Tensor, "B N N"]) -> Float[Tensor, "B N N"]:
    """Rows summing to one. A row of zeros (everything discarded) becomes the identity's: the token stays."""
    sums = matrix.sum(dim=-1, keepdim=True)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(sums > 0, matrix / sums.clamp_min(torch.finfo(matrix.dtype).tiny), identity)


def mixing_matrix(
    attention: Float[Tensor, "B H N N"], *, head_fusion: str = "mean", discard_ratio: float, num_prefix_tokens: int
) -> Float[Tensor, "B N N"]:
    """A layer's fused attention, rows summing to one. At least float32: twelve half-precision matrices' product drifts
    by 1e-2."""
    fused = fuse_heads(at_least_float32(attention), head_fusion=head_fusion)
    if discard_ratio > 0:
        fused = discard_lowest(fused, discard_ratio=discard_ratio, num_prefix_tokens=num_prefix_tokens)
    return normalise_rows(fused)


def attention_rollout(
    attentions: Sequence[Float[Tensor, "B H N N"]],
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
    num_prefix_tokens: int = 1,
    readout: Float[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B N N"] | Float[Tensor, "B N"]:
    """Roll the layers' attention up into one matrix [B, N, N] whose rows sum to one.

    `attentions`: post-softmax attention, first layer first. `residual`: weight of the identity, 0 to 1.
    `discard_ratio`: fraction of the smallest patch-to-patch entries that is dropped, 0 to below 1. `start_layer`:
    layers before it are left out. `num_prefix_tokens`: tokens in front that discarding spares. With `readout`, the
    result is readout · rollout, [B, N], from vector-matrix products alone.
    """
    check_rollout_options(len(attentions), head_fusion, discard_ratio, residual, start_layer)
    fuse = partial(
        mixing_matrix, head_fusion=head_fusion, discard_ratio=discard_ratio, num_prefix_tokens=num_prefix_tokens
    )

    def mix(attention: Float[Tensor, "B H N N"], row: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        if head_fusion != "mean" or discard_ratio:
            return torch.bmm(row[:, None], fuse(attention))[:, 0]
        # the heads' matrices on top of one another: one pass over the weights, no fused matrix
        stacked = at_least_float32(attention).flatten(1, 2)  # [B, H·N, N]
        every_head = row.repeat(1, attention.shape[1]) / attention.shape[1]
        return torch.bmm(every_head[:, None].to(stacked.dtype), stacked)[:, 0]

    def blend(attention: Float[Tensor, "B H N N"]) -> Float[Tensor, "B N N"]:
        mixing = fuse(attention)
        identity = torch.eye(mixing.shape[-1], dtype=mixing.dtype, device=mixing.device)
        return residual * identity + (1 - residual) * mixing

    if readout is not None:
        return propagate(readout, attentions[start_layer:], mix, residual=residual)
    return reduce(lambda rollout, mixing: mixing @ rollout, map(blend, attentions[start_layer:]))


def propagate(
    readout: Float[Tensor, "B N"],
    layers: Sequence[Layer],
    mix: Callable[[Layer, Float[Tensor, "B N"]], Float[Tensor, "B N"]],
    *,
    residual: float = 0.5,
    attention_weight: float | None = None,
) -> Float[Tensor, "B N"]:
    """The recurrence of all rollouts: r ← residual · r + (1 - residual) · r·A from the last layer to the first.

    `mix(layer, r)` is r·A for the layer's mixing matrix A. `attention_weight` stands for 1 - residual where given.
    """
    weight = 1 - residual if attention_weight is None else attention_weight
    row = at_least_float32(readout)
    for layer in reversed(layers):
        row = residual * row + weight * mix(layer, row)
    return row


@torch.no_grad()
def rollout_row(
    readout: Float[Tensor, "B N"],
    layers: Sequence[AttentionLayer],
    *,
    residual: float = 0.5,
    start_layer: int = 0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Float[Tensor, "B N"]:
    """`readout` · mean-fused rollout, from the queries and keys of captured layers, last layer first.

    L vector-matrix products instead of L matrix products, and no N×N matrix: attention is formed for a few images or a
    few query rows, at most `chunk_elements` numbers, at a time, which also keeps it in the processor's cache.
    """
    check_rollout_options(len(layers), "mean", 0.0, residual, start_layer)

    def mix(layer: AttentionLayer, row: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        result, tokens = torch.zeros_like(row), row.shape[1]
        queries_at_once = min(max(chunk_elements // (layer.num_heads * tokens), 1), tokens)
        for images in _chunks(layer, chunk_elements):
            query, key = layer.scaled_query_and_key(images)
            for start in range(0, tokens, queries_at_once):
                rows = slice(start, start + queries_at_once)
                weights = layer.scores(query, key, images, rows)  # [b, H, rows, N]
                torch.softmax(weights, dim=-1, out=weights)  # fresh memory for each would cost as much again
                result[images] += (row[images, None, None, rows] @ weights).sum(dim=1)[:, 0]
        return result / layer.num_heads

    return propagate(readout, layers[start_layer:], mix, residual=residual)


def through_matrices(
    mixing: Callable[[AttentionLayer, slice], Float[Tensor, "b N N"]],
) -> Callable[[AttentionLayer, Float[Tensor, "B N"]], Float[Tensor, "B N"]]:
    """r·A for `propagate`, where `mixing(layer, images)` is A of a few images at a time."""
    return lambda layer, row: in_chunks(
        layer, lambda images: torch.bmm(row[images, None], mixing(layer, images).to(row.dtype))[:, 0]
    )


def in_chunks(layer: AttentionLayer, compute: Callable[[slice], Tensor]) -> Tensor:
    """`compute` of a few images of the batch at a time."""
    return torch.cat([compute(images) for images in _chunks(layer, CHUNK_ELEMENTS)])


def _chunks(layer: AttentionLayer, chunk_elements: int) -> Iterator[slice]:
    """Slices of the batch whose attention matrices have about `chunk_elements` numbers together."""
    size = max(chunk_elements // (layer.num_heads * layer.num_tokens**2), 1)
    return (slice(first, min(first + size, layer.batch)) for first in range(0, layer.batch, size))


def check_rollout_options(
    num_layers: int, head_fusion: str, discard_ratio: float, residual: float, start_layer: int
) -> None:
    """Raise ValueError for an option outside its range."""
    if num_layers == 0:
        raise ValueError("attentions is empty; rollout needs the attention of at least one layer")
    check_choice(head_fusion, HEAD_FUSIONS, name="head_fusion")
    if not 0 <= discard_ratio < 1:
        raise ValueError(f"discard_ratio {discard_ratio} is outside [0, 1); 0.9 drops the lowest nine tenths")
    if not 0 <= residual <= 1:
        raise ValueError(f"residual {residual} is outside [0, 1]; 0.5 is the published half")
    if not 0 <= start_layer < num_layers:
        raise ValueError(f"start_layer {start_layer} is outside 0 to {num_layers - 1}, this model's layers")
