"""The patch-removal test of a map: does the class lose more probability without the patches that
the map ranks first than without those of shifted copies of the map?

The evidence is the loss of the class's probability without each tile of patches: single patches on
small grids, larger tiles where a single patch changes next to nothing. The copies are moved around
the edges and mirrored, so they have the map's values and smoothness. Everything is compared once
more after subtracting a quadratic in the position, so that a map of the middle isn't confirmed as
one of the object.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vit.explanation.capture.discovery import Grid
from vit.explanation.capture.forward import Forward
from vit.explanation.checks.token_ablation import build_removal
from vit.model.logits import at_least_float32

# largest p-values
MAX_P_CONFIRMED = 0.05
MAX_P_PARTLY_CONFIRMED = 0.25
MAX_COPIES = 1000  # more take time
# largest number of patches that are left out one by one; of more, at most so many tiles
MAX_SINGLE_PATCHES = 64
MAX_TILES = 49
# Where one patch of n decides, 1 in n copies agrees as well as a perfect map: fewer than 20 can't
# show 5 %.
MIN_TILES = 20


@dataclass(frozen=True)
class SanityCheck:
    """The patch-removal test of one map.

    Attributes:
        verdict: "confirmed", "partly confirmed", "not confirmed" or "not tested".
        reason: The reason in words.
        p_value: Fraction of the copies, including the map itself, that agree as well as the map.
    """

    verdict: str
    reason: str
    p_value: float


def measure_drops(forward: Forward, targets: Int[Tensor, "B T"]) -> Float[Tensor, "B _ m"]:
    """Measure the loss of the probability of each class without each tile, for the first B images
    of a pass. The last column is for maps that don't depend on the class: it is about the predicted
    one, or a target that isn't a class."""
    images = forward.images.detach()[: len(targets)]
    predicted = targets[:, 0]
    if forward.target.classes is not None and forward.target.name is None:
        predicted = forward.logits[: len(targets)].argmax(dim=1)
    compute_kept = build_removal(forward.reader, images, grid=forward.grid)
    numbers = torch.arange(len(images), device=images.device)
    every_patch = torch.arange(math.prod(forward.grid), device=images.device)[None]
    # all images without the first tile, then without the next
    parts = [
        compute_kept(numbers.repeat(len(kept)), kept.repeat_interleave(len(images), dim=0))
        for kept in (every_patch, *list_kept(forward.grid, images.device))
    ]
    logits = at_least_float32(torch.cat(parts))
    repetitions = len(logits) // len(images)
    drops = []
    for column in (*targets.unbind(dim=1), predicted):
        values = forward.target.value(logits, column.repeat(repetitions))
        whole, *without = torch.unflatten(values, 0, (repetitions, -1))
        drops.append(whole[:, None] - torch.stack(without, dim=1))
    return torch.stack(drops, dim=1)


def check_map(
    patches: Float[np.ndarray, "rows columns"], drops: Float[Tensor, " m"]
) -> SanityCheck:
    """Compare a map, and its copies, with the losses without each tile."""
    rows, columns = patches.shape
    # double precision, because p-values count ties
    drops = drops.double()
    # Roots, because a few outliers would decide over the values themselves, and the mean of a
    # tile's ranks hides a single patch.
    values = torch.from_numpy(patches).flatten().double()
    values = values - values.median()
    values = values.sign() * values.abs().sqrt()
    copies, trend, shares = describe_grid((rows, columns))
    tile_trend = shares @ trend
    without_trend = (
        values - trend @ (torch.linalg.pinv(trend) @ values),
        drops - tile_trend @ (torch.linalg.pinv(tile_trend) @ drops),
    )
    p_value = 0.0
    for moved, evidence in ((values, drops), without_trend):
        # Pearson's correlation; 0 if one of them is constant
        means = moved[copies] @ shares.T
        means = means - means.mean(dim=1, keepdim=True)
        evidence = evidence - evidence.mean()
        norms = means.norm(dim=1) * evidence.norm()
        agreement = torch.where(norms > 0, means @ evidence / norms.clamp_min(1e-30), 0.0)
        # the map itself comes first; rounding must not rank it behind equal ones
        as_good = agreement >= agreement[0] - 1e-6
        p_value = max(p_value, as_good.double().mean().item())
    # rounded down, because 94.9 % are less than the verdict's 95 %
    percent = math.floor(100 * (1 - p_value) + 1e-6)
    verdict, reason = "confirmed", f"better than {percent} % of shifted copies of the map"
    if rows * columns < MIN_TILES:
        verdict, reason = "not tested", f"with {rows} × {columns} patches, the test can't tell"
    elif p_value > MAX_P_PARTLY_CONFIRMED:
        verdict, reason = "not confirmed", "no better than shifted copies of the map"
    elif p_value > MAX_P_CONFIRMED:
        verdict = "partly confirmed"
    return SanityCheck(verdict, reason, p_value)


def count_confirmed(images: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say for each method how many of its tested maps are confirmed, from images as the manifest
    has them."""
    maps = [found for image in images for found in image["maps"] if found["sanity_check"]]
    verdicts = [(found["method"], found["sanity_check"]["verdict"]) for found in maps]
    tested = Counter(method for method, verdict in verdicts if verdict != "not tested")
    return [
        f"{method}: {verdicts.count((method, 'confirmed'))} of {count} maps confirmed by the"
        " patch-removal test"
        for method, count in tested.items()
    ]


# copied to the device once, because each copy waits for the device
@lru_cache(maxsize=16)
def list_kept(grid: Grid, device: torch.device) -> list[Int[Tensor, "size kept"]]:
    """Return the patches outside of each tile, in a tensor for each size of tiles."""
    tiles = choose_tiles(grid)
    sizes = tiles.sum(dim=1)
    return [
        (~tiles[sizes == size]).nonzero()[:, 1].reshape(-1, tiles.shape[1] - size).to(device)
        for size in sorted(set(sizes.tolist()))
    ]


@lru_cache(maxsize=16)
def describe_grid(
    grid: Grid,
) -> tuple[Int[Tensor, "K P"], Float[Tensor, "P 6"], Float[Tensor, "m P"]]:
    """Return the copies of a map, 1, x, y, x², xy and y² of each patch, and the matrix to the mean
    of each tile."""
    down, across = (torch.linspace(-1, 1, length, dtype=torch.float64) for length in grid)
    y, x = (values.flatten() for values in torch.meshgrid(down, across, indexing="ij"))
    trend = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], dim=1)
    tiles = choose_tiles(grid).double()
    return list_copies(grid), trend, tiles / tiles.sum(dim=1, keepdim=True)


def choose_tiles(grid: Grid) -> Bool[Tensor, "m P"]:
    """Return the patches of each tile: single patches, or the smallest tiles that are at most
    `MAX_TILES`, but at least `MIN_TILES`; smaller tiles first."""
    tiles, limit = _tile_patches(grid, 1), MAX_SINGLE_PATCHES
    for side in range(2, max(grid)):
        larger = _tile_patches(grid, side)
        if len(tiles) <= limit or len(larger) < MIN_TILES:
            break
        tiles, limit = larger, MAX_TILES
    return tiles[tiles.sum(dim=1).argsort(stable=True)]


def _tile_patches(grid: Grid, size: int) -> Bool[Tensor, "m P"]:
    """Return the patches of each tile of size × size patches; some have one row or column less."""
    num_tiles = [math.ceil(side / size) for side in grid]
    down, across = (torch.arange(s) * n // s for s, n in zip(grid, num_tiles, strict=True))
    tile_of_patch = (down[:, None] * num_tiles[1] + across).flatten()
    return tile_of_patch == torch.arange(math.prod(num_tiles))[:, None]


def list_copies(grid: Grid) -> Int[Tensor, "K P"]:
    """Return the patch of the map that each patch of a copy shows: the map itself, then copies,
    mirrored (on square grids also transposed) and moved around the edges; at most `MAX_COPIES`,
    evenly chosen."""
    index = torch.arange(grid[0] * grid[1]).reshape(grid)
    mirrored = [index.flip(sides) for sides in ((), (0,), (1,), (0, 1))]
    if grid[0] == grid[1]:
        mirrored += [turned.T for turned in mirrored]
    copies = [
        (turned, (down, across))
        for down in range(grid[0])
        for across in range(grid[1])
        for turned in mirrored
    ]
    # all of them would take gigabytes on large grids; an odd step takes each of the 4 or 8
    # orientations equally often
    chosen = copies[:: math.ceil(len(copies) / MAX_COPIES) | 1]
    return torch.stack([turned.roll(shift, (0, 1)).flatten() for turned, shift in chosen])
