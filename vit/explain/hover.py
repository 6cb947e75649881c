"""What every patch attends to, in few bytes: the rows a page shows when a patch is pointed at.

A row is stored as 8-bit shares of its own maximum. What does not fit the given bytes is left out in this
order: single heads, then the layers' resolution, then the layers; rollout stays.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.explain.readout import Forward
from vit.explain.rollout import attention_rollout


@dataclass(frozen=True)
class PatchRows:
    """Rows of one attention matrix from patch to patch: entry [i, j] · maxima[i] / 255 is what patch i draws
    from cell j of a `grid` that may be coarser than the patches'."""

    name: str
    grid: tuple[int, int]
    rows: UInt8[np.ndarray, "P cells"]
    maxima: Float[np.ndarray, " P"]


def collect_rows(forward: Forward, image: int, *, budget: int) -> list[PatchRows]:
    """Rollout's rows of one image of the batch, and each layer's and head's as far as `budget` bytes go."""
    one = slice(image, image + 1)
    patches = slice(forward.num_prefix_tokens, None)
    layers = [layer.attention(one)[:, :, patches, patches] for layer in forward.record.layers]  # [1, H, P, P]
    rollout = attention_rollout([layer.attention(one) for layer in forward.record.layers])[
        0, patches, patches
    ]
    size, heads = rollout.numel(), layers[0].shape[1]
    kept = [quantise_rows("rollout", rollout, forward.grid)]
    left = budget - size
    coarse = _coarser_grid(forward.grid)
    if left >= size * len(layers):
        kept += [
            quantise_rows(f"layer {i}", layer[0].mean(dim=0), forward.grid) for i, layer in enumerate(layers)
        ]
        left -= size * len(layers)
    elif left >= rollout.shape[0] * coarse[0] * coarse[1] * len(layers):
        kept += [
            quantise_rows(f"layer {i}", _coarsen(layer[0].mean(dim=0), forward.grid, coarse), coarse)
            for i, layer in enumerate(layers)
        ]
        left = 0
    else:
        left = 0
    if left >= size * len(layers) * heads:
        kept += [
            quantise_rows(f"layer {i} head {h}", layer[0, h], forward.grid)
            for i, layer in enumerate(layers)
            for h in range(heads)
        ]
    return kept


def quantise_rows(name: str, rows: Float[Tensor, "P cells"], grid: tuple[int, int]) -> PatchRows:
    """Rows as 8-bit shares of their maxima."""
    maxima = rows.amax(dim=1)
    shares = rows / maxima.clamp_min(torch.finfo(rows.dtype).tiny)[:, None]
    return PatchRows(
        name,
        grid,
        (shares * 255).round().to(torch.uint8).cpu().numpy(),
        maxima.float().cpu().numpy(),
    )


def _coarser_grid(grid: tuple[int, int]) -> tuple[int, int]:
    return (grid[0] + 1) // 2, (grid[1] + 1) // 2


def _coarsen(
    rows: Float[Tensor, "P cells"], grid: tuple[int, int], coarse: tuple[int, int]
) -> Float[Tensor, "P coarse"]:
    """Each row's mean over the patches of a cell."""
    return F.adaptive_avg_pool2d(torch.unflatten(rows, -1, grid), coarse).flatten(1)
