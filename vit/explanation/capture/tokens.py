"""Patches of an image, and noise that shows which tokens read them."""

import torch
from torch import Tensor

Grid = tuple[int, int]  # (rows, columns) of patches


def draw_noise(
    shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draw normally distributed numbers, the same ones at each call without a generator, with the
    type and device of `like`."""
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like)
