"""What each token attends to, and the class that it alone would give, in few bytes: what a page shows of a token. A row
of attention is stored as 8-bit fractions of its maxima. Where the rows don't fit the given bytes, their cells become
coarser than patches, and what does not fit even so is left out: single heads first, then layers."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.explanation.capture.layers import at_least_float32
from vit.explanation.capture.readout import Forward, Grid, classify_token
from vit.explanation.methods.rollout import attention_rollout


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of attention. Columns are the prefix tokens, then the cells of a `grid` that may be coarser than the
    patches'; entry [i, j] · maxima[i, 0 for a prefix token, else 1] / 255 is what row i takes from column j."""

    grid: Grid
    values: UInt8[np.ndarray, "rows columns"]
    maxima: Float[np.ndarray, "rows 2"]


@dataclass(frozen=True)
class TokenAttention:
    """A row for each token. `layer` None is rollout; `head` None is the mean over heads."""

    layer: int | None
    head: int | None
    rows: QuantisedRows


@dataclass(frozen=True)
class LogitLens:
    """The classifier on each token that leaves a layer: the class that it alone would give, and its probability."""

    classes: Int[np.ndarray, "L N"]
    probabilities: Float[np.ndarray, "L N"]
    of_targets: Float[np.ndarray, "T L N"]  # probabilities of the classes that are explained, at most `LENS_TARGETS`


@dataclass(frozen=True)
class TokenDetails:
    """What is kept of the tokens of one image."""

    layers: int
    heads: int
    prefix_names: tuple[str, ...]
    attention: list[TokenAttention]
    readout: QuantisedRows | None  # what the classifier reads in each layer and head, uᵀA: L · H rows
    lens: LogitLens | None  # None for a classifier that is not known


LENS_TARGETS = 3


class _Rows(NamedTuple):
    """`QuantisedRows` on the model's device."""

    grid: Grid
    values: UInt8[Tensor, "rows columns"]
    maxima: Float[Tensor, "rows 2"]

    def finish(self) -> QuantisedRows:
        return QuantisedRows(self.grid, self.values.numpy(), self.maxima.numpy())


_Attention = list[tuple[int | None, int | None, _Rows]]  # layer, head and rows of each matrix


class MeasuredTokens(NamedTuple):
    """`TokenDetails` on the model's device: of a batch, `copy_to_host` brings all at once."""

    layers: int
    heads: int
    prefix_names: tuple[str, ...]
    attention: _Attention
    readout: _Rows | None
    lens: tuple[Tensor, Tensor, Tensor] | None

    def finish(self) -> TokenDetails:
        """The result; call it on the host's copy."""
        lens = self.lens and LogitLens(*(tensor.numpy() for tensor in self.lens))
        readout, attention = self.readout and self.readout.finish(), finish_attention(self.attention)
        return TokenDetails(self.layers, self.heads, self.prefix_names, attention, readout, lens)


def finish_attention(found: _Attention) -> list[TokenAttention]:
    """The result, of the host's copy."""
    return [TokenAttention(layer, head, rows.finish()) for layer, head, rows in found]


def measure_tokens(
    forward: Forward, image: int, *, targets: Int[Tensor, " T"], temperature: float, budget: int
) -> MeasuredTokens:
    """The details of one image of the batch in at most `budget` bytes. The logit lens needs the tokens that leave each
    block (`run_forward(block_tokens=True)`) and a third of the budget, the readout's rows an eighth."""
    lens, left = _compute_lens(forward, image, targets[:LENS_TARGETS], temperature), budget
    if lens is not None:
        size = (3 + len(lens[2])) * lens[0].numel()  # two bytes a class, one a probability
        lens, left = (lens, left - size) if 3 * size <= budget else (None, left)
    layers, one, prefix = forward.record.layers, slice(image, image + 1), forward.num_prefix_tokens
    readout, grid = None, _fit(forward.grid, budget // (8 * len(layers) * layers[0].num_heads) - prefix)
    if grid is not None:
        u = at_least_float32(forward.readout[one])[:, None, None]
        rows = torch.cat([(u @ at_least_float32(layer.attention(one)))[0, :, 0] for layer in layers])  # [L·H, N]
        readout = _quantise(rows, forward, grid)
        left -= readout.values.numel()
    names, attention = _name_prefix_tokens(forward), measure_attention(forward, one, left)
    return MeasuredTokens(len(layers), layers[0].num_heads, names, attention, readout, lens)


def measure_attention(forward: Forward, one: slice, budget: int) -> _Attention:
    """Rollout of one image, and each layer's and head's attention as far as `budget` bytes go."""
    layers, grid, prefix = forward.record.layers, forward.grid, forward.num_prefix_tokens
    heads = layers[0].num_heads
    left = budget // layers[0].num_tokens  # cells that each token may have
    rollout_grid = _fit(grid, left - prefix)
    if rollout_grid is None:
        return []
    left -= prefix + rollout_grid[0] * rollout_grid[1]
    layer_grid = _fit(grid, left // len(layers) - prefix) if rollout_grid == grid else None
    # fused one layer after another: of 4,096 tokens the heads of all layers would take 10 GB
    rollout = attention_rollout([layer.attention(one).mean(dim=1, keepdim=True) for layer in layers])[0]
    kept: _Attention = [(None, None, _quantise(rollout, forward, rollout_grid))]
    if layer_grid is None:
        return kept
    left -= len(layers) * (prefix + layer_grid[0] * layer_grid[1])
    head_grid = _fit(grid, left // (len(layers) * heads) - prefix) if layer_grid == grid else None
    of_heads: _Attention = []
    for number, layer in enumerate(layers):
        attention = layer.attention(one)[0]  # [H, N, N]
        kept.append((number, None, _quantise(attention.mean(dim=0), forward, layer_grid)))
        if head_grid is not None:
            of_heads += [(number, head, _quantise(rows, forward, head_grid)) for head, rows in enumerate(attention)]
    return kept + of_heads


@torch.no_grad()
def _compute_lens(
    forward: Forward, image: int, targets: Int[Tensor, " T"], temperature: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """nostalgebraist's logit lens (2020) on a vision transformer's tokens."""
    found = []
    for layer in forward.record.layers:
        if layer.block_tokens is None:
            return None
        try:
            logits = classify_token(forward, at_least_float32(layer.block_tokens[image].detach()))
        except ValueError:  # a classifier that is not known: the page does without
            return None
        found.append((logits / temperature).softmax(dim=-1).float())
    probabilities, classes = map(torch.stack, zip(*(of_layer.max(dim=-1) for of_layer in found), strict=True))
    of_targets = torch.stack([of_layer[:, targets].T for of_layer in found], dim=1)  # [T, L, N]
    return classes, probabilities, of_targets


def _name_prefix_tokens(forward: Forward) -> tuple[str, ...]:
    model, count = forward.model, forward.num_prefix_tokens
    names = ["class token"] if getattr(model, "cls_token", True) is not None else []
    names += ["distillation token"] if getattr(model, "dist_token", None) is not None else []
    return tuple([*names, *(f"register {number + 1}" for number in range(count - len(names)))][:count])


def _quantise(rows: Float[Tensor, "rows N"], forward: Forward, cells: Grid) -> _Rows:
    """Rows as 8-bit fractions of their maxima, each cell the mean over its patches."""
    parts = [rows[:, : forward.num_prefix_tokens], rows[:, forward.num_prefix_tokens :]]
    if cells != forward.grid:
        parts[1] = F.adaptive_avg_pool2d(torch.unflatten(parts[1], -1, forward.grid), cells).flatten(1)
    maxima = torch.stack([F.pad(part, (0, 1)).amax(dim=1) for part in parts], dim=1)  # a model may have no prefix
    tiny = torch.finfo(rows.dtype).tiny
    values = torch.cat([part / most[:, None].clamp_min(tiny) for part, most in zip(parts, maxima.T, strict=True)], 1)
    return _Rows(cells, (values * 255).round().to(torch.uint8), maxima.float())


def _fit(grid: Grid, most: int) -> Grid | None:
    """`grid`, halved until it has at most so many cells; None where that leaves less than 2×2."""
    while grid[0] * grid[1] > most:
        grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        if min(grid) < 2:
            return None
    return grid
