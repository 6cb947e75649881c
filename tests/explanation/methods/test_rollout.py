"""Rollout against matrix products written separately, and cases solved by hand."""

import pytest
import torch
from torch import Tensor

from vit.explanation.methods.rollout import (
    attention_rollout,
)


def random_attention(
    layers: int = 4, *, batch: int = 2, heads: int = 3, tokens: int = 10
) -> list[Tensor]:
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


def test_start_layer_leaves_the_layers_before_it_out() -> None:
    attentions = random_attention()
    assert torch.equal(
        attention_rollout(attentions, start_layer=2), attention_rollout(attentions[2:])
    )


def test_pool_weights_take_their_row_of_the_whole_matrix() -> None:
    attentions = random_attention()
    pool_weights = torch.rand(2, 10, generator=torch.Generator().manual_seed(1))
    whole = attention_rollout(attentions)
    assert (whole.sum(dim=-1) - 1).abs().max() < 1e-5
    row = attention_rollout(attentions, pool_weights=pool_weights)
    assert row.shape == (2, 10)
    assert (row - torch.einsum("bi,bij->bj", pool_weights, whole)).abs().max() < 1e-6


def test_half_precision_is_accumulated_in_float32() -> None:
    attentions = random_attention()
    half = attention_rollout([attention.bfloat16() for attention in attentions])
    assert half.dtype == torch.float32
    assert (half - attention_rollout(attentions)).abs().max() < 2e-3


@pytest.mark.parametrize(
    ("count", "start_layer", "message"),
    [(4, 4, "start_layer 4 is outside 0 to 3"), (0, 0, "at least one layer")],
)
def test_a_rollout_of_no_layers_is_refused(count: int, start_layer: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_rollout(random_attention(count), start_layer=start_layer)
