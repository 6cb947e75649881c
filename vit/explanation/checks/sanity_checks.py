"""The patch-removal test of a map: does the class lose more probability without the patches that
the map ranks first? The map is compared with maps of the same values in other places.

The evidence is the loss of the class's probability without each tile of patches. The tiles cover
the image: single patches on small grids, and on larger ones, where a single patch changes next to
nothing, the smallest tiles that are at most `MAX_TILES`. They depend on the grid alone, so a photo
has the same verdict alone and among others.

The alternatives are shifted copies of the map: moved around the edges by whole patches, and
mirrored. They have its values and smoothness. Everything is compared once more after subtracting a
quadratic in the position, so that a map of the middle isn't confirmed as one of the object.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vit.explanation.capture.forward import Forward, PatchMaps
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.token_ablation import build_removal
from vit.explanation.methods.maps import Maps
from vit.model.logits import at_least_float32

# largest fractions of the alternatives that agree with the evidence as well as the map
MAX_P_CONFIRMED = 0.05
MAX_P_PARTLY_CONFIRMED = 0.25
MAX_ALTERNATIVES = 1000  # more take time
# up to so many patches are left out one by one, of more at most so many tiles
MAX_SINGLE_PATCHES = 64
MAX_TILES = 49
# Where one patch of n decides, 1 in n alternatives agree as well as a perfect map: fewer than 20
# can't show 5 %.
MIN_TILES = 20
CONFIRMED, PARTLY_CONFIRMED, NOT_CONFIRMED, NOT_TESTED = VERDICTS = (
    "confirmed",
    "partly confirmed",
    "not confirmed",
    "not tested",
)


@dataclass(frozen=True)
class SanityCheck:
    """The patch-removal test of one map.

    Attributes:
        verdict: One of `VERDICTS`.
        reason: The reason in words.
        agreement: Correlation of the signed roots of the map's differences from its median with the
            evidence, -1 to 1.
        p_value: Fraction of the alternatives, including the map, that agree as well as the map.
    """

    verdict: str
    reason: str
    agreement: float
    p_value: float

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


class Tiles(NamedTuple):
    """The tiles of a grid that are left out, on a device.

    Attributes:
        side: Patches a side.
        kept: The patches outside of each tile, for tiles of one size after another.
        places: Patch of the map that each alternative shows at each patch of the tiles.
        means: Matrix to the mean of each tile from the values at its patches.
        trends: 1, x, y, x², xy and y² of each patch, and of each tile, each with its pseudoinverse.
    """

    side: int
    kept: list[Int[Tensor, "size kept"]]
    places: Int[Tensor, "K members"]
    means: Float[Tensor, "m members"]
    trends: list[tuple[Tensor, Tensor]]


def describe_check(p_value: float, agreement: float, grid: Grid) -> SanityCheck:
    """Return the test of a map of this grid from its numbers."""
    tiles = choose_tiles(grid, torch.device("cpu"))
    patches = "single patches"
    if tiles.side > 1:
        patches = f"groups of {tiles.side} × {tiles.side} patches"
    test = f"shifted copies of the map ({patches} removed)"
    # rounded down, because 94.9 % are less than the verdict's 95 %
    percent = math.floor(100 * (1 - p_value) + 1e-6)
    verdict, reason = CONFIRMED, f"better than {percent} % of {test}"
    if len(tiles.means) < MIN_TILES:
        verdict, reason = NOT_TESTED, f"with {grid[0]} × {grid[1]} patches, the test can't tell"
    elif p_value > MAX_P_PARTLY_CONFIRMED:
        verdict, reason = NOT_CONFIRMED, f"no better than {test}"
    elif p_value > MAX_P_CONFIRMED:
        verdict = PARTLY_CONFIRMED
    return SanityCheck(verdict, reason, agreement, p_value)


def check_maps(
    forward: Forward, targets: Int[Tensor, "B T"], maps: Sequence[Maps]
) -> list[Float[Tensor, "B _ 2"]]:
    """Test maps of the first images of a forward pass, all by the same passes without tiles.

    Args:
        forward: The pass.
        targets: Classes that are explained, of the images that are tested.
        maps: Maps of each method for these classes. Maps that don't depend on the class are tested
            for the predicted one, or for a target that isn't about a class.

    Returns:
        What `describe_check` takes for each method, image and class, on the model's device.
    """
    count = len(targets)
    predicted = targets[:, :1]
    if forward.target.classes is not None and forward.target.name is None:
        predicted = forward.logits[:count].argmax(dim=1, keepdim=True)
    *drops, of_predicted = measure_drops(forward, torch.cat([targets, predicted], dim=1))
    checks = []
    for method, values in maps:
        evidence = drops if method.class_specific else [of_predicted]
        columns = zip(values[:count].unbind(dim=1), evidence, strict=True)
        checks.append(torch.stack([check_map(*column) for column in columns], dim=1))
    return checks


def measure_drops(forward: Forward, classes: Int[Tensor, "B T"]) -> list[Float[Tensor, "B m"]]:
    """Measure the loss of the probability of each column of classes without each tile, for the
    first B images of a pass."""
    images = forward.images.detach()[: len(classes)]
    tiles = choose_tiles(forward.grid, images.device)
    compute_kept = build_removal(forward.reader, images, grid=forward.grid)
    places = torch.arange(len(images), device=images.device)
    every_patch = torch.arange(math.prod(forward.grid), device=images.device)[None]
    # all images without the first tile, then without the next; no pass for whole images
    logits = torch.cat(
        [
            compute_kept(places.repeat(len(kept)), kept.repeat_interleave(len(images), dim=0))
            for kept in (every_patch, *tiles.kept)
        ]
    )
    logits = at_least_float32(logits)
    repetitions = len(logits) // len(images)
    drops = []
    for column in classes.unbind(dim=1):
        values = forward.target.value(logits, column.repeat(repetitions))
        whole, *without = torch.unflatten(values, 0, (repetitions, -1))
        drops.append(whole[:, None] - torch.stack(without, dim=1))
    return drops


def check_map(maps: PatchMaps, drops: Float[Tensor, "B m"]) -> Float[Tensor, "B 2"]:
    """Compare each image's map, and its alternatives, with the losses without each tile. Return the
    p-value and the agreement, see `SanityCheck`."""
    tiles = choose_tiles((maps.shape[1], maps.shape[2]), maps.device)
    # double precision, because p-values count ties
    drops = drops.double()
    # Roots, because a few outliers would decide over the values themselves, and the mean of a
    # tile's ranks hides a single patch.
    values = maps.flatten(1).double()
    values = values - values.median(dim=1, keepdim=True).values
    values = values.sign() * values.abs().sqrt()
    # once more without the trend, so that a map of the middle isn't confirmed as one of an object
    (trend, inverse), (tile_trend, tile_inverse) = tiles.trends
    correlations = [
        _correlate_alternatives(values, drops, tiles),
        _correlate_alternatives(
            values - values @ trend @ inverse, drops - drops @ tile_trend @ tile_inverse, tiles
        ),
    ]
    # the map itself is the first alternative; rounding must not rank it behind equal ones
    p_values = [
        (alternatives >= alternatives[:, :1] - 1e-6).double().mean(dim=1)
        for alternatives in correlations
    ]
    return torch.stack([torch.stack(p_values).amax(dim=0), correlations[0][:, 0]], dim=1)


def count_confirmed(maps: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each method that says how many of its tested maps are confirmed, from the
    method and the verdict of each map."""
    tested: dict[str, list[str]] = {}
    for method, verdict in maps:
        if verdict != NOT_TESTED:
            tested.setdefault(method, []).append(verdict)
    return [
        f"{method}: {verdicts.count(CONFIRMED)} of {len(verdicts)} maps confirmed by the"
        " patch-removal test"
        for method, verdicts in tested.items()
    ]


# copied to the device once, because each copy waits for the device
@lru_cache(maxsize=16)
def choose_tiles(grid: Grid, device: torch.device) -> Tiles:
    """Choose the tiles of a grid: single patches, or the smallest tiles that are at most
    `MAX_TILES`, but at least `MIN_TILES`."""
    side, limit = 1, MAX_SINGLE_PATCHES
    tiles = tile_patches(grid, 1)
    while len(tiles) > limit:
        limit = MAX_TILES
        larger = tile_patches(grid, side + 1)
        if len(larger) < MIN_TILES:
            break
        side, tiles = side + 1, larger

    sizes = tiles.sum(dim=1)
    # a batch needs rows of one length
    kept = [
        (~tiles[sizes == size]).nonzero()[:, 1].reshape(-1, tiles.shape[1] - size)
        for size in sorted(set(sizes.tolist()))
    ]
    # a patch of a tile after another, in the order of the tiles
    tile_of_member, members = tiles.nonzero().unbind(dim=1)
    belongs = (torch.arange(len(tiles))[:, None] == tile_of_member).double()
    means = belongs / sizes[:, None]
    # 1, x, y, x², xy and y² of each patch
    down, across = (torch.linspace(-1, 1, length, dtype=torch.float64) for length in grid)
    y, x = (values.flatten() for values in torch.meshgrid(down, across, indexing="ij"))
    trend = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], dim=1)
    return Tiles(
        side,
        [rows.to(device) for rows in kept],
        list_alternatives(grid)[:, members].to(device),
        means.to(device),
        [
            (each.to(device), torch.linalg.pinv(each).to(device))
            for each in (trend, means @ trend[members])
        ],
    )


def tile_patches(grid: Grid, size: int) -> Bool[Tensor, "m P"]:
    """Return the patches of each tile of about size × size patches, smaller tiles first. If a side
    is not a multiple of `size`, tiles differ by one row or column."""
    num_tiles = [math.ceil(side / size) for side in grid]
    down, across = (torch.arange(s) * n // s for s, n in zip(grid, num_tiles, strict=True))
    tile_of_patch = (down[:, None] * num_tiles[1] + across).flatten()
    tiles = tile_of_patch == torch.arange(math.prod(num_tiles))[:, None]
    return tiles[tiles.sum(dim=1).argsort(stable=True)]


def _correlate_alternatives(
    values: Float[Tensor, "B P"], drops: Float[Tensor, "B m"], tiles: Tiles
) -> Float[Tensor, "B K"]:
    """Compute Pearson's correlation of the drops with the mean values of each alternative's tiles;
    0 if one of them is constant."""
    drops = drops - drops.mean(dim=1, keepdim=True)
    correlations = []
    # one image at a time, because each needs K × P numbers
    for image_values, drop in zip(values, drops, strict=True):
        moved = image_values[tiles.places]
        if tiles.side > 1:
            moved = moved @ tiles.means.T
        moved = moved - moved.mean(dim=1, keepdim=True)
        norms = moved.norm(dim=1) * drop.norm()
        correlations.append(torch.where(norms > 0, moved @ drop / norms.clamp_min(1e-30), 0.0))
    return torch.stack(correlations)


def list_alternatives(grid: Grid) -> Int[Tensor, "K P"]:
    """Return the patch of the map that each place of an alternative shows: the map itself, then its
    shifted copies, mirrored (on square grids also transposed) and moved around the edges; at most
    `MAX_ALTERNATIVES`, evenly chosen."""
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
    chosen = copies[:: math.ceil(len(copies) / MAX_ALTERNATIVES) | 1]
    return torch.stack([turned.roll(shift, (0, 1)).flatten() for turned, shift in chosen])
