"""The patch-removal test of a map: does the class lose more probability without the patches that
the map ranks first? The map is compared with maps of the same values in other places.

The evidence is the loss of the class's probability without each group of patches. The groups are
tiles that cover the image, at most `MAX_GROUPS`: single patches on small grids, and on larger ones,
where a single patch changes next to nothing, the smallest tiles that aren't more. They depend on
the grid alone, so a photo has the same verdict alone and among others.

The alternatives are shifted copies of the map: moved around the edges by whole patches, and
mirrored. They have its values and smoothness. Everything is compared once more after subtracting a
quadratic in the position, so that a map of the middle isn't confirmed as one of the object.

research/sanity_checks.py measures how often maps of other images, smooth noise and a Gaussian are
confirmed.
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
from vit.explanation.checks.token_ablation import (
    build_removal,
    group_members,
    leave_one_out,
    tile_patches,
)
from vit.explanation.methods.maps import Maps
from vit.model.logits import at_least_float32

# largest fractions of the alternatives that agree with the evidence as well as the map
MAX_P_CONFIRMED = 0.05
MAX_P_PARTLY_CONFIRMED = 0.25
# fewer alternatives can't show 5 %, more take time
MIN_ALTERNATIVES = 39
MAX_ALTERNATIVES = 1000
# tiles that are left out
MAX_GROUPS = 49
# fewer groups distinguish few maps; a quadratic takes 6 degrees of freedom
MIN_GROUPS = 12
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


class Groups(NamedTuple):
    """The groups of patches that are left out on a grid, from `choose_groups`.

    Attributes:
        members: Patches of each group, on the host.
        side: Patches a side.
    """

    members: Bool[Tensor, "m P"]
    side: int

    def __str__(self) -> str:
        return (
            "single patches" if self.side == 1 else f"groups of {self.side} × {self.side} patches"
        )


class Evidence(NamedTuple):
    """Losses of the probability of one class of each image without groups of patches."""

    drops: Float[Tensor, "B m"]
    groups: Groups


class MapChecks(NamedTuple):
    """Tests of one map of each image, as tensors that are copied to the host together with the
    maps."""

    p_value: Float[Tensor, " B"]
    agreement: Float[Tensor, " B"]
    is_constant: Bool[Tensor, " B"]
    alternatives: int
    patches: str

    def to_list(self) -> list[SanityCheck]:
        """Return the test of each image; the tensors must be on the host."""
        checks = []
        columns = (self.p_value.tolist(), self.agreement.tolist(), self.is_constant.tolist())
        for p_value, agreement, is_constant in zip(*columns, strict=True):
            verdict, reason = _find_verdict(
                p_value, self.alternatives, self.patches, is_constant=is_constant
            )
            checks.append(
                SanityCheck(verdict, reason, agreement, p_value, self.alternatives, self.patches)
            )
        return checks


def check_maps(
    forward: Forward,
    targets: Int[Tensor, "B T"],
    maps: Sequence[Maps],
    *,
    predicted_first: bool = False,
) -> list[list[MapChecks]]:
    """Test maps of one forward pass.

    Args:
        forward: The pass.
        targets: Classes that are explained.
        maps: Maps of each method for these classes. Maps that don't depend on the class are tested
            for the predicted one.
        predicted_first: The first targets are the predicted classes, so that their evidence is
            used for both kinds of maps.

    Returns:
        The tests by method and class, on the model's device.
    """
    classes = targets
    if not predicted_first:
        classes = torch.cat([targets, forward.logits.argmax(dim=1, keepdim=True)], dim=1)
    evidence = measure_evidence(forward, classes)
    checks = []
    for method_maps in maps:
        has_classes = method_maps.method.class_specific or predicted_first
        columns = enumerate(method_maps.values.unbind(dim=1))
        checks.append(
            [check_map(values, evidence[i if has_classes else -1]) for i, values in columns]
        )
    return checks


def check_map(maps: PatchMaps, evidence: Evidence) -> MapChecks:
    """Compare each image's map, and its alternatives, with the evidence of its class."""
    grid = (maps.shape[1], maps.shape[2])
    compared = _compare_groups(grid, group_members(evidence.groups.members), maps.device)
    # double precision, because p-values count ties
    drops = evidence.drops.double()
    # Roots, because a few outliers would decide over the values themselves, and the mean of a
    # tile's ranks hides a single patch.
    values = maps.flatten(1).double()
    values = values - values.median(dim=1, keepdim=True).values
    values = values.sign() * values.abs().sqrt()
    correlations = [_correlate_alternatives(values, drops, compared)]
    if len(evidence.groups.members) >= MIN_GROUPS:
        # once more without the trend, so that a map of the middle isn't confirmed as one of an
        # object
        trend, inverse = _quadratic(grid, maps.device)
        values = values - values @ trend @ inverse
        drops = drops - drops @ compared.trend @ compared.inverse
        correlations.append(_correlate_alternatives(values, drops, compared))

    # the map itself is the first alternative; rounding must not rank it behind equal ones
    p_values = [
        (alternatives >= alternatives[:, :1] - 1e-6).double().mean(dim=1)
        for alternatives in correlations
    ]
    return MapChecks(
        p_value=torch.stack(p_values).amax(dim=0),
        agreement=correlations[0][:, 0],
        is_constant=maps.flatten(1).amax(dim=1) == maps.flatten(1).amin(dim=1),
        alternatives=len(compared.places),
        patches=str(evidence.groups),
    )


@lru_cache(maxsize=16)
def choose_groups(grid: Grid) -> Groups:
    """Choose the tiles of a grid: the smallest that are at most `MAX_GROUPS`, or the largest that
    are at least `MIN_GROUPS`. Grids of fewer patches have single ones."""
    chosen = Groups(tile_patches(grid, 1), 1)
    while len(chosen.members) > MAX_GROUPS:
        larger = Groups(tile_patches(grid, chosen.side + 1), chosen.side + 1)
        if len(larger.members) < MIN_GROUPS:
            break
        chosen = larger
    return chosen


def measure_evidence(forward: Forward, classes: Int[Tensor, "B T"]) -> list[Evidence]:
    """Measure the loss of the probability of each column of classes without each group of patches,
    all from the same passes."""
    groups = choose_groups(forward.grid)
    images = forward.images.detach()
    rows = torch.arange(len(images), device=images.device)
    compute_kept = build_removal(forward.reader, images, grid=forward.grid)

    @torch.no_grad()
    def predict(kept: Int[Tensor, "B kept"]) -> Float[Tensor, "B T"]:
        logits = at_least_float32(compute_kept(rows, kept))
        values = [forward.target.value(logits, column) for column in classes.unbind(dim=1)]
        return torch.stack(values, dim=1)

    drops = leave_one_out(predict, batch=len(images), groups=groups.members, device=images.device)
    return [Evidence(column, groups) for column in drops.unbind(dim=2)]


def _find_verdict(
    p_value: float, alternatives: int, patches: str, *, is_constant: bool
) -> tuple[str, str]:
    """Return verdict and reason."""
    if is_constant:
        return NOT_CONFIRMED, "every patch has the same value"
    if alternatives < MIN_ALTERNATIVES:
        reason = f"with so few patches there are only {alternatives} shifted copies of the map"
        return NOT_TESTED, reason
    test = f"shifted copies of the map ({patches} removed)"
    if p_value > MAX_P_PARTLY_CONFIRMED:
        return NOT_CONFIRMED, f"no better than {test}"
    # rounded down, because 94.9 % are less than the verdict's 95 %
    percent = math.floor(100 * (1 - p_value) + 1e-6)
    verdict = CONFIRMED if p_value <= MAX_P_CONFIRMED else PARTLY_CONFIRMED
    return verdict, f"better than {percent} % of {test}"


def count_confirmed(verdicts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each method that says how many of its maps are confirmed.

    Args:
        verdicts: Verdicts of each method's maps. Maps that were not tested don't count.
    """
    lines = []
    for method, map_verdicts in verdicts.items():
        tested = [verdict for verdict in map_verdicts if verdict != NOT_TESTED]
        if tested:
            count = tested.count(CONFIRMED)
            lines.append(
                f"{method}: {count} of {len(tested)} maps confirmed by the patch-removal test"
            )
    return lines


class _ComparedGroups(NamedTuple):
    """The groups of a test, on the device.

    Attributes:
        places: Patch of the map that each alternative shows at each patch of a group.
        means: Matrix from the values at these patches to the mean of each group.
        trend: 1, x, y, x², xy and y² of each group.
        inverse: Pseudoinverse of the trend.
    """

    places: Int[Tensor, "K members"]
    means: Float[Tensor, "members m"]
    trend: Float[Tensor, "m 6"]
    inverse: Float[Tensor, "6 m"]


# copied to the device once, because each copy waits for the device
@lru_cache(maxsize=16)
def _compare_groups(
    grid: Grid, groups: tuple[tuple[int, ...], ...], device: torch.device
) -> _ComparedGroups:
    members = [patch for group in groups for patch in group]
    sizes = torch.tensor([len(group) for group in groups])
    group_of_member = torch.arange(len(groups)).repeat_interleave(sizes)
    belongs = (group_of_member[:, None] == torch.arange(len(groups))).double()
    means = belongs / sizes

    trend_of_patches, _ = _quadratic(grid, torch.device("cpu"))
    trend = means.T @ trend_of_patches[members]
    return _ComparedGroups(
        list_alternatives(grid)[:, members].to(device),
        means.to(device),
        trend.to(device),
        torch.linalg.pinv(trend).to(device),
    )


def _correlate_alternatives(
    values: Float[Tensor, "B P"], drops: Float[Tensor, "B m"], compared: _ComparedGroups
) -> Float[Tensor, "B K"]:
    """Compute Pearson's correlation of the drops with the mean values of each alternative's groups;
    0 if one of them is constant."""
    drops = drops - drops.mean(dim=1, keepdim=True)
    has_single_patches = compared.means.shape[0] == compared.means.shape[1]
    correlations = []
    # one image at a time, because each needs K × P numbers
    for image_values, drop in zip(values, drops, strict=True):
        moved = image_values[compared.places]
        if not has_single_patches:
            moved = moved @ compared.means
        moved = moved - moved.mean(dim=1, keepdim=True)
        norms = moved.norm(dim=1) * drop.norm()
        correlations.append(torch.where(norms > 0, moved @ drop / norms.clamp_min(1e-30), 0.0))
    return torch.stack(correlations)


@lru_cache(maxsize=4)
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


@lru_cache(maxsize=4)
def _quadratic(
    grid: Grid, device: torch.device
) -> tuple[Float[Tensor, "P 6"], Float[Tensor, "6 P"]]:
    """Compute 1, x, y, x², xy and y² of each patch, and the pseudoinverse."""
    down, across = (torch.linspace(-1, 1, side, dtype=torch.float64) for side in grid)
    y, x = (values.flatten() for values in torch.meshgrid(down, across, indexing="ij"))
    trend = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], dim=1)
    return trend.to(device), torch.linalg.pinv(trend).to(device)
