"""Measure every method beside controls on the same images: the work behind `vit faithfulness`."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.explanation.faithfulness.baselines import RANDOM_DRAWS, centre_maps, edge_maps, random_maps
from vit.explanation.faithfulness.metrics import LEFT, TAKEN_AWAY, compute_pointing, compute_saco, find_order
from vit.explanation.faithfulness.sanity_checks import randomise_weights, rank_correlation
from vit.explanation.faithfulness.token_ablation import (
    area_under,
    build_predictor,
    can_drop_tokens,
    deletion_curve,
    keep_tokens,
    leave_one_out,
)
from vit.explanation.methods.table import MapOptions, compute_maps
from vit.model.logits import compute_logits

CONTROLS = ("random", "centre", "edges", "oracle")
HIGHER_IS_BETTER = {
    "deletion": False,
    "insertion": True,
    "saco": True,
    "oracle_correlation": True,
    "deletion_mean": False,
    "insertion_mean": True,
    "deletion_blur": False,
    "insertion_blur": True,
    "grid_pointing": True,
    "scrambled_correlation": False,
    "sensitivity": False,
}
CASCADE = (0.0, 0.34, 0.67, 1.0)  # share of the blocks scrambled, from the last one; the head always is
_NOISE, _NOISE_DRAWS = 0.02, 10  # of max-sensitivity, in the range 0 to 1 of pixels


@dataclass(frozen=True)
class Plan:
    """What is measured, and on how many images."""

    methods: tuple[str, ...]
    options: MapOptions = field(default_factory=MapOptions)
    batch_size: int = 32
    fill_images: int = 64  # for painting over, sensitivity and the scrambled cascade
    mosaics: int = 32
    seed: int = 0


@dataclass
class Measurement:
    """Per-image numbers: `values[metric][method]` [n], and `curves[method]["deletion" | "insertion"]` [n,
    10]."""

    values: dict[str, dict[str, Float[np.ndarray, " n"]]]
    curves: dict[str, dict[str, Float[np.ndarray, "n steps"]]]
    cascade: dict[
        str, list[float]
    ]  # mean |rank correlation| with the whole model's map, at each of `CASCADE`
    milliseconds: dict[str, float]  # an image, forward pass included
    notes: list[str]


def measure(
    model: nn.Module,
    images: Float[Tensor, "n 3 height width"],
    classes: Int[Tensor, " n"],
    plan: Plan,
    *,
    pixel_std: Sequence[float],
    on_progress: Callable[[str], None] = lambda task: None,
) -> Measurement:
    """Measure `plan.methods` and the controls for the given class of each image."""
    result = Measurement(
        values={name: {} for name in HIGHER_IS_BETTER}, curves={}, cascade={}, milliseconds={}, notes=[]
    )
    maps: dict[str, Tensor] = {}
    for method in plan.methods:
        on_progress(f"maps: {method}")
        started = time.perf_counter()
        maps[method] = _explain(model, images, classes, method, plan)
        result.milliseconds[method] = 1000 * (time.perf_counter() - started) / len(images)
    grid = (int(next(iter(maps.values())).shape[1]), int(next(iter(maps.values())).shape[2]))
    on_progress("maps: oracle")
    started = time.perf_counter()
    maps["oracle"] = _oracle(model, images, classes, grid, plan)
    result.milliseconds["oracle"] = 1000 * (time.perf_counter() - started) / len(images)
    maps["centre"], maps["edges"] = centre_maps(len(images), grid), edge_maps(images, grid)
    generator = torch.Generator().manual_seed(plan.seed)
    noise = [random_maps(len(images), grid, generator=generator) for _ in range(RANDOM_DRAWS)]

    for name, of_method in maps.items():
        on_progress(f"deletion, insertion, SaCo: {name}")
        _measure_maps(result, name, [of_method], model, images, classes, maps["oracle"], plan)
    on_progress("deletion, insertion, SaCo: random")
    _measure_maps(result, "random", noise, model, images, classes, maps["oracle"], plan)
    few = slice(plan.fill_images)
    _measure_scrambled(result, model, images[few], classes[few], maps, grid, plan, on_progress)
    _measure_sensitivity(result, model, images[few], classes[few], maps, plan, pixel_std, on_progress)
    _measure_pointing(result, model, images, classes, grid, plan, on_progress)
    result.values = {metric: of_metric for metric, of_metric in result.values.items() if of_metric}
    return result


def _batches(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, start + size)


def _explain(
    model: nn.Module, images: Tensor, classes: Tensor, method: str, plan: Plan
) -> Float[Tensor, "n r c"]:
    found = []
    for batch in _batches(len(images), plan.batch_size):
        _, _, (maps,) = compute_maps(
            model,
            images[batch],
            methods=[method],
            choose_targets=partial(_these, classes[batch, None]),
            options=plan.options,
        )
        found.append(maps.values[:, 0])
    return torch.cat(found)


def _these(targets: Int[Tensor, "B T"], logits: Float[Tensor, "B C"]) -> Int[Tensor, "B T"]:
    return targets


def _oracle(
    model: nn.Module, images: Tensor, classes: Tensor, grid: tuple[int, int], plan: Plan
) -> Float[Tensor, "n r c"]:
    found = []
    for batch in _batches(len(images), plan.batch_size):
        predict = build_predictor(model, images[batch], classes[batch], grid=grid)
        harm = leave_one_out(
            predict, batch=len(images[batch]), patches=grid[0] * grid[1], device=images.device
        )
        found.append(torch.unflatten(harm, 1, grid))
    return torch.cat(found)


def _measure_maps(
    result: Measurement,
    name: str,
    draws: Sequence[Float[Tensor, "n r c"]],
    model: nn.Module,
    images: Tensor,
    classes: Tensor,
    oracle: Tensor,
    plan: Plan,
) -> None:
    """Deletion, insertion, SaCo and the correlation with the oracle; the mean over draws of a random map."""
    curves: dict[str, list[np.ndarray]] = {}
    values: dict[str, list[np.ndarray]] = {}
    for maps in draws:
        found = _score(model, images, classes, maps, plan, fill="auto", with_saco=True)
        found["oracle_correlation"] = rank_correlation(maps, oracle)
        for fill in ("mean", "blur"):
            few = slice(plan.fill_images)
            painted = _score(model, images[few], classes[few], maps[few], plan, fill=fill, with_saco=False)
            found |= {f"{kind}_{fill}": painted[kind] for kind in ("deletion", "insertion")}
        for kind, numbers in found.items():
            (curves if kind.endswith("curve") else values).setdefault(kind, []).append(numbers.cpu().numpy())
    for kind, of_draws in values.items():
        result.values[kind][name] = np.mean(of_draws, axis=0)
    result.curves[name] = {
        kind.removesuffix(" curve"): np.mean(of_draws, axis=0) for kind, of_draws in curves.items()
    }


def _score(
    model: nn.Module,
    images: Tensor,
    classes: Tensor,
    maps: Float[Tensor, "n r c"],
    plan: Plan,
    *,
    fill: str,
    with_saco: bool,
) -> dict[str, Tensor]:
    grid = (int(maps.shape[1]), int(maps.shape[2]))
    found: dict[str, list[Tensor]] = {}
    for batch in _batches(len(images), plan.batch_size):
        predict = build_predictor(model, images[batch], classes[batch], grid=grid, fill=fill)
        order = find_order(maps[batch])
        deletion = deletion_curve(predict, order, fractions=TAKEN_AWAY)
        insertion = deletion_curve(predict, order.flip(1), fractions=[1 - share for share in LEFT])
        numbers = {
            "deletion curve": deletion,
            "insertion curve": insertion,
            "deletion": area_under(deletion, fractions=TAKEN_AWAY),
            "insertion": area_under(insertion, fractions=LEFT),
        }
        if with_saco:
            numbers["saco"] = compute_saco(predict, maps[batch])
        for kind, of_batch in numbers.items():
            found.setdefault(kind, []).append(of_batch)
    return {kind: torch.cat(of_batches) for kind, of_batches in found.items()}


def _measure_scrambled(
    result: Measurement,
    model: nn.Module,
    images: Tensor,
    classes: Tensor,
    maps: dict[str, Tensor],
    grid: tuple[int, int],
    plan: Plan,
    on_progress: Callable[[str], None],
) -> None:
    """Rank correlation with maps of the model scrambled from its head down (Adebayo et al. 2018)."""
    scrambled = [randomise_weights(model, fraction_of_blocks=share) for share in CASCADE]
    for method in plan.methods:
        on_progress(f"scrambled weights: {method}")
        whole = maps[method][: len(images)]
        found = [
            rank_correlation(whole, _explain(control, images, classes, method, plan)).abs()
            for control in scrambled
        ]
        result.cascade[method] = [float(stage.mean()) for stage in found]
        result.values["scrambled_correlation"][method] = found[-1].cpu().numpy()
    control = _oracle(scrambled[-1], images, classes, grid, plan)
    correlation = rank_correlation(maps["oracle"][: len(images)], control).abs()
    result.values["scrambled_correlation"] |= {
        "oracle": correlation.cpu().numpy(),
        "centre": np.ones(len(images), dtype=np.float32),  # they never look at the model
        "edges": np.ones(len(images), dtype=np.float32),
    }


def _measure_sensitivity(
    result: Measurement,
    model: nn.Module,
    images: Tensor,
    classes: Tensor,
    maps: dict[str, Tensor],
    plan: Plan,
    pixel_std: Sequence[float],
    on_progress: Callable[[str], None],
) -> None:
    """Max-sensitivity (Yeh et al. 2019, eq. 4) under uniform noise of 2 % of the pixel range: the furthest
    that a map moves, relative to its norm or, where that is more, the moved map's: 0 to 2, also for maps of
    zeros."""
    generator = torch.Generator().manual_seed(plan.seed)
    reach = _NOISE / torch.tensor(pixel_std, device=images.device).view(3, 1, 1)
    noise = [
        (2 * torch.rand(images.shape, generator=generator).to(images) - 1) * reach
        for _ in range(_NOISE_DRAWS)
    ]
    for method in plan.methods:
        on_progress(f"sensitivity: {method}")
        whole = maps[method][: len(images)].flatten(1)
        distances = []
        for draw in noise:
            moved = _explain(model, images + draw, classes, method, plan).flatten(1)
            norm = torch.maximum(whole.norm(dim=1), moved.norm(dim=1)).clamp_min(1e-30)
            distances.append((moved - whole).norm(dim=1) / norm)
        result.values["sensitivity"][method] = torch.stack(distances).amax(dim=0).cpu().numpy()


def _measure_pointing(
    result: Measurement,
    model: nn.Module,
    images: Tensor,
    classes: Tensor,
    grid: tuple[int, int],
    plan: Plan,
    on_progress: Callable[[str], None],
) -> None:
    """Grid pointing game (Böhle et al. 2021): on a 2×2 mosaic of four classes, the share of a class's
    positive relevance that lies in its own quarter. By chance it is 0.25."""
    if not hasattr(model, "set_input_size") or not can_drop_tokens(model):
        result.notes.append(
            f"no grid pointing: {type(model).__name__} does not take another number of patches"
        )
        return
    mosaics, targets = build_mosaics(images, classes, count=plan.mosaics, seed=plan.seed)
    if len(mosaics) == 0:
        result.notes.append("no grid pointing: the images show fewer than four classes")
        return
    large: Any = copy.deepcopy(model)
    large.set_input_size(tuple(mosaics.shape[-2:]))
    logits = torch.cat(
        [compute_logits(large, mosaics[batch]) for batch in _batches(len(mosaics), plan.batch_size)]
    )
    top = logits.topk(4, dim=1).indices
    recognised = (top[:, :, None] == targets[:, None, :]).any(dim=1).float().mean()
    result.notes.append(
        f"mosaics: {100 * float(recognised):.0f} % of the quarters' classes are in the top four"
    )
    double = (2 * grid[0], 2 * grid[1])
    for method in plan.methods:
        on_progress(f"grid pointing: {method}")
        of_quarters = [_explain(large, mosaics, targets[:, quarter], method, plan) for quarter in range(4)]
        result.values["grid_pointing"][method] = _point(of_quarters)
    on_progress("grid pointing: controls")
    generator = torch.Generator().manual_seed(plan.seed)
    known = {
        "random": random_maps(len(mosaics), double, generator=generator),
        "centre": centre_maps(len(mosaics), double),
        "edges": edge_maps(mosaics, double),
    }
    for name, maps in known.items():
        result.values["grid_pointing"][name] = _point([maps] * 4)
    result.values["grid_pointing"]["oracle"] = _point(_block_oracle(large, mosaics, targets, double, plan))


def build_mosaics(
    images: Float[Tensor, "n 3 height width"], classes: Int[Tensor, " n"], *, count: int, seed: int
) -> tuple[Float[Tensor, "m 3 H W"], Int[Tensor, "m 4"]]:
    """2×2 mosaics of images of four different classes, and the classes in reading order."""
    random = np.random.default_rng(seed)
    known = np.unique(classes.cpu().numpy())
    if len(known) < 4:
        return images.new_zeros(0, 3, 2 * images.shape[2], 2 * images.shape[3]), classes.new_zeros(0, 4)
    mosaics, targets = [], []
    for _ in range(count):
        chosen = random.choice(known, 4, replace=False)
        four = [images[random.choice(np.flatnonzero(classes.cpu().numpy() == label))] for label in chosen]
        mosaics.append(torch.cat([torch.cat(four[:2], dim=-1), torch.cat(four[2:], dim=-1)], dim=-2))
        targets.append(torch.from_numpy(chosen))
    return torch.stack(mosaics), torch.stack(targets).to(classes.device)


def _point(of_quarters: Sequence[Float[Tensor, "m r c"]]) -> Float[np.ndarray, " m"]:
    """The mean over the four quarters of the share that each quarter's map has in it."""
    count, rows, columns = of_quarters[0].shape
    shares = []
    for quarter, maps in enumerate(of_quarters):
        inside = torch.zeros(count, rows, columns, dtype=torch.bool, device=maps.device)
        top, left = quarter // 2 * (rows // 2), quarter % 2 * (columns // 2)
        inside[:, top : top + rows // 2, left : left + columns // 2] = True
        shares.append(compute_pointing(maps, inside))
    mean: np.ndarray = torch.stack(shares).mean(dim=0).cpu().numpy()
    return mean


@torch.no_grad()
def _block_oracle(
    model: nn.Module, mosaics: Tensor, targets: Tensor, grid: tuple[int, int], plan: Plan
) -> list[Float[Tensor, "m r c"]]:
    """For each quarter's class, how far its logit falls when a block of 2×2 patches is left out."""
    patches = torch.arange(grid[0] * grid[1]).reshape(grid)
    blocks = [
        patches[row : row + 2, column : column + 2].flatten()
        for row in range(0, grid[0], 2)
        for column in range(0, grid[1], 2)
    ]
    found = []
    for batch in _batches(len(mosaics), plan.batch_size):
        wanted = targets[batch]
        whole = compute_logits(model, mosaics[batch]).gather(1, wanted)
        falls = torch.zeros(len(wanted), 4, grid[0] * grid[1])
        for block in blocks:
            kept = patches.flatten()[~torch.isin(patches.flatten(), block)]
            with keep_tokens(model, kept.expand(len(wanted), -1)):
                without = compute_logits(model, mosaics[batch]).gather(1, wanted)
            falls[:, :, block] = (whole - without)[:, :, None]
        found.append(falls)
    return [torch.unflatten(of_class, 1, grid) for of_class in torch.cat(found).unbind(dim=1)]
