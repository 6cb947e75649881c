"""Ours beside the numbers of vit-explain (2020), bugs included, written from its description.

It divides rows by the sums of *other* rows, discarding spares one entry instead of the class token,
the identity's weight depends on what was discarded, and gradients meet the attention of the
mirrored layer. Maps are scaled to a maximum of one and read at token 0, whatever the model reads.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from vit.explanation.methods.rollout import HEAD_FUSIONS, attention_rollout


def random_attention(
    layers: int = 4, *, batch: int = 2, heads: int = 3, tokens: int = 10
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, tokens, tokens)
    return [(3 * torch.randn(shape, generator=generator)).softmax(dim=-1) for _ in range(layers)]


def vit_explain_rollout(
    attentions: Sequence[Float[Tensor, "B H N N"]],
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.9,
) -> Float[Tensor, "B P"]:
    """Its `rollout` for each image of a batch: P = N - 1 patches, divided by their maximum."""
    return _roll_out(
        [HEAD_FUSIONS[head_fusion](attention, dim=1) for attention in attentions],
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

    Its backward hook sits on a dropout that does nothing, and so receives what flows into the
    softmax: A⊙(G - Σ_j G⊙A). Hooks fire last layer first, so the first attention meets the last of
    these.
    """
    scores = [
        a * (g - (g * a).sum(dim=-1, keepdim=True))
        for a, g in zip(attentions, gradients, strict=True)
    ]
    fused = [
        (a * g).mean(dim=1).clamp_min(0) for a, g in zip(attentions, reversed(scores), strict=True)
    ]
    return _roll_out(fused, discard_ratio=discard_ratio, spare_first=False)


def _roll_out(
    fused: Sequence[Float[Tensor, "B N N"]], *, discard_ratio: float, spare_first: bool
) -> Float[Tensor, "B P"]:
    identity = torch.eye(fused[0].shape[-1], dtype=fused[0].dtype, device=fused[0].device)
    result = identity.expand_as(fused[0])
    for layer in fused:
        count = int(layer[0].numel() * discard_ratio)
        flat = layer.flatten(1)
        kept = torch.ones_like(flat).scatter_(
            1, flat.topk(count, dim=1, largest=False).indices, 0.0
        )
        if spare_first:
            kept[:, 0] = 1.0
        mixing = ((flat * kept).reshape_as(layer) + identity) / 2
        mixing = (
            mixing / mixing.sum(dim=-1)[:, None, :]
        )  # its missing keepdim: column j by the sum of row j
        result = mixing @ result
    patches = result[:, 0, 1:]
    return patches / patches.amax(dim=1, keepdim=True)


def their_rollout(
    matrices: list[np.ndarray], *, discard_ratio: float, spare_first: bool
) -> np.ndarray:
    result = np.eye(len(matrices[0]))
    for matrix in matrices:
        flat = matrix.ravel().copy()
        lowest = np.argsort(flat, kind="stable")[: int(len(flat) * discard_ratio)]
        if spare_first:
            lowest = lowest[lowest != 0]
        flat[lowest] = 0
        mixed = (flat.reshape(matrix.shape) + np.eye(len(matrix))) / 2
        result = (mixed / mixed.sum(axis=-1)) @ result  # no keepdims: divides columns
    return result[0, 1:] / result[0, 1:].max()


@pytest.mark.parametrize("head_fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("discard_ratio", [0.0, 0.5, 0.9])
def test_vit_explain_equals_an_independent_rederivation(
    head_fusion: str, discard_ratio: float
) -> None:
    attentions = random_attention()
    found = vit_explain_rollout(attentions, head_fusion=head_fusion, discard_ratio=discard_ratio)
    for image in range(2):
        fused = [
            getattr(np, head_fusion)(attention[image].double().numpy(), axis=0)
            for attention in attentions
        ]
        expected = their_rollout(fused, discard_ratio=discard_ratio, spare_first=True)
        assert np.abs(found[image].numpy() - expected).max() < 1e-6


def test_vit_explain_gradient_rollout_pairs_attention_with_the_mirrored_layers_score_gradient() -> (
    None
):
    generator = torch.Generator().manual_seed(0)
    scores = [
        torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(4)
    ]
    attentions = [score.softmax(dim=-1) for score in scores]
    for attention in attentions:
        attention.retain_grad()
    sum((attention**2 * attention.cos()).sum() for attention in attentions).backward()
    found = vit_explain_gradient_rollout(
        attentions, [a.grad for a in attentions], discard_ratio=0.5
    )
    for image in range(2):
        fused = [
            np.maximum((a[image] * score.grad[image]).mean(dim=0).detach().numpy(), 0)
            for a, score in zip(attentions, reversed(scores), strict=True)
        ]
        expected = their_rollout(fused, discard_ratio=0.5, spare_first=False)
        assert np.abs(found[image].detach().numpy() - expected).max() < 1e-6


def test_vit_explain_differs_from_ours_where_its_bugs_bite() -> None:
    attentions = random_attention()
    ours = attention_rollout(attentions, head_fusion="max", discard_ratio=0.9)[:, 0, 1:]
    theirs = vit_explain_rollout(attentions, head_fusion="max", discard_ratio=0.9)
    assert (ours / ours.amax(dim=1, keepdim=True) - theirs).abs().max() > 0.05
