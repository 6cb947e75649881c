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
from collections.abc import Mapping, Sequence
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
        alternatives: Number of alternatives.
        patches: The patches that were removed, such as "groups of 4 × 4 patches".
    """

    verdict: str
    reason: str
    agreement: float
    p_value: float
    alternatives: int
    patches: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


class MapChecks(NamedTuple):
    """Tests of one map of each image, as tensors that are copied to the host together with the
    maps."""

    p_value: Float[Tensor, " B"]
    agreement: Float[Tensor, " B"]
    is_constant: Bool[Tensor, " B"]
    grid: Grid

    def to_list(self) -> list[SanityCheck]:
        """Return the test of each image; the tensors must be on the host."""
        tiles = choose_tiles(self.grid, torch.device("cpu"))
        patches = "single patches"
        if tiles.side > 1:
            patches = f"groups of {tiles.side} × {tiles.side} patches"
        columns = (self.p_value.tolist(), self.agreement.tolist(), self.is_constant.tolist())
        checks = []
        for p_value, agreement, is_constant in zip(*columns, strict=True):
            test = f"shifted copies of the map ({patches} removed)"
            # rounded down, because 94.9 % are less than the verdict's 95 %
            percent = math.floor(100 * (1 - p_value) + 1e-6)
            verdict, reason = CONFIRMED, f"better than {percent} % of {test}"
            if len(tiles.means) < MIN_TILES:
                rows, across = self.grid
                verdict = NOT_TESTED
                reason = f"with {rows} × {across} patches, the test can't tell"
            elif is_constant:
                verdict, reason = NOT_CONFIRMED, "every patch has the same value"
            elif p_value > MAX_P_PARTLY_CONFIRMED:
                verdict, reason = NOT_CONFIRMED, f"no better than {test}"
            elif p_value > MAX_P_CONFIRMED:
                verdict = PARTLY_CONFIRMED
            checks.append(
                SanityCheck(verdict, reason, agreement, p_value, len(tiles.places), patches)
            )
        return checks


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


def check_maps(
    forward: Forward,
    targets: Int[Tensor, "B T"],
    maps: Sequence[Maps],
    *,
    count: int | None = None,
) -> list[list[MapChecks]]:
    """Test maps of one forward pass, all by the same passes without tiles.

    Args:
        forward: The pass.
        targets: Classes that are explained.
        maps: Maps of each method for these classes. Maps that don't depend on the class are tested
            for the predicted one, or for a target that isn't about a class.
        count: Number of images, from the first on, whose maps are tested. None: all.

    Returns:
        The tests by method and class, on the model's device; none if no image is tested.
    """
    if count == 0:
        return [[] for _ in maps]
    predicted = targets[:, :1]
    if not forward.target.predicted_first and forward.target.name is None:
        predicted = forward.logits.argmax(dim=1, keepdim=True)
    *drops, of_predicted = measure_drops(forward, torch.cat([targets, predicted], dim=1)[:count])
    checks = []
    for method, values in maps:
        evidence = drops if method.class_specific else [of_predicted]
        columns = zip(values[:count].unbind(dim=1), evidence, strict=True)
        checks.append([check_map(*column) for column in columns])
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


def check_map(maps: PatchMaps, drops: Float[Tensor, "B m"]) -> MapChecks:
    """Compare each image's map, and its alternatives, with the losses without each tile."""
    grid = (maps.shape[1], maps.shape[2])
    tiles = choose_tiles(grid, maps.device)
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
    return MapChecks(
        p_value=torch.stack(p_values).amax(dim=0),
        agreement=correlations[0][:, 0],
        is_constant=maps.flatten(1).amax(dim=1) == maps.flatten(1).amin(dim=1),
        grid=grid,
    )


def count_confirmed(verdicts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each method that says how many of its tested maps are confirmed, from the
    verdicts of its maps."""
    lines = []
    for method, of_method in verdicts.items():
        tested = [verdict for verdict in of_method if verdict != NOT_TESTED]
        if tested:
            confirmed = f"{tested.count(CONFIRMED)} of {len(tested)} maps confirmed"
            lines.append(f"{method}: {confirmed} by the patch-removal test")
    return lines


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
    trend = _quadratic(grid)
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
    sides = []
    for side in grid:
        num_tiles = math.ceil(side / size)
        sides.append(torch.arange(side) * num_tiles // side)
    down, across = sides
    tile_of_patch = (down[:, None] * math.ceil(grid[1] / size) + across).flatten()
    tiles = tile_of_patch == torch.arange(int(tile_of_patch[-1]) + 1)[:, None]
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


def _quadratic(grid: Grid) -> Float[Tensor, "P 6"]:
    """Compute 1, x, y, x², xy and y² of each patch."""
    down, across = (torch.linspace(-1, 1, side, dtype=torch.float64) for side in grid)
    y, x = (values.flatten() for values in torch.meshgrid(down, across, indexing="ij"))
    return torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], dim=1)
