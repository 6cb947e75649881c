"""Symmetric relevance gains: how much more the patches that a map ranks first take away from the
probability of the class than those that it ranks last."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.explanation.capture.forward import PatchMaps
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.token_ablation import (
    Predict,
    area_under,
    deletion_curve,
)

PerImage = Float[np.ndarray, " n"]
# fractions of the patches that insertion curves keep
KEPT = tuple((step + 1) / 10 for step in range(10))


def build_baselines(batch: int, grid: Grid, *, seed: int) -> dict[str, PatchMaps]:
    """Return maps [batch, rows, columns] that don't depend on the model, by name: random numbers;
    and a Gaussian in the middle, where photographers put objects, σ a quarter of each side."""
    generator = torch.Generator().manual_seed(seed)
    down, across = (torch.linspace(-2, 2, side + 2)[1:-1] for side in grid)
    centre = torch.exp(-(down[:, None] ** 2 + across[None, :] ** 2) / 2)
    return {
        "random": torch.rand(batch, *grid, generator=generator),
        "centre": centre.repeat(batch, 1, 1),
    }


def compute_gain(predict: Predict, maps: PatchMaps) -> Float[Tensor, " n"]:
    """Compute the symmetric relevance gain of a map on each image (Blücher et al. 2024, "Decoupling
    pixel flipping and occlusion strategy for consistent XAI benchmarks"): the area under the
    probability while patches are added to an empty image (insertion; Petsiuk et al. 2018), minus
    that while they are removed (deletion), the most relevant first.

    Args:
        predict: Function from `build_probability` for the images.
        maps: Maps [n, rows, columns] of the images.
    """
    order = find_order(maps)
    deletion = area_under(deletion_curve(predict, order))
    # insertion is deletion in the opposite order: the most relevant patches are removed last
    removed_first = [1 - fraction for fraction in KEPT]
    insertion_curve = deletion_curve(predict, order.flip(1), fractions=removed_first)
    return area_under(insertion_curve, fractions=KEPT) - deletion


def find_order(maps: PatchMaps) -> Int[Tensor, "n P"]:
    """Order patches by falling relevance; ties are in reading order."""
    return maps.flatten(1).argsort(dim=1, descending=True, stable=True)
