"""Rollout against matrix products written separately, and cases solved by hand."""

import pytest
import torch
from torch import Tensor

from vit.explain.rollout import attention_rollout, mixing_matrix, rollout_row_from_matrices


def random_attention(layers: int = 4, *, batch: int = 2, heads: int = 3, tokens: int = 10) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, tokens, tokens)
    return [(3 * torch.randn(shape, generator=generator)).softmax(dim=-1) for _ in range(layers)]


def test_three_tokens_two_layers_solved_by_hand() -> None:
    first = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    second = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    # Ã₁ = [[½,½,0],[0,1,0],[¼,0,¾]], Ã₂ = [[½,0,½],[½,½,0],[0,0,1]], and Ã₂Ã₁ is:
    expected = torch.tensor([[0.375, 0.25, 0.375], [0.25, 0.75, 0.0], [0.25, 0.0, 0.75]])
    assert torch.equal(attention_rollout([first[None, None], second[None, None]])[0], expected)


def test_equals_the_published_formula_in_float64() -> None:
    attentions = random_attention()
    expected = torch.eye(10, dtype=torch.float64).expand(2, 10, 10)
    for attention in attentions:
        mixing = 0.5 * attention.double().mean(dim=1) + 0.5 * torch.eye(10, dtype=torch.float64)
        expected = (mixing / mixing.sum(dim=-1, keepdim=True)) @ expected
    assert (attention_rollout(attentions).double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("head_fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("discard_ratio", [0.0, 0.5, 0.99])
def test_rows_sum_to_one_whatever_the_fusion_and_discard(head_fusion: str, discard_ratio: float) -> None:
    rollout = attention_rollout(random_attention(), head_fusion=head_fusion, discard_ratio=discard_ratio)
    assert (rollout.sum(dim=-1) - 1).abs().max() < 1e-5
    assert (rollout >= 0).all()


def test_row_form_equals_the_row_of_the_full_product() -> None:
    attentions = random_attention()
    readout = torch.rand(2, 10).softmax(dim=-1)
    full = (readout[:, None] @ attention_rollout(attentions, residual=0.3))[:, 0]
    row = rollout_row_from_matrices(readout, [mixing_matrix(a) for a in attentions], residual=0.3)
    assert (row - full).abs().max() < 1e-6
