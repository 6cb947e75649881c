"""Rollout against matrix products written separately, and cases solved by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.explanation.model_zoo import build
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.rollout import attention_rollout


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


@pytest.mark.parametrize(
    "options",
    [{}, {"head_fusion": "max"}, {"head_fusion": "min", "discard_ratio": 0.5}],
)
def test_the_method_is_the_row_of_what_the_classifier_reads(options: dict[str, object]) -> None:
    model, images = build("timm-registers")  # the mean of 24 patches, behind 5 tokens
    forward, _, (maps,) = compute_maps(model, images, methods=["rollout"], options=options)
    whole = attention_rollout(forward.record.attentions, **options)
    expected = whole[:, 5:, 5:].mean(dim=1).reshape(2, 1, 4, 6)
    assert (maps - expected).abs().max() < 1e-6


def test_half_precision_is_accumulated_in_float32() -> None:
    attentions = random_attention()
    half = attention_rollout([attention.bfloat16() for attention in attentions])
    assert half.dtype == torch.float32
    assert (half - attention_rollout(attentions)).abs().max() < 2e-3


def test_discarding_spares_the_first_entry_alone() -> None:
    attention = torch.arange(25.0).reshape(1, 1, 5, 5) / 300
    attention[0, 0, 0, 0] = 1e-3
    rollout = attention_rollout([attention], discard_ratio=0.48)  # 12 of 25
    # the rest of these rows is discarded, and the share of the own token is left
    assert torch.equal(rollout[0, 0], torch.eye(5)[0])
    assert torch.equal(rollout[0, 1], torch.eye(5)[1])
    assert torch.equal(rollout[0, 2] > 0, torch.tensor([False, False, True, True, True]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_fusion": "median"}, "unknown head_fusion 'median'; known: max, mean, min"),
        ({"discard_ratio": 1.0}, r"discard_ratio 1.0 is outside \[0, 1\)"),
    ],
)
def test_options_outside_their_range_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_rollout(random_attention(), **options)
    with pytest.raises(ValueError, match="attentions is empty"):
        attention_rollout([])


def their_rollout(matrices: list[np.ndarray], *, discard_ratio: float) -> np.ndarray:
    """The program vit-explain (Gildenblat 2020), written from its description, but for its
    division: it has no `keepdims`, and divides columns by the sums of rows."""
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
    found = attention_rollout(attentions, head_fusion=head_fusion, discard_ratio=discard_ratio)
    assert (found.sum(dim=-1) - 1).abs().max() < 1e-5
    for image in range(2):
        fused = [
            getattr(np, head_fusion)(attention[image].double().numpy(), axis=0)
            for attention in attentions
        ]
        row = found[image, 0, 1:].numpy()
        row = row / row.max()
        expected = their_rollout(fused, discard_ratio=discard_ratio)
        assert np.abs(row - expected).max() < 1e-6
