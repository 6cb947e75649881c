"""A sanity check of every map: does the class lose more without the patches that it ranks first,
more so than a map of the same values in other places would say?

Evidence is what the probability of the class loses without each group of patches. On grids of up to
`LEAVE_OUT_ALL` patches each one is left out alone. On larger ones a single patch may change next to
nothing: `choose_group_size` finds the smallest groups that the model reacts to, which is where two
ways to remove them, leaving their tokens out and painting them over, rank them alike. Single
patches are then compared by the removal gradient, which hardly differs from leaving each out; maps
that are made of it, and everything where groups are larger, by leaving out up to `MAX_GROUPS`
groups, spread over the image. Where no size will do, nothing is checked.

The alternatives are the map itself, moved around the edges by whole patches and mirrored: they keep
its values and smoothness. All are compared once more without what a quadratic in the position
explains, so that a map of the middle does not pass for one of the object.

research/sanity_checks.py measures how often maps of other images, smooth noise and a Gaussian
agree."""

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
from vit.explanation.capture.tokens import can_drop_tokens
from vit.explanation.checks.token_ablation import (
    Fill,
    build_predictor,
    group_members,
    leave_one_out,
    tile_patches,
)
from vit.explanation.methods.registry import Maps
from vit.explanation.methods.removal import compute_removal_gradient

# largest fractions of the alternatives that agree with the evidence as well
MAX_P_AGREES = 0.05
MAX_P_AGREES_PARTLY = 0.25
# fewer alternatives cannot show 5 %, more cost time
MIN_ALTERNATIVES = 39
MAX_ALTERNATIVES = 1000
# patches: on grids of up to so many each is left out alone
LEAVE_OUT_ALL = 25
# on larger ones groups of so many patches a side are tried, and so many groups are left out
GROUP_SIZES = (1, 2, 4)
MAX_GROUPS = 24
# fewer groups tell few maps from others; a quadratic takes 6 degrees of freedom
MIN_GROUPS = 12
# rank correlation of the two ways to remove a group, the mean over so many images: the smallest
# groups above the first are taken, else those with the highest, if it is above the second
CLEAR_RELIABILITY = 0.8
MIN_RELIABILITY = 0.3
RELIABILITY_IMAGES = 4
AGREES, AGREES_PARTLY, DOES_NOT_AGREE, NOT_CHECKED = VERDICTS = (
    "agrees",
    "agrees partly",
    "does not agree",
    "not checked",
)


@dataclass(frozen=True)
class SanityCheck:
    """The check of one map and what follows from it."""

    # one of VERDICTS
    verdict: str
    # a sentence
    reason: str
    # correlation of the patches' ranks in the map with the evidence, -1 to 1
    agreement: float
    # fraction of the alternatives, the map included, that agree as well
    p_value: float
    alternatives: int
    # leave-one-out or removal-gradient
    evidence: str
    # what was left out: "single patches", or for example "groups of 4 × 4 patches"
    patches: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}"


@dataclass(frozen=True)
class GroupSize:
    """The side of the groups of patches that a model reacts to, as `choose_group_size` found it."""

    # patches; None where removing groups of no size gives a clear answer
    side: int | None
    # rank correlation of both ways to remove them; 1 where there was nothing to choose
    reliability: float = 1.0

    def __str__(self) -> str:
        if self.side == 1:
            return "single patches"
        side = self.side or max(GROUP_SIZES)
        return f"groups of {side} × {side} patches"


SINGLE_PATCHES = GroupSize(1)


@dataclass(frozen=True)
class Evidence:
    """What the probability of one class of each image loses without each of some groups of
    patches."""

    name: str
    drops: Float[Tensor, "B m"]
    # on the host: the patches of each group
    groups: Bool[Tensor, "m P"]
    size: GroupSize = SINGLE_PATCHES


class MapChecks(NamedTuple):
    """The checks of one map of each image as tensors, so that they are copied to the host together
    with the maps."""

    p_value: Float[Tensor, " B"]
    agreement: Float[Tensor, " B"]
    is_constant: Bool[Tensor, " B"]
    alternatives: int
    evidence: str
    size: GroupSize

    def to_list(self) -> list[SanityCheck]:
        """The check of each image; the tensors are on the host."""
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
    """Check maps of one forward pass.

    Args:
        forward: the pass, with its graph kept.
        targets: the classes that are explained.
        maps: of each method, for these classes. Maps that don't depend on the class are checked
            for the predicted one.
        predicted_first: the first targets are the predicted classes, so that their evidence
            serves both kinds of maps.
        group_size: what `choose_group_size` found for this model; by default it is asked.

    Returns:
        The checks by method and class, on the model's device.
    """
    predicted = targets[:, 0] if predicted_first else forward.logits.argmax(dim=1)
    group_size = group_size or choose_group_size(forward)
    # by column of the targets (-1: the predicted class) and whether the removal gradient is barred
    evidence: dict[tuple[int, bool], Evidence] = {}
    checks: list[list[MapChecks]] = [[] for _ in maps]
    for method_maps, method_checks in zip(maps, checks, strict=True):
        is_specific = method_maps.method.class_specific
        # groups are left out whatever the method, so that methods share that
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
    """Compare each image's map with the evidence of its class, beside the map's alternatives."""
    grid = (maps.shape[1], maps.shape[2])
    compared = _compare_groups(grid, group_members(evidence.groups), maps.device)
    # double, since p-values count ties
    drops = evidence.drops.double()
    ranks = _centred_ranks(maps.flatten(1).float()).double()
    correlations = [_correlate_alternatives(ranks, drops, compared)]
    if len(evidence.groups) >= MIN_GROUPS:
        # once more without the trend, so that a map of the middle isn't taken for one of an object
        trend, inverse = _quadratic(grid, maps.device)
        ranks = ranks - ranks @ trend @ inverse
        drops = drops - drops @ compared.trend @ compared.inverse
        correlations.append(_correlate_alternatives(ranks, drops, compared))

    # the map itself is the first alternative; rounding must not put it behind its equals
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
    """Find the smallest groups of patches whose removal gives a clear answer: leaving their tokens
    out and painting them over rank them alike, in the mean over the first images. For models that
    need all tokens the second way is to blur them.

    On small grids single patches are left out whatever they change.
    """
    if _leaves_all_out(forward):
        return SINGLE_PATCHES
    images = forward.images[:RELIABILITY_IMAGES].detach()
    classes = forward.logits[:RELIABILITY_IMAGES].argmax(dim=1)
    fills: tuple[Fill, Fill] = ("auto", "mean")
    if not can_drop_tokens(forward.model):
        fills = ("mean", "blur")

    best = GroupSize(None, 0.0)
    for side in GROUP_SIZES:
        groups = choose_groups(forward.grid, side)
        if len(groups) < MIN_GROUPS:
            break
        left_out, painted = (
            leave_one_out(
                build_predictor(
                    forward.model,
                    images,
                    classes,
                    grid=forward.grid,
                    target=forward.target,
                    fill=fill,
                ),
                batch=len(images),
                groups=groups,
                device=images.device,
            )
            for fill in fills
        )
        correlation = rank_correlation(left_out[:, None], painted[:, None])
        size = GroupSize(side, correlation.mean().item())
        if size.reliability >= CLEAR_RELIABILITY:
            return size
        best = max(best, size, key=lambda size: size.reliability)
    return best if best.reliability >= MIN_RELIABILITY else GroupSize(None, best.reliability)


def choose_groups(grid: Grid, side: int) -> Bool[Tensor, "m P"]:
    """Up to `MAX_GROUPS` tiles of side × side patches: all of them, or one out of each part of the
    image. The same in every image, so that a check doesn't depend on the batch."""
    tiles = tile_patches(grid, side)
    if len(tiles) <= MAX_GROUPS:
        return tiles
    # parts that are about as high as wide, in tiles
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
    """Measure what the probability of each image's class loses without each group of patches.

    Args:
        forward: the pass, with its graph kept.
        classes: one class of each image.
        circular: the removal gradient would be compared with itself, so that it is no evidence.
        size: of the groups.
    """
    leaves_all_out = _leaves_all_out(forward)
    every_patch = tile_patches(forward.grid, 1)
    if size.side is None:
        # nothing to compare with
        return Evidence("none", torch.zeros_like(forward.logits[:, :1]), every_patch[:1], size)
    has_layers = bool(forward.record.layers)
    if size.side == 1 and has_layers and not leaves_all_out and not circular:
        # a pooling whose gates are unknown has no removal gradient
        no_gradient = suppress(ValueError)
        float32 = torch.autocast(forward.images.device.type, enabled=False)
        with no_gradient, torch.enable_grad(), float32:
            gradient = compute_removal_gradient(forward, forward.value(classes)).detach()
            drops = gradient[:, forward.num_prefix_tokens :]
            return Evidence("removal-gradient", drops, every_patch)

    groups = every_patch if leaves_all_out else choose_groups(forward.grid, size.side)
    images = forward.images.detach()
    drops = leave_one_out(
        build_predictor(forward.model, images, classes, grid=forward.grid, target=forward.target),
        batch=len(images),
        groups=groups,
        device=images.device,
    )
    return Evidence("leave-one-out", drops, groups, size)


def _leaves_all_out(forward: Forward) -> bool:
    """Whether every patch is left out, for all methods."""
    return forward.grid[0] * forward.grid[1] <= LEAVE_OUT_ALL and can_drop_tokens(forward.model)


def _find_verdict(
    p_value: float, alternatives: int, size: GroupSize, *, is_constant: bool
) -> tuple[str, str]:
    """Verdict and reason."""
    if size.side is None:
        reason = (
            f"this model gives no clear answer to what single patches or {size} do: leaving them"
            f" out and painting them over rank them differently (ρ {size.reliability:.2f})"
        )
        return NOT_CHECKED, reason
    if is_constant:
        return DOES_NOT_AGREE, "every patch has the same value"
    if alternatives < MIN_ALTERNATIVES:
        reason = f"a map of so few patches has only {alternatives} alternatives to compare with"
        return NOT_CHECKED, reason
    what = f"with what leaving out {size} does"
    if p_value > MAX_P_AGREES_PARTLY:
        return DOES_NOT_AGREE, f"{what}, no better than copies of the map moved elsewhere"
    # rounded down: 94.9 % are not the 95 % of the verdict
    percent = math.floor(100 * (1 - p_value) + 1e-6)
    reason = f"{what}, better than {percent} % of its copies moved elsewhere"
    return (AGREES if p_value <= MAX_P_AGREES else AGREES_PARTLY), reason


def count_agreeing(verdicts: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each method: on how many maps it agrees.

    Args:
        verdicts: of each method's maps; those that were not checked don't count.
    """
    lines = []
    for method, map_verdicts in verdicts.items():
        checked = [verdict for verdict in map_verdicts if verdict != NOT_CHECKED]
        if checked:
            count = checked.count(AGREES)
            lines.append(
                f"{method} agrees with what leaving patches out does on {count} of "
                f"{len(checked)} images"
            )
    return lines


class _ComparedGroups(NamedTuple):
    """What a check needs of its groups, on the device."""

    # which patch of the map each alternative shows, at the patches of any group
    places: Int[Tensor, "K members"]
    # values at these to the mean of each group
    means: Float[Tensor, "members m"]
    # 1, x, y, x², xy and y² of each group, and the pseudoinverse
    trend: Float[Tensor, "m 6"]
    inverse: Float[Tensor, "6 m"]


# copied to the device once, which each batch would wait for
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
    """Pearson's correlation of the drops with the mean ranks of each alternative's groups; 0 where
    one is constant."""
    drops = drops - drops.mean(dim=1, keepdim=True)
    has_single_patches = compared.means.shape[0] == compared.means.shape[1]
    correlations = []
    # one image at a time: K × P numbers each
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
    """Which patch of a map each place of an alternative shows: the map itself, then its copies,
    mirrored (on square grids also transposed) and moved around the edges; at most
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
    """1, x, y, x², xy and y² of each patch, and the pseudoinverse."""
    down, across = (torch.linspace(-1, 1, side, dtype=torch.float64) for side in grid)
    y, x = (values.flatten() for values in torch.meshgrid(down, across, indexing="ij"))
    trend = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], dim=1)
    return trend.to(device), torch.linalg.pinv(trend).to(device)


def randomise_weights(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """A copy whose parameters each have their numbers shuffled: nothing learned is left, but every
    scale is.

    The check is that of Adebayo et al. (2018). Shuffled trained weights are a harder one than fresh
    ones, whose small numbers make attention uniform and any map different.
    """
    randomised = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in randomised.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
    return randomised


def rank_correlation(first: PatchMaps, second: PatchMaps) -> Float[Tensor, " B"]:
    """Spearman's correlation of each pair of maps, ties sharing their mean rank; 0 where one is
    constant."""
    left = _centred_ranks(first.flatten(1))
    right = _centred_ranks(second.flatten(1))
    norms = left.norm(dim=1) * right.norm(dim=1)
    return torch.where(norms > 0, (left * right).sum(dim=1) / norms.clamp_min(1e-30), 0.0)


def _centred_ranks(values: Float[Tensor, "B P"]) -> Float[Tensor, "B P"]:
    values = values.contiguous()
    ordered = values.sort(dim=1).values
    # of tied values the first and the last rank, whose mean they share
    lowest = torch.searchsorted(ordered, values)
    highest = torch.searchsorted(ordered, values, right=True) - 1
    ranks = (lowest + highest) / 2
    return ranks - ranks.mean(dim=1, keepdim=True)
