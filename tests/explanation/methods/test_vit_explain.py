"""Rollout is that of the program vit-explain (Gildenblat 2020), written from its description, but for
its division: it has no `keepdims`, and divides columns by the sums of rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

import vit


def random_attention(
    layers: int = 4, *, batch: int = 2, heads: int = 3, tokens: int = 10
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, tokens, tokens)
    return [(3 * torch.randn(shape, generator=generator)).softmax(dim=-1) for _ in range(layers)]


def their_rollout(matrices: list[np.ndarray], *, discard_ratio: float) -> np.ndarray:
    result = np.eye(len(matrices[0]))
    for matrix in matrices:
        flat = matrix.ravel().copy()
        lowest = np.argsort(flat, kind="stable")[: int(len(flat) * discard_ratio)]
        flat[lowest[lowest != 0]] = 0
        mixed = (flat.reshape(matrix.shape) + np.eye(len(matrix))) / 2
        result = (mixed / mixed.sum(axis=-1, keepdims=True)) @ result
    return result[0, 1:] / result[0, 1:].max()


@pytest.mark.parametrize("head_fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("discard_ratio", [0.0, 0.5, 0.9])
def test_rollout_is_vit_explains_with_rows_divided(head_fusion: str, discard_ratio: float) -> None:
    attentions = random_attention()
    found = vit.attention_rollout(attentions, head_fusion=head_fusion, discard_ratio=discard_ratio)
    for image in range(2):
        fused = [
            getattr(np, head_fusion)(attention[image].double().numpy(), axis=0)
            for attention in attentions
        ]
        row = found[image, 0, 1:].numpy()
        row = row / row.max()
        expected = their_rollout(fused, discard_ratio=discard_ratio)
        assert np.abs(row - expected).max() < 1e-6
