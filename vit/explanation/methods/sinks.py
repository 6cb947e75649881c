"""Attention sinks: patches that draw attention although little is read from them.

The weights of a softmax sum to one. Transformers put the weight that they don't need on a few
tokens: on the first one (Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
ICLR 2024), or on patches of little content if there is no register (Darcet et al., "Vision
Transformers Need Registers", ICLR 2024). In a rollout they look like information: a bright spot.

They are found in each layer by the attention that they draw and by how little it moves. In some
models a patch with content draws as much attention, but the values that are read there are as large
as elsewhere. In a self-supervised ViT-S/14 all sinks are in the first layer: a mean over layers
misses them, and so does the norm of the tokens, which is like that of other patches.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor

from vit.explanation.capture.forward import Forward
from vit.explanation.capture.layers import Attention, AttentionLayer

# A sink draws at least MIN_DRAWN times the attention of the average token, from nearly all queries
# (standard deviation over the queries at most MAX_VARIATION of the mean), and a unit of attention
# to it moves at most MAX_MOVED of the average: ‖v W_O‖ weighted by attention (Kobayashi et al.
# 2020). Among such patches, those in the first layer of ViT-S/14 move 0.24 to 0.49 of the average,
# others 0.53 to 1.8 (32 and 64 photos, research/rollout_variants.py).
MIN_DRAWN = 12.0
MAX_VARIATION = 1.0
MAX_MOVED = 0.5
# number of patches whose queries are looked at: a sink draws attention from any of them, and all
# would take as long as the rollout itself
_MAX_QUERIES = 64
# relative difference between the attention that `note_drawn` sees and that of some queries alone
_ROUNDING = 1e-3


@torch.no_grad()
def find_sinks(forward: Forward, *, start_layer: int = 0) -> Bool[Tensor, "B layers rows columns"]:
    """Find the patches that nearly all other patches attend to, in the mean over the heads.

    Args:
        forward: A forward pass.
        start_layer: First layer that is searched.

    Returns:
        True for each patch that is a sink of the layer.
    """
    num_prefix = forward.num_prefix_tokens
    sinks = []
    for layer in forward.record.layers[start_layer:]:
        if layer.max_drawn is None or layer.max_drawn >= MIN_DRAWN * (1 - _ROUNDING):
            sinks.append(layer.in_chunks(partial(_find_in_layer, layer, num_prefix)))
        else:
            sinks.append(torch.zeros(layer.batch, math.prod(forward.grid), dtype=torch.bool))
    return torch.unflatten(torch.stack(sinks, dim=1), -1, forward.grid)


def note_drawn(layer: AttentionLayer, attention: Attention, num_prefix_tokens: int) -> None:
    """Keep the largest attention that a patch draws while the attention is in memory, so that
    `find_sinks` can skip layers without sinks. On a GPU this would wait for the device, so it isn't
    done."""
    if attention.is_cpu:
        rows = _choose_queries(attention.shape[-1], num_prefix_tokens)
        drawn = attention[:, :, rows].mean(dim=2).mean(dim=1)[:, num_prefix_tokens:]
        layer.max_drawn = max(layer.max_drawn or 0.0, drawn.max().item() * attention.shape[-1])


def _choose_queries(num_tokens: int, num_prefix_tokens: int) -> slice:
    return slice(num_prefix_tokens, None, -(-num_tokens // _MAX_QUERIES))


def _find_in_layer(
    layer: AttentionLayer, num_prefix_tokens: int, images: slice
) -> Bool[Tensor, "b P"]:
    rows = _choose_queries(layer.num_queries, num_prefix_tokens)
    attention = layer.attention(images, rows)  # [b, H, queries, N]

    drawn_by_head = attention.mean(dim=2)
    drawn = drawn_by_head.mean(dim=1)
    even_share = 1 / attention.shape[-1]
    is_strong = drawn >= MIN_DRAWN * even_share
    is_from_all = attention.mean(dim=1).std(dim=1) < MAX_VARIATION * drawn
    draws = (is_strong & is_from_all)[:, num_prefix_tokens:]
    if draws.is_cpu and not draws.any():
        return draws

    moved = (drawn_by_head * layer.value_norms(images)).mean(dim=1)
    moved = moved / moved.sum(dim=-1, keepdim=True)
    return draws & (moved <= MAX_MOVED * drawn)[:, num_prefix_tokens:]


def count_sinks(fractions: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a line for each method that says on how many images it has attention sinks.

    Args:
        fractions: By method, the fraction of each map that is on sinks.
    """
    lines = []
    for method, map_fractions in fractions.items():
        with_sinks = [fraction for fraction in map_fractions if fraction > 0]
        if with_sinks:
            percent = 100 * statistics.median(with_sinks)
            lines.append(
                f"{method} has attention sinks on {len(with_sinks)} of {len(map_fractions)} images;"
                f" they hold {percent:.0f} % of the map (median)"
            )
    return lines
