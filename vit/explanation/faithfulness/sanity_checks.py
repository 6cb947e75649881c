"""A sanity check of every map: does the class lose more without the patches that it ranks first, more so than a map of
the same values in other places would say?

Evidence is what the probability of the class loses without each patch: left out one after another on grids of up to
`LEAVE_OUT_ALL` patches, by the removal gradient on larger ones, where the two hardly differ. Maps made of the removal
gradient, and all maps of a pooling that has none, are compared with leaving out `LEAVE_OUT_SOME` patches instead. The
alternatives are the map itself, moved around the edges by whole patches and mirrored: they keep its values and
smoothness. Where there is evidence of every patch, all are compared once more without what a quadratic in the position
explains, so that a map of the middle does not pass for one of the object.

benchmarks/sanity_checks.py measures how often maps of other images, smooth noise and a Gaussian are supported."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vit.explanation.capture.capture import find_attention_layers
from vit.explanation.capture.readout import Forward, Grid, PatchMaps
from vit.explanation.capture.tokens import can_drop_tokens
from vit.explanation.faithfulness.token_ablation import build_predictor, leave_one_out
from vit.explanation.methods.removal import compute_removal_gradient
from vit.explanation.methods.table import Maps
from vit.runtime.device import copy_to_host

SUPPORTED, WEAK = 0.05, 0.25  # largest fractions of alternatives that agree with the evidence as well
FEWEST_ALTERNATIVES, MOST_ALTERNATIVES = 39, 1000  # fewer cannot show 5 %; more cost time
LEAVE_OUT_ALL, LEAVE_OUT_SOME = 25, 8  # patches
VERDICTS = ("supported", "weak", "unsupported", "not checked")


@dataclass(frozen=True)
class SanityCheck:
    """The check of one map and what follows from it."""

    verdict: str  # one of VERDICTS
    reason: str  # a sentence
    agreement: float  # correlation of the patches' ranks in the map with the evidence, -1 to 1
    p_value: float  # fraction of the alternatives, the map included, that agree as well
    alternatives: int
    evidence: str  # leave-one-out or removal-gradient

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """What the probability of one class of each image loses without each of some patches."""

    name: str
    drops: Float[Tensor, "B m"]
    patches: Int[Tensor, " m"]  # on the host


class MeasuredChecks(NamedTuple):
    """The checks of one map of each image, on the model's device."""

    p_value: Float[Tensor, " B"]
    agreement: Float[Tensor, " B"]
    constant: Bool[Tensor, " B"]
    alternatives: int
    evidence: str


def check_maps(forward: Forward, targets: Int[Tensor, "B T"], maps: Sequence[Maps]) -> list[list[list[SanityCheck]]]:
    """By method, image and class. `forward` keeps its graph; maps that don't depend on the class are checked for the
    predicted one."""
    return judge_maps(copy_to_host(measure_maps(forward, targets, maps)))


def measure_maps(
    forward: Forward, targets: Int[Tensor, "B T"], maps: Sequence[Maps], *, predicted_first: bool = False
) -> list[list[MeasuredChecks]]:
    """What `judge_maps` takes, by method and class. `predicted_first`: the first targets are the predicted classes."""
    predicted = targets[:, 0] if predicted_first else forward.logits.argmax(dim=1)
    small, found = _is_small(forward), dict[tuple[int, bool], Evidence]()
    checks: list[list[MeasuredChecks]] = []
    for of_method in maps:
        checks.append([])
        for column, values in enumerate(of_method.values.unbind(dim=1)):
            is_specific, circular = of_method.method.class_specific, of_method.method.of_removal and not small
            key = (column if is_specific or predicted_first else -1, circular)
            if key not in found:
                classes = targets[:, column] if is_specific else predicted
                found[key] = find_evidence(forward, classes, circular=circular)
            checks[-1].append(_measure(values, found[key]))
    return checks


def judge_maps(measured: Sequence[Sequence[MeasuredChecks]]) -> list[list[list[SanityCheck]]]:
    """By method, image and class, from the host's copy of what `measure_maps` found."""
    return [[list(row) for row in zip(*map(_judge, of_method), strict=True)] for of_method in measured]


def find_evidence(forward: Forward, classes: Int[Tensor, " B"], *, circular: bool = False) -> Evidence:
    """Evidence for `classes`; with `circular` none of the removal gradient."""
    count, device = forward.grid[0] * forward.grid[1], forward.images.device
    small = _is_small(forward)
    if circular or small:
        generator = torch.Generator().manual_seed(0)
        some = torch.randperm(count, generator=generator)[:LEAVE_OUT_SOME].sort().values
        chosen = torch.arange(count) if small else some
        predict = build_predictor(forward.model, forward.images.detach(), classes, grid=forward.grid)
        drops = leave_one_out(predict, batch=len(classes), patches=count, device=device, chosen=chosen.tolist())
        return Evidence("leave-one-out", drops, chosen)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        probability = forward.logits.float().softmax(dim=1).gather(1, classes[:, None])[:, 0]
        try:
            gradient = compute_removal_gradient(forward, probability).detach()
        except ValueError:  # a pooling whose gates are unknown
            return find_evidence(forward, classes, circular=True)
    return Evidence("removal-gradient", gradient[:, forward.num_prefix_tokens :], torch.arange(count))


def _is_small(forward: Forward) -> bool:
    """Whether every patch is left out, for all methods."""
    return forward.grid[0] * forward.grid[1] <= LEAVE_OUT_ALL and can_drop_tokens(forward.model)


def compare(maps: PatchMaps, evidence: Evidence) -> list[SanityCheck]:
    """The check of each image's map."""
    return _judge(copy_to_host(_measure(maps, evidence)))


def _measure(maps: PatchMaps, evidence: Evidence) -> MeasuredChecks:
    grid, count = (maps.shape[1], maps.shape[2]), maps[0].numel()
    places, some = _find_places(grid, tuple(evidence.patches.tolist()), maps.device)
    drops, ranks = evidence.drops.double(), _centred_ranks(maps.flatten(1).float()).double()
    compared = [_correlate_alternatives(ranks, drops, some)]
    if len(evidence.patches) == count:
        trend, inverse = _quadratic(grid, maps.device)
        ranks, drops = (values - values @ trend @ inverse for values in (ranks, drops))
        compared.append(_correlate_alternatives(ranks, drops, places))
    as_well = [(of_all >= of_all[:, :1] - 1e-6).double().mean(dim=1) for of_all in compared]
    constant = maps.flatten(1).amax(dim=1) == maps.flatten(1).amin(dim=1)
    p_value, agreement = torch.stack(as_well).amax(dim=0), compared[0][:, 0]
    return MeasuredChecks(p_value, agreement, constant, len(places), evidence.name)


def _judge(found: MeasuredChecks) -> list[SanityCheck]:
    count, rows = found.alternatives, zip(*(column.tolist() for column in found[:3]), strict=True)
    return [
        SanityCheck(*_find_verdict(p_value, count, constant=same), agreement, p_value, count, found.evidence)
        for p_value, agreement, same in rows
    ]


def _find_verdict(p_value: float, alternatives: int, *, constant: bool) -> tuple[str, str]:
    """Verdict and reason."""
    if constant:
        return "unsupported", "every patch has the same value"
    if alternatives < FEWEST_ALTERNATIVES:
        return "not checked", f"a map of so few patches has only {alternatives} alternatives to compare with"
    if p_value > WEAK:
        return "unsupported", "agrees with the effect of the patches no better than copies of it moved elsewhere"
    verdict = "supported" if p_value <= SUPPORTED else "weak"
    percent = 100 * (1 - p_value)
    return verdict, f"agrees with the effect of the patches, better than {percent:.0f} % of its moved copies"


def _correlate_alternatives(
    ranks: Float[Tensor, "B P"], drops: Float[Tensor, "B m"], places: Int[Tensor, "K m"]
) -> Float[Tensor, "B K"]:
    """Pearson's correlation of the drops with the ranks at each alternative's places; 0 where one is constant."""
    drops = drops - drops.mean(dim=1, keepdim=True)
    found = []
    for of_image, drop in zip(ranks, drops, strict=True):  # one at a time: K × m numbers each
        moved = of_image[places]
        moved = moved - moved.mean(dim=1, keepdim=True)
        norms = moved.norm(dim=1) * drop.norm()
        found.append(torch.where(norms > 0, moved @ drop / norms.clamp_min(1e-30), 0.0))
    return torch.stack(found)


@lru_cache(maxsize=4)
def _alternatives(grid: Grid) -> Int[Tensor, "K P"]:
    """Which patch of a map each place of an alternative shows: the map itself, then its copies, mirrored (on square
    grids also transposed) and moved around the edges; at most `MOST_ALTERNATIVES`, evenly chosen."""
    index = torch.arange(grid[0] * grid[1]).reshape(grid)
    turned = [index.flip(sides) for sides in ((), (0,), (1,), (0, 1))]
    turned += [each.T for each in turned] if grid[0] == grid[1] else []
    shifts = [(down, across) for down in range(grid[0]) for across in range(grid[1])]
    copies = [(each, shift) for shift in shifts for each in turned]
    chosen = copies[:: math.ceil(len(copies) / MOST_ALTERNATIVES)]  # all of them would take gigabytes on large grids
    return torch.stack([each.roll(shift, (0, 1)).flatten() for each, shift in chosen])


@lru_cache(maxsize=4)
def _find_places(grid: Grid, patches: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The alternatives' places [K, P], and [K, m] of some patches, on the device."""
    places = _alternatives(grid)
    on_device = places.to(device)
    return on_device, on_device if len(patches) == places.shape[1] else places[:, list(patches)].to(device)


@lru_cache(maxsize=4)
def _quadratic(grid: Grid, device: torch.device) -> tuple[Float[Tensor, "P 6"], Float[Tensor, "6 P"]]:
    """1, x, y, x², xy and y² of each patch, and the pseudoinverse."""
    down, across = (torch.linspace(-1, 1, side, dtype=torch.float64) for side in grid)
    y, x = (values.flatten() for values in torch.meshgrid(down, across, indexing="ij"))
    trend = torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], dim=1)
    return trend.to(device), torch.linalg.pinv(trend).to(device)


def randomise_weights(model: nn.Module, *, fraction_of_blocks: float = 1.0, seed: int = 0) -> nn.Module:
    """A copy whose parameters each have their numbers shuffled: nothing learned is left, but every scale is.

    The head and the last `fraction_of_blocks` of the blocks are shuffled; with 1 the embedding too (Adebayo et al.
    2018). Shuffled trained weights are a harder check than fresh ones, whose small numbers make attention uniform and
    any map different."""
    randomised = copy.deepcopy(model)
    blocks = [layer.block for layer in find_attention_layers(randomised)]
    of_block = {id(p): number for number, block in enumerate(blocks) for p in block.parameters()}
    keep_below = round(len(blocks) * (1 - fraction_of_blocks))
    generator = torch.Generator().manual_seed(seed)
    before = True  # parameters() goes from the front of the model to its back: embedding, blocks, head
    with torch.no_grad():
        for parameter in randomised.parameters():
            number = of_block.get(id(parameter))
            before = before and number is None
            kept = fraction_of_blocks < 1 if before else number is not None and number < keep_below
            if not kept:
                order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
    return randomised


def rank_correlation(first: PatchMaps, second: PatchMaps) -> Float[Tensor, " B"]:
    """Spearman's correlation of each pair of maps, ties sharing their mean rank; 0 where one is constant."""
    left, right = _centred_ranks(first.flatten(1)), _centred_ranks(second.flatten(1))
    norms = left.norm(dim=1) * right.norm(dim=1)
    return torch.where(norms > 0, (left * right).sum(dim=1) / norms.clamp_min(1e-30), 0.0)


def _centred_ranks(values: Float[Tensor, "B P"]) -> Float[Tensor, "B P"]:
    values = values.contiguous()
    ordered = values.sort(dim=1).values
    ranks = (torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True) - 1) / 2
    return ranks - ranks.mean(dim=1, keepdim=True)
