"""Attention rollout: the share of each input token in each output token, through all layers.

Abnar & Zuidema, "Quantifying Attention Flow in Transformers" (2020): every layer mixes the tokens
by Ã = ½·I + ½·A, where A is the layer's attention fused over its heads, and the whole encoder by
the product Ã_L … Ã_1. Row i of that product has the share of every input token in output token i.

Rows of Ã are divided by their sums: after a maximum, a minimum or with discarded entries they don't
sum to one. The program vit-explain (Gildenblat 2020) divides columns by the sums of the rows.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vit.explanation.capture.forward import Forward
from vit.explanation.capture.pooling import TokenWeights
from vit.model.logits import at_least_float32
from vit.runtime.arguments import check_choice

# more tokens than those of 512 px in patches of 16 px would make a page too large
_MAX_FLOW_TOKENS = 1100
_HEAD_FUSIONS: dict[str, Any] = {"mean": Tensor.mean, "max": Tensor.amax, "min": Tensor.amin}


def attention_rollout(
    attentions: Sequence[Float[Tensor, "B _ N N"]],
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
) -> Float[Tensor, "B N N"]:
    """Multiply the layers' attention into one matrix whose rows sum to one
    (Abnar & Zuidema 2020).

    Args:
        attentions: Attention [B, H, N, N] of each layer after the softmax,
            first layer first.
        head_fusion: Fusion of the heads into one matrix: "mean", "max" or
            "min".
        discard_ratio: Fraction of the smallest entries of each fused matrix
            that are set to 0, in [0, 1); the first entry of the first row is
            kept.

    Returns:
        The matrix [B, N, N].

    Raises:
        ValueError: An option is outside its range, or there is no layer.

    Example:
        >>> with vit.capture_attention(model) as record: model(images)
        >>> rollout = vit.attention_rollout(record.attentions)
        >>> rollout[:, 0, 1:]  # patches in the class token, [B, patches]
        >>> rollout.mean(dim=1)  # in a mean-pooled model without one
    """
    if not attentions:
        raise ValueError("attentions is empty; give the attention of each layer")
    matrices = (_mix(attention, head_fusion, discard_ratio) for attention in reversed(attentions))
    return reduce(torch.matmul, matrices)


@torch.no_grad()
def compute_rollout(
    forward: Forward,
    classes: Tensor,
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
) -> TokenWeights:
    """Compute the map method `rollout`, see `attention_rollout`."""
    layers = forward.record.layers
    pool_weights = at_least_float32(forward.pool_weights)

    def roll_up(images: slice) -> TokenWeights:
        row = pool_weights[images, None]
        for layer in reversed(layers):
            if head_fusion != "mean" or discard_ratio != 0:
                row = row @ _mix(layer.attention(images), head_fusion, discard_ratio)
                continue
            # A plain mean needs a few query rows at a time, which stay in the processor's cache.
            mixed = torch.zeros_like(row)
            for queries, attention in layer.attention_rows(images):
                mixed += (row[:, None, :, queries] @ attention).sum(dim=1)
            row = (row + mixed / layer.num_heads) / 2
        return row[:, 0]

    return layers[0].in_chunks(roll_up)


@torch.no_grad()
def measure_attention(forward: Forward, image: int) -> dict[str, Tensor]:
    """Measure what an image of a batch attends to, for pictures: "heads" [layers, heads, rows,
    columns] of the pooled feature, unless layers differ in their heads; and "flow" [rows, columns,
    rows, columns] of each patch by the rollout, unless it would be too large."""
    layers = forward.record.layers
    one = slice(image, image + 1)
    prefix, grid = forward.num_prefix_tokens, forward.grid
    parts = {}
    if len({layer.num_heads for layer in layers}) == 1:
        heads = [layer.attend(forward.pool_weights, one)[0, :, prefix:] for layer in layers]
        parts["heads"] = torch.unflatten(torch.stack(heads), -1, grid).float()
    if layers[0].num_tokens <= _MAX_FLOW_TOKENS:
        # fused layer by layer, so that the heads of one layer are in memory
        fused = [layer.attention(one).mean(dim=1, keepdim=True) for layer in layers]
        flow = attention_rollout(fused)[0, prefix:, prefix:]
        parts["flow"] = flow.reshape(*grid, *grid).float()
    return parts


def _mix(
    attention: Float[Tensor, "B H N N"], head_fusion: str, discard_ratio: float
) -> Float[Tensor, "B N N"]:
    """Compute Ã of a layer in float32 or more: the product of twelve half-precision matrices drifts
    by 1e-2."""
    check_choice(head_fusion, tuple(_HEAD_FUSIONS), name="head_fusion")
    if not 0 <= discard_ratio < 1:
        raise ValueError(f"discard_ratio {discard_ratio} is outside [0, 1)")
    fused: Tensor = _HEAD_FUSIONS[head_fusion](at_least_float32(attention), dim=1)
    if discard_ratio > 0:
        entries = fused.flatten(1)
        # within each image, so that its map doesn't depend on the batch
        count = int(discard_ratio * entries.shape[1])
        lowest = entries.topk(count, dim=1, largest=False, sorted=False).indices
        kept = entries.scatter(1, lowest, 0.0)
        kept[:, 0] = entries[:, 0]
        fused = kept.reshape(fused.shape)
    identity = torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
    # no row of the sum is zero, also where everything is discarded
    matrix = (identity + fused) / 2
    return matrix / matrix.sum(dim=-1, keepdim=True)
