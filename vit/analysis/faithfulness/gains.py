"""Symmetric relevance gains: how much more the patches that a map ranks first take away from the
probability of the class than those that it ranks last."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.explanation.capture.discovery import Grid
from vit.explanation.patch_removal import ComputeKept
from vit.explanation.targets import CLASS, Target
from vit.model.logits import at_least_float32

PerImage = Float[np.ndarray, " n"]
PatchMaps = Float[Tensor, "n rows columns"]
# from the patches of each of n images that are kept to the probabilities of their classes
Predict = Callable[[Int[Tensor, "n kept"]], Float[Tensor, " n"]]
# fractions of the patches that deletion curves remove, and that insertion curves keep
FRACTIONS = tuple(step / 10 for step in range(10))
KEPT = tuple((step + 1) / 10 for step in range(10))


def build_probability(
    compute_kept: ComputeKept, classes: Int[Tensor, " n"], *, target: Target = CLASS
) -> Predict:
    """Build a function from the patches that are kept to the probability of each image's class, or
    to another target. `compute_kept` is from `build_removal` for the same images."""
    rows = torch.arange(len(classes), device=classes.device)

    @torch.no_grad()
    def predict(kept: Int[Tensor, "n kept"]) -> Float[Tensor, " n"]:
        return target.value(at_least_float32(compute_kept(rows, kept)), classes)

    return predict


BASELINES = ("random", "centre")


def build_baselines(batch: int, grid: Grid) -> dict[str, PatchMaps]:
    """Return maps [batch, rows, columns] that don't depend on the model, by name: random numbers;
    and a Gaussian in the middle, where photographers put objects, σ a quarter of each side."""
    generator = torch.Generator().manual_seed(0)
    down, across = (torch.linspace(-2, 2, side + 2)[1:-1] for side in grid)
    centre = torch.exp(-(down[:, None] ** 2 + across[None, :] ** 2) / 2)
    noise = torch.rand(batch, *grid, generator=generator)
    return dict(zip(BASELINES, (noise, centre.repeat(batch, 1, 1)), strict=True))


def compute_gain(predict: Predict, maps: PatchMaps) -> Float[Tensor, " n"]:
    """Compute the symmetric relevance gain of a map on each image (Blücher et al. 2024, "Decoupling
    pixel flipping and occlusion strategy for consistent XAI benchmarks"): the area under the
    probability while patches are added to an empty image (insertion; Petsiuk et al. 2018), minus
    that while they are removed (deletion), the most relevant first.
    """
    order = find_order(maps)
    deletion = area_under(deletion_curve(predict, order, FRACTIONS), FRACTIONS)
    # insertion is deletion in the opposite order: the most relevant patches are removed last
    insertion = deletion_curve(predict, order.flip(1), [1 - fraction for fraction in KEPT])
    return area_under(insertion, KEPT) - deletion


def deletion_curve(
    predict: Predict, order: Int[Tensor, "n P"], fractions: Sequence[float]
) -> Float[Tensor, "n steps"]:
    """Compute the probabilities without the first patches of `order`, for fractions of them."""
    num_patches = order.shape[1]
    removed = [round(fraction * num_patches) for fraction in fractions]
    return torch.stack([predict(order[:, number:]) for number in removed], dim=1)


def area_under(curve: Float[Tensor, "n steps"], fractions: Sequence[float]) -> Float[Tensor, " n"]:
    """Compute the trapezoidal area divided by the range of the fractions: a mean probability."""
    points = torch.tensor(fractions, dtype=curve.dtype, device=curve.device)
    return torch.trapezoid(curve, points, dim=1) / (points[-1] - points[0])


def find_order(maps: PatchMaps) -> Int[Tensor, "n P"]:
    """Order patches by falling relevance; ties are in reading order."""
    return maps.flatten(1).argsort(dim=1, descending=True, stable=True)
