"""Maps that don't depend on the model: what methods have to be better than."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

RANDOM_MAPS = 5  # of each image; their metrics are averaged


def random_maps(
    batch: int, grid: tuple[int, int], *, generator: torch.Generator
) -> Float[Tensor, "batch rows columns"]:
    """Uniform noise."""
    return torch.rand(batch, *grid, generator=generator)


def centre_maps(batch: int, grid: tuple[int, int]) -> Float[Tensor, "batch rows columns"]:
    """A Gaussian in the middle, σ a quarter of each side: photographers put objects there."""
    down, across = (torch.linspace(-2, 2, side + 2)[1:-1] for side in grid)
    centre: Tensor = torch.exp(-(down[:, None] ** 2 + across[None, :] ** 2) / 2)
    return centre.expand(batch, -1, -1)


def edge_maps(
    images: Float[Tensor, "B 3 height width"], grid: tuple[int, int]
) -> Float[Tensor, "B rows columns"]:
    """The mean strength of Sobel's edges in each patch."""
    grey = F.pad(images.mean(dim=1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    sobel = grey.new_tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
    edges = F.conv2d(grey, torch.stack([sobel, sobel.T])[:, None]).norm(dim=1, keepdim=True)
    return F.adaptive_avg_pool2d(edges, grid)[:, 0]
