"""How faithful a map is to the model: numbers for one batch of maps, and their statistics over images. Every number is
per image, so that methods are compared on the same images (paired bootstrap, win rates)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vit.explanation.capture.readout import PatchMaps
from vit.explanation.faithfulness.token_ablation import FRACTIONS, Predict

REMOVED = FRACTIONS  # fractions of the patches, of deletion curves
KEPT = tuple((step + 1) / 10 for step in range(10))  # of insertion curves
SACO_GROUPS = 10
PerImage = Float[np.ndarray, " n"]
RESAMPLES = 2000


def find_order(maps: PatchMaps) -> Int[Tensor, "B P"]:
    """Patches by falling relevance; ties in reading order."""
    return maps.flatten(1).argsort(dim=1, descending=True, stable=True)


def compute_saco(predict: Predict, maps: PatchMaps) -> Float[Tensor, " B"]:
    """Salience-guided faithfulness coefficient (Wu et al. 2024, algorithm 1), -1 to 1.

    Patches fall by rank into at most `SACO_GROUPS` groups of equal size (removing a larger group would lower the
    probability more by itself, so a remainder, the least salient patches, is left out). For each pair of groups, the
    difference of their salience counts for the map if removing the more salient one lowers the probability at least as
    much, against it otherwise."""
    order, values = find_order(maps), maps.flatten(1)
    size = -(-order.shape[1] // SACO_GROUPS)
    groups = order.shape[1] // size
    everything = torch.arange(order.shape[1], device=order.device).expand_as(order)
    whole = predict(everything)
    salience, drops = [], []
    for group in order[:, : groups * size].chunk(groups, dim=1):
        removed = torch.zeros_like(order, dtype=torch.bool).scatter_(1, group, True)
        salience.append(values.gather(1, group).mean(dim=1))
        drops.append(whole - predict(everything[~removed].reshape(len(order), -1)))
    more, less = torch.triu_indices(groups, groups, offset=1)
    weight = torch.stack(salience, dim=1)
    weight = weight[:, more] - weight[:, less]
    drop = torch.stack(drops, dim=1)
    agrees = torch.where(drop[:, more] >= drop[:, less], 1.0, -1.0)
    total = weight.abs().sum(dim=1)
    return torch.where(total > 0, (agrees * weight).sum(dim=1) / total.clamp_min(1e-30), 0.0)


def compute_pointing(maps: PatchMaps, inside: Bool[Tensor, "B rows columns"]) -> Float[Tensor, " B"]:
    """The fraction of the positive relevance that lies `inside`; by its area where there is none."""
    positive = maps.clamp_min(0)
    total = positive.sum(dim=(1, 2))
    fraction = (positive * inside).sum(dim=(1, 2)) / total.clamp_min(1e-30)
    return torch.where(total > 0, fraction, inside.float().mean(dim=(1, 2)))


@dataclass(frozen=True)
class Estimate:
    """A mean over images with its 95 % interval."""

    mean: float
    low: float
    high: float


def estimate(values: Mapping[str, PerImage], *, seed: int = 0) -> dict[str, Estimate]:
    """The mean of each method with a percentile bootstrap interval. The resamples of images are shared."""
    table = np.stack([of_images.astype(np.float64) for of_images in values.values()], axis=1)  # [n, methods]
    low, high = np.quantile(_draw_resamples(len(table), seed) @ table, [0.025, 0.975], axis=0)
    rows = zip(table.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: Estimate(*row) for name, row in zip(values, rows, strict=True)}


def estimate_ratio(values: PerImage, reference: PerImage, *, seed: int = 0) -> Estimate | None:
    """The ratio of two means with its paired interval; None where the reference's may be 0 or less."""
    both = np.stack([values, reference], axis=1).astype(np.float64)
    means = _draw_resamples(len(both), seed) @ both
    if np.quantile(means[:, 1], 0.025) <= 0:
        return None
    low, high = np.quantile(means[:, 0] / means[:, 1].clip(1e-30), [0.025, 0.975])
    return Estimate(float(both[:, 0].mean() / both[:, 1].mean()), float(low), float(high))


def find_best(values: Mapping[str, PerImage], *, seed: int = 0) -> list[str]:
    """The methods that may be the best, highest mean first: the 95 % interval of the paired difference to the one with
    the highest mean includes 0. Not corrected for the number of methods."""
    ordered = sorted(values, key=lambda name: -values[name].mean())
    gaps = estimate({name: values[name] - values[ordered[0]] for name in ordered}, seed=seed)
    return [name for name in ordered if gaps[name].high >= 0]


def _draw_resamples(count: int, seed: int) -> Float[np.ndarray, "resamples n"]:
    """How often each image is in each bootstrap resample, divided by the number of images."""
    drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    places = (drawn + count * np.arange(RESAMPLES)[:, None]).ravel()
    return np.bincount(places, minlength=RESAMPLES * count).reshape(RESAMPLES, count) / count


def win_rate(method: PerImage, baseline: PerImage, *, higher_is_better: bool) -> float:
    """The fraction of images on which the method is better than the baseline; a tie is half."""
    difference = method - baseline if higher_is_better else baseline - method
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def to_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
