"""Attention sinks: patches that draw attention without being looked at.

A softmax has to put its weight somewhere. Transformers put what they don't need on a few tokens: on
the first one (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024),
or on patches of little content where there is no register for it (Darcet et al., "Vision
Transformers Need Registers", ICLR 2024). Rollout takes that for information: a bright spot.

They are told layer by layer, by the attention that they draw and by how little of it moves
anything: a patch that is looked at draws as much in some models, but what is read there is as large
as elsewhere. On a ViT-S/14 of self-supervised training all sinks are in the first layer: a mean
over layers misses them, and so does the norm of the tokens, which is that of any other patch.
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

# A sink draws at least so many times an even share of a layer's attention, from nearly all queries
# (their standard deviation is below the mean), and attention to it moves at most so much of what it
# moves from others: ‖v W_O‖ weighted by it (Kobayashi et al. 2020). Of patches that draw that much
# from nearly all, those in the first layer of ViT-S/14 (32 photos, 34 of 36 patches) have 0.24 to
# 0.49, the others and those of a model of Imagenette (64 photos) 0.53 to 1.8, around 1; models of
# CIFAR-10 (64 images) and of planted glyphs have none. research/rollout_variants.py measures it.
MIN_DRAWN = 12.0
MAX_VARIATION = 1.0
MAX_MOVED = 0.5
# of the patches' queries: a sink draws from any choice of them, and all would take as long as the
# rollout itself
_MAX_QUERIES = 64
# of what is noted of the whole attention, beside that of some queries alone
_ROUNDING = 1e-3


@torch.no_grad()
def find_sinks(forward: Forward, *, start_layer: int = 0) -> Bool[Tensor, "B layers rows columns"]:
    """The patches that nearly all other patches attend to, in each layer from `start_layer` on.

    Attention is the mean over the heads.

    Args:
        forward: a forward pass.
        start_layer: the first layer that is looked at.

    Returns:
        True where a patch is a sink of the layer.
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
    """Note the most that a patch draws of attention that is at hand: most models have no sinks,
    which `find_sinks` then knows without computing it once more. An accelerator would have to be
    waited for."""
    if attention.is_cpu:
        rows = _choose_queries(attention.shape[-1], num_prefix_tokens)
        drawn = attention[:, :, rows].mean(dim=2).mean(dim=1)[:, num_prefix_tokens:]
        layer.max_drawn = max(layer.max_drawn or 0.0, drawn.max().item() * attention.shape[-1])


def _choose_queries(num_tokens: int, num_prefix_tokens: int) -> slice:
    return slice(num_prefix_tokens, None, -(-num_tokens // _MAX_QUERIES))


def _find_in_layer(
    layer: AttentionLayer, num_prefix_tokens: int, images: slice
) -> Bool[Tensor, "b P"]:
    query, key = layer.query_and_key(images)
    rows = _choose_queries(query.shape[2], num_prefix_tokens)
    attention = layer.scores(query, key, rows).softmax(dim=-1)  # [b, H, queries, N]

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
    """A line for each method: on how many images it has attention sinks.

    Args:
        fractions: of each map of a method, what its sinks hold; 0 without any.
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
