"""What every patch attends to, in few bytes: what a page shows of the patch under the pointer. A row of attention is
stored as 8-bit fractions of its own maximum. Where the rows don't fit the given bytes, the cells that they are about
become coarser than patches, and what does not fit even so is left out: single heads first, then layers."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.explanation.capture.readout import Forward, Grid
from vit.explanation.methods.rollout import attention_rollout


@dataclass(frozen=True)
class PatchAttention:
    """Attention from patch to patch: entry [i, j] · maxima[i] / 255 is what patch i takes from cell j of a `grid` that
    may be coarser than the patches'. `layer` None is rollout; `head` None is the mean over heads."""

    layer: int | None
    head: int | None
    grid: Grid
    values: UInt8[np.ndarray, "P cells"]
    maxima: Float[np.ndarray, " P"]


def collect_patch_attention(forward: Forward, image: int, *, budget: int) -> list[PatchAttention]:
    """Rollout of one image of the batch, and each layer's and head's attention as far as `budget` bytes go."""
    one, patches = slice(image, image + 1), slice(forward.num_prefix_tokens, None)
    layers, grid = forward.record.layers, forward.grid
    count = grid[0] * grid[1]
    rollout_grid = _fit(grid, budget // count)
    if rollout_grid is None:
        return []
    left = budget // count - rollout_grid[0] * rollout_grid[1]  # cells that each patch may still have
    layer_grid = _fit(grid, left // len(layers)) if rollout_grid == grid else None
    rollout = attention_rollout([layer.attention(one) for layer in layers])[0, patches, patches]
    kept = [_quantise(rollout, grid, rollout_grid)]
    if layer_grid is None:
        return kept
    with_heads = left >= count * len(layers) * (1 + layers[0].num_heads)
    heads_kept = []
    for number, layer in enumerate(layers):
        attention = layer.attention(one)[0, :, patches, patches]  # [H, P, P]
        kept.append(_quantise(attention.mean(dim=0), grid, layer_grid, layer=number))
        if with_heads:
            heads_kept += [_quantise(a, grid, grid, layer=number, head=head) for head, a in enumerate(attention)]
    return kept + heads_kept


def _quantise(
    rows: Float[Tensor, "P P"], grid: Grid, cells: Grid, *, layer: int | None = None, head: int | None = None
) -> PatchAttention:
    """Rows as 8-bit fractions of their maxima, each the mean over the patches of a cell."""
    if cells != grid:
        rows = F.adaptive_avg_pool2d(torch.unflatten(rows, -1, grid), cells).flatten(1)
    maxima = rows.amax(dim=1)
    values = (rows / maxima.clamp_min(torch.finfo(rows.dtype).tiny)[:, None] * 255).round().to(torch.uint8)
    return PatchAttention(layer, head, cells, values.cpu().numpy(), maxima.float().cpu().numpy())


def _fit(grid: Grid, most: int) -> Grid | None:
    """`grid`, halved until it has at most so many cells; None where that leaves less than 2×2."""
    while grid[0] * grid[1] > most:
        grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        if min(grid) < 2:
            return None
    return grid
