"""The numbers of vit-explain (2020), bugs included, to compare with maps that were made with it.

Written from its description, to be compared with, never to be believed: rows are divided by the sums of
*other* rows, discarding spares one entry instead of the class token, the residual's weight depends on what
was discarded, and gradients meet the attention of the mirrored layer. Maps are scaled to a maximum of one
and read at token 0, whatever the model reads.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vit.explanation.methods.rollout import fuse_heads


def vit_explain_rollout(
    attentions: Sequence[Float[Tensor, "B H N N"]], *, head_fusion: str = "mean", discard_ratio: float = 0.9
) -> Float[Tensor, "B P"]:
    """Its `rollout` for each image of a batch: P = N - 1 patches, divided by their maximum."""
    return _roll_out(
        [fuse_heads(attention, head_fusion=head_fusion) for attention in attentions],
        discard_ratio=discard_ratio,
        spare_first=True,
    )


def vit_explain_gradient_rollout(
    attentions: Sequence[Float[Tensor, "B H N N"]],
    gradients: Sequence[Float[Tensor, "B H N N"]],
    *,
    discard_ratio: float = 0.9,
) -> Float[Tensor, "B P"]:
    """Its `grad_rollout`, given each layer's attention and its gradient, both first layer first.

    Its backward hook sits on a dropout that does nothing, and so receives what flows into the softmax:
    A⊙(G - Σ_j G⊙A). Hooks fire last layer first, so the first attention meets the last of these.
    """
    scores = [a * (g - (g * a).sum(dim=-1, keepdim=True)) for a, g in zip(attentions, gradients, strict=True)]
    fused = [(a * g).mean(dim=1).clamp_min(0) for a, g in zip(attentions, reversed(scores), strict=True)]
    return _roll_out(fused, discard_ratio=discard_ratio, spare_first=False)


def _roll_out(
    fused: Sequence[Float[Tensor, "B N N"]], *, discard_ratio: float, spare_first: bool
) -> Float[Tensor, "B P"]:
    identity = torch.eye(fused[0].shape[-1], dtype=fused[0].dtype, device=fused[0].device)
    result = identity.expand_as(fused[0])
    for layer in fused:
        count = int(layer[0].numel() * discard_ratio)
        flat = layer.flatten(1)
        kept = torch.ones_like(flat).scatter_(1, flat.topk(count, dim=1, largest=False).indices, 0.0)
        if spare_first:
            kept[:, 0] = 1.0
        mixing = ((flat * kept).reshape_as(layer) + identity) / 2
        mixing = mixing / mixing.sum(dim=-1)[:, None, :]  # its missing keepdim: column j by the sum of row j
        result = mixing @ result
    patches = result[:, 0, 1:]
    return patches / patches.amax(dim=1, keepdim=True)
