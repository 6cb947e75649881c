"""Statistics of attention, computed by hand."""

import math

import pytest
import torch

from vit.factory.pictures import compute_attention_distance, compute_attention_entropy


def test_entropy_is_zero_for_one_token_and_log_n_for_all() -> None:
    assert compute_attention_entropy(torch.eye(5).expand(2, 3, 5, 5)) == 0
    assert compute_attention_entropy(torch.full((2, 3, 5, 5), 0.2)) == pytest.approx(math.log(5))


def test_distance_is_in_patches_and_leaves_prefix_tokens_out() -> None:
    # one class token, a grid of one row and three columns; every patch attends to the last one, or
    # to the class token
    attention = torch.zeros(1, 1, 4, 4)
    attention[..., 3] = 0.5
    attention[..., 0] = 0.5
    distance = compute_attention_distance(attention, grid=(1, 3), num_prefix_tokens=1)
    assert distance == pytest.approx((2 + 1 + 0) / 3)
    assert (
        compute_attention_distance(torch.eye(6).view(1, 1, 6, 6), grid=(2, 3), num_prefix_tokens=0)
        == 0
    )
