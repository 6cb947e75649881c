"""Maps that don't depend on the model; methods have to be better than these."""

import torch
from torch.nn import functional as F

from vit.explanation.capture.forward import PatchMaps
from vit.explanation.capture.tokens import Grid
from vit.runtime.tensors import Images

# random maps for each image; their metrics are averaged
RANDOM_MAPS = 3


def baseline_maps(images: Images, grid: Grid, *, seed: int) -> dict[str, list[PatchMaps]]:
    """Return the maps [B, rows, columns] of each baseline by name: `RANDOM_MAPS` random ones, and one
    of each other baseline."""
    # on the host, so that the numbers are the same on every device
    generator = torch.Generator().manual_seed(seed)
    noise = [
        torch.rand(len(images), *grid, generator=generator).to(images.device)
        for _ in range(RANDOM_MAPS)
    ]
    centre = centre_maps(len(images), grid).to(images.device)
    return {"centre": [centre], "edges": [edge_maps(images, grid)], "random": noise}


def centre_maps(batch: int, grid: Grid) -> PatchMaps:
    """Return a Gaussian in the middle, where photographers put objects; σ is a quarter of each side."""
    down, across = (torch.linspace(-2, 2, side + 2)[1:-1] for side in grid)
    centre = torch.exp(-(down[:, None] ** 2 + across[None, :] ** 2) / 2)
    return centre.expand(batch, -1, -1)


def edge_maps(images: Images, grid: Grid) -> PatchMaps:
    """Return the mean strength of Sobel edges in each patch."""
    grey = F.pad(images.mean(dim=1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    sobel = grey.new_tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
    edges = F.conv2d(grey, torch.stack([sobel, sobel.T])[:, None]).norm(dim=1, keepdim=True)
    return F.adaptive_avg_pool2d(edges, grid)[:, 0]
