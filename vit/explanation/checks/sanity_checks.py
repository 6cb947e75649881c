"""The patch-removal test of a map: does the class lose more probability without the patches that
the map ranks first? The map is compared with maps of the same values in other places.

The evidence is the loss of the class's probability without each group of patches. On grids of up to
`LEAVE_OUT_ALL` patches each patch is left out alone. On larger grids a single patch may change next
to nothing, so `choose_group_size` finds the smallest groups that the model reacts to: groups that
are ranked alike by two ways to remove them, dropping their tokens and painting them over. Single
patches are then compared by the removal gradient, which is close to leaving each out. Maps that are
made of the removal gradient, and all maps if groups are larger, are compared by leaving out up to
`MAX_GROUPS` groups all over the image. If no size gives a clear ranking, nothing is tested.

The alternatives are shifted copies of the map: moved around the edges by whole patches, and
mirrored. They have its values and smoothness. Everything is compared once more after subtracting a
quadratic in the position, so that a map of the middle isn't confirmed as one of the object.

research/sanity_checks.py measures how often maps of other images, smooth noise and a Gaussian are
confirmed.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vit.explanation.capture.forward import Forward, Grid, PatchMaps
from vit.explanation.checks.token_ablation import (
    Fill,
    build_probability,
    build_removal,
    group_members,
    leave_one_out,
    tile_patches,
)
from vit.explanation.methods.maps import Maps
from vit.explanation.methods.removal import compute_removal_gradient
from vit.runtime.tensors import Images

# largest fractions of the alternatives that agree with the evidence as well as the map
MAX_P_CONFIRMED = 0.05
MAX_P_PARTLY_CONFIRMED = 0.25
# fewer alternatives can't show 5 %, more take time
MIN_ALTERNATIVES = 39
MAX_ALTERNATIVES = 1000
# largest number of patches that are left out one by one
LEAVE_OUT_ALL = 25
# patches a side of the groups that are tried on larger grids, and number of groups that are left out
GROUP_SIZES = (1, 2, 4)
MAX_GROUPS = 24
# fewer groups distinguish few maps; a quadratic takes 6 degrees of freedom
MIN_GROUPS = 12
# rank correlation of the two ways to remove a group, averaged over RELIABILITY_IMAGES images: the
# smallest groups above CLEAR_RELIABILITY are taken, otherwise those with the highest correlation if
# it is above MIN_RELIABILITY
CLEAR_RELIABILITY = 0.8
MIN_RELIABILITY = 0.3
RELIABILITY_IMAGES = 4
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
        agreement: Correlation of the patches' ranks in the map with the evidence, -1 to 1.
        p_value: Fraction of the alternatives, including the map, that agree as well as the map.
        alternatives: Number of alternatives.
        evidence: "leave-one-out" or "removal-gradient".
        patches: The patches that were removed, such as "groups of 4 × 4 patches".
    """

    verdict: str
    reason: str
    agreement: float
    p_value: float
    alternatives: int
    evidence: str
    patches: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


@dataclass(frozen=True)
class GroupSize:
    """Size of the groups of patches that a model reacts to, found by `choose_group_size`.

    Attributes:
        side: Patches a side; None if no size gives a clear answer.
        reliability: Rank correlation of both ways to remove them; 1 if there was nothing to choose.
    """

    side: int | None
    reliability: float = 1.0

    def __str__(self) -> str:
        if self.side == 1:
            return "single patches"
        side = self.side or max(GROUP_SIZES)
        return f"groups of {side} × {side} patches"


SINGLE_PATCHES = GroupSize(1)


@dataclass(frozen=True)
class Evidence:
    """Losses of the probability of one class of each image without groups of patches.

    Attributes:
        name: "leave-one-out", "removal-gradient" or "none".
        drops: Loss without each group.
        groups: Patches of each group, on the host.
        size: Size of the groups.
    """

    name: str
    drops: Float[Tensor, "B m"]
    groups: Bool[Tensor, "m P"]
    size: GroupSize = SINGLE_PATCHES


class MapChecks(NamedTuple):
    """Tests of one map of each image, as tensors that are copied to the host together with the
    maps."""

    p_value: Float[Tensor, " B"]
    agreement: Float[Tensor, " B"]
    is_constant: Bool[Tensor, " B"]
    alternatives: int
    evidence: str
    size: GroupSize

    def to_list(self) -> list[SanityCheck]:
        """Return the test of each image; the tensors must be on the host."""
        checks = []
        columns = (self.p_value.tolist(), self.agreement.tolist(), self.is_constant.tolist())
        for p_value, agreement, is_constant in zip(*columns, strict=True):
            verdict, reason = _find_verdict(
                p_value, self.alternatives, self.size, is_constant=is_constant
            )
            checks.append(
                SanityCheck(
                    verdict,
                    reason,
                    agreement,
                    p_value,
                    self.alternatives,
                    self.evidence,
                    str(self.size),
                )
            )
        return checks


def check_maps(
    forward: Forward,
    targets: Int[Tensor, "B T"],
    maps: Sequence[Maps],
    *,
    predicted_first: bool = False,
    group_size: GroupSize | None = None,
) -> list[list[MapChecks]]:
    """Test maps of one forward pass.

    Args:
        forward: The pass, whose graph is kept.
        targets: Classes that are explained.
        maps: Maps of each method for these classes. Maps that don't depend on the class are tested
            for the predicted one.
        predicted_first: The first targets are the predicted classes, so that their evidence is
            used for both kinds of maps.
        group_size: Size from `choose_group_size`. None: it is chosen here.

    Returns:
        The tests by method and class, on the model's device.
    """
    predicted = targets[:, 0] if predicted_first else forward.logits.argmax(dim=1)
    group_size = group_size or choose_group_size(forward)
    # by column of the targets (-1: the predicted class), and whether to avoid the removal gradient
    evidence: dict[tuple[int, bool], Evidence] = {}
    checks: list[list[MapChecks]] = [[] for _ in maps]
    for method_maps, method_checks in zip(maps, checks, strict=True):
        is_specific = method_maps.method.class_specific
        # groups are left out for every method, which share that evidence
        is_circular = (
            method_maps.method.uses_removal
            and group_size.side == 1
            and not _leaves_all_out(forward)
        )
        for column, values in enumerate(method_maps.values.unbind(dim=1)):
            key = (column if is_specific or predicted_first else -1, is_circular)
            if key not in evidence:
                classes = targets[:, column] if is_specific else predicted
                evidence[key] = occlusion_reference(
                    forward, classes, circular=is_circular, size=group_size
                )
            method_checks.append(check_map(values, evidence[key]))
    return checks


def check_map(maps: PatchMaps, evidence: Evidence) -> MapChecks:
    """Compare each image's map, and its alternatives, with the evidence of its class."""
    grid = (maps.shape[1], maps.shape[2])
    compared = _compare_groups(grid, group_members(evidence.groups), maps.device)
    # double precision, because p-values count ties
    drops = evidence.drops.double()
    # ranks, because the scales of maps and losses differ
    ranks = _centred_ranks(maps.flatten(1).float()).double()
    correlations = [_correlate_alternatives(ranks, drops, compared)]
    if len(evidence.groups) >= MIN_GROUPS:
        # once more without the trend, so that a map of the middle isn't confirmed as one of an object
        trend, inverse = _quadratic(grid, maps.device)
        ranks = ranks - ranks @ trend @ inverse
        drops = drops - drops @ compared.trend @ compared.inverse
        correlations.append(_correlate_alternatives(ranks, drops, compared))

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
        evidence=evidence.name,
        size=evidence.size,
    )


def choose_group_size(forward: Forward) -> GroupSize:
    """Find the smallest groups of patches whose removal gives a clear answer: dropping their tokens
    and painting them over rank them alike, in the mean over the first images. For models that need
    all tokens, painting is compared with blurring.

    On small grids single patches are left out even if they change little.
    """
    if _leaves_all_out(forward):
        return SINGLE_PATCHES
    images = forward.images[:RELIABILITY_IMAGES].detach()
    classes = forward.logits[:RELIABILITY_IMAGES].argmax(dim=1)
    fills: tuple[Fill, Fill] = ("auto", "mean")
    if not forward.reader.can_drop_tokens:
        fills = ("mean", "blur")

    best = GroupSize(None, 0.0)
    for side in GROUP_SIZES:
        groups = choose_groups(forward.grid, side)
        if len(groups) < MIN_GROUPS:
            break
        left_out, painted = (
            _leave_groups_out(forward, images, classes, groups, fill=fill) for fill in fills
        )
        correlation = rank_correlation(left_out[:, None], painted[:, None])
        size = GroupSize(side, correlation.mean().item())
        if size.reliability >= CLEAR_RELIABILITY:
            return size
        best = max(best, size, key=lambda size: size.reliability)
    return best if best.reliability >= MIN_RELIABILITY else GroupSize(None, best.reliability)


def choose_groups(grid: Grid, side: int) -> Bool[Tensor, "m P"]:
    """Choose up to `MAX_GROUPS` tiles of side × side patches: all of them, or one in each part of
    the image. They are the same in every image, so that a test doesn't depend on the batch."""
    tiles = tile_patches(grid, side)
    if len(tiles) <= MAX_GROUPS:
        return tiles
    # parts are about as high as wide, in tiles
    rows = math.ceil(grid[0] / side)
    columns = len(tiles) // rows
    num_down = min(max(round(math.sqrt(MAX_GROUPS * rows / columns)), 1), rows, MAX_GROUPS)
    num_across = min(MAX_GROUPS // num_down, columns)
    part_of_row = torch.arange(rows) * num_down // rows
    part_of_column = torch.arange(columns) * num_across // columns
    part_of_tile = (part_of_row[:, None] * num_across + part_of_column).flatten()

    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(tiles), generator=generator)
    # the first tile of each part in a random order
    firsts = [order[part_of_tile[order] == part][0] for part in range(num_down * num_across)]
    return tiles[torch.stack(firsts).sort().values]


def occlusion_reference(
    forward: Forward,
    classes: Int[Tensor, " B"],
    *,
    circular: bool = False,
    size: GroupSize = SINGLE_PATCHES,
) -> Evidence:
    """Measure the loss of each image's class probability without each group of patches.

    Args:
        forward: The pass, whose graph is kept.
        classes: One class of each image.
        circular: The removal gradient would be compared with itself, so it can't be the evidence.
        size: Size of the groups.
    """
    leaves_all_out = _leaves_all_out(forward)
    every_patch = tile_patches(forward.grid, 1)
    if size.side is None:
        # there is nothing to compare with
        return Evidence("none", torch.zeros_like(forward.logits[:, :1]), every_patch[:1], size)
    has_layers = bool(forward.record.layers)
    if size.side == 1 and has_layers and not leaves_all_out and not circular:
        # there is no removal gradient if the gates of the pooling are unknown
        no_gradient = suppress(ValueError)
        float32 = torch.autocast(forward.images.device.type, enabled=False)
        with no_gradient, torch.enable_grad(), float32:
            gradient = compute_removal_gradient(forward, forward.value(classes)).detach()
            drops = gradient[:, forward.num_prefix_tokens :]
            return Evidence("removal-gradient", drops, every_patch)

    groups = every_patch if leaves_all_out else choose_groups(forward.grid, size.side)
    images = forward.images.detach()
    drops = _leave_groups_out(forward, images, classes, groups)
    return Evidence("leave-one-out", drops, groups, size)


def _leave_groups_out(
    forward: Forward,
    images: Images,
    classes: Int[Tensor, " b"],
    groups: Bool[Tensor, "m P"],
    *,
    fill: Fill = "auto",
) -> Float[Tensor, "b m"]:
    """Measure the loss of each image's class probability without each of `groups`."""
    compute_kept = build_removal(forward.reader, images, grid=forward.grid, fill=fill)
    predict = build_probability(compute_kept, classes, target=forward.target)
    return leave_one_out(predict, batch=len(images), groups=groups, device=images.device)


def _leaves_all_out(forward: Forward) -> bool:
    """Return whether every patch is left out, for all methods."""
    return forward.grid[0] * forward.grid[1] <= LEAVE_OUT_ALL and forward.reader.can_drop_tokens


def _find_verdict(
    p_value: float, alternatives: int, size: GroupSize, *, is_constant: bool
) -> tuple[str, str]:
    """Return verdict and reason."""
    if size.side is None:
        reason = (
            f"for this model the effect of single patches or {size} is not clear: dropping them and"
            f" painting them over rank them differently (ρ {size.reliability:.2f})"
        )
        return NOT_TESTED, reason
    if is_constant:
        return NOT_CONFIRMED, "every patch has the same value"
    if alternatives < MIN_ALTERNATIVES:
        reason = f"with so few patches there are only {alternatives} shifted copies of the map"
        return NOT_TESTED, reason
    test = f"shifted copies of the map ({size} removed)"
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
        _alternatives(grid)[:, members].to(device),
        means.to(device),
        trend.to(device),
        torch.linalg.pinv(trend).to(device),
    )


def _correlate_alternatives(
    ranks: Float[Tensor, "B P"], drops: Float[Tensor, "B m"], compared: _ComparedGroups
) -> Float[Tensor, "B K"]:
    """Compute Pearson's correlation of the drops with the mean ranks of each alternative's groups;
    0 if one of them is constant."""
    drops = drops - drops.mean(dim=1, keepdim=True)
    has_single_patches = compared.means.shape[0] == compared.means.shape[1]
    correlations = []
    # one image at a time, because each needs K × P numbers
    for image_ranks, drop in zip(ranks, drops, strict=True):
        moved = image_ranks[compared.places]
        if not has_single_patches:
            moved = moved @ compared.means
        moved = moved - moved.mean(dim=1, keepdim=True)
        norms = moved.norm(dim=1) * drop.norm()
        correlations.append(torch.where(norms > 0, moved @ drop / norms.clamp_min(1e-30), 0.0))
    return torch.stack(correlations)


@lru_cache(maxsize=4)
def _alternatives(grid: Grid) -> Int[Tensor, "K P"]:
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
    # all of them would take gigabytes on large grids
    chosen = copies[:: math.ceil(len(copies) / MAX_ALTERNATIVES)]
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


def randomise_weights(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Return a copy with the numbers of each parameter shuffled, which keeps every scale and
    nothing that was learned.

    The check is from Adebayo et al. (2018). Shuffled weights make it harder than new ones, whose
    small numbers make attention uniform and any map different.
    """
    # the caller keeps the trained model
    randomised = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in randomised.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
    return randomised


def rank_correlation(first: PatchMaps, second: PatchMaps) -> Float[Tensor, " B"]:
    """Compute Spearman's correlation of each pair of maps, with mean ranks for ties; 0 if one of
    them is constant."""
    left = _centred_ranks(first.flatten(1))
    right = _centred_ranks(second.flatten(1))
    norms = left.norm(dim=1) * right.norm(dim=1)
    return torch.where(norms > 0, (left * right).sum(dim=1) / norms.clamp_min(1e-30), 0.0)


def _centred_ranks(values: Float[Tensor, "B P"]) -> Float[Tensor, "B P"]:
    values = values.contiguous()
    ordered = values.sort(dim=1).values
    # tied values get the mean of the first and the last of their ranks
    lowest = torch.searchsorted(ordered, values)
    highest = torch.searchsorted(ordered, values, right=True) - 1
    ranks = (lowest + highest) / 2
    return ranks - ranks.mean(dim=1, keepdim=True)
