"""Attention rollout: where, through all layers, did each token's information come from?

Abnar & Zuidema, "Quantifying Attention Flow in Transformers" (2020): every layer mixes the tokens
by Ã = residual·I + (1 - residual)·A, where A is the layer's attention fused over its heads, and the
whole encoder by the product Ã_L … Ã_1. Row i of that product says how much of every input token is
in output token i.

Here A's rows sum to one whatever the fusion and the discarding (they are renormalised *before* the
residual is mixed in), so the identity has the weight that was asked for and rows of the product sum
to one.

`attention_rollout` is the rollout of `vit attention`, of the ONNX export and of the gallery.
`attention_rollout_in_chunks` is for large images, whose N×N weights must not be held: at 4,096
tokens those of one layer of one image take 0.8 GB.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.forward import Forward, split_prefix
from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.capture.pooling import TokenWeights, compute_pool_weights
from vit.explanation.methods.sinks import note_drawn
from vit.model.logits import at_least_float32
from vit.model.vision_transformer import VisionTransformer
from vit.options import MapOptions
from vit.runtime.arguments import check_choice
from vit.runtime.tensors import Images

HEAD_FUSIONS: dict[str, Callable[..., Tensor]] = {
    "mean": Tensor.mean,
    "max": Tensor.amax,
    "min": Tensor.amin,
}


def attention_rollout(
    attentions: Sequence[Float[Tensor, "B H N N"]],
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
    num_prefix_tokens: int = 1,
    pool_weights: TokenWeights | None = None,
) -> Float[Tensor, "B N N"] | TokenWeights:
    """Roll the layers' attention up into one matrix whose rows sum to one (Abnar & Zuidema 2020).

    Args:
        attentions: post-softmax attention [B, H, N, N] of each layer, first layer first.
        head_fusion: how the heads become one matrix: "mean", "max" or "min".
        discard_ratio: fraction of the smallest patch-to-patch entries that is dropped, in [0, 1).
        residual: weight of the identity, 0 to 1; 0.5 is the published half.
        start_layer: layers before it are left out; 0: none.
        num_prefix_tokens: tokens in front of the patches, which discarding spares.
        pool_weights: how much each output token counts, [B, N]. With it, only that mixture of the
            matrix's rows is computed, from vector-matrix products alone. None: all rows.

    Returns:
        The matrix [B, N, N], or pool_weights · matrix [B, N].

    Raises:
        ValueError: for an option outside its range and for no attention at all.

    Example:
        >>> with vit.capture_attention(model) as record: model(images)
        >>> vit.attention_rollout(record.attentions)[:, 0, 1:]  # of the class token, [B, patches]
    """
    options = MapOptions(
        head_fusion=head_fusion,
        discard_ratio=discard_ratio,
        residual=residual,
        start_layer=start_layer,
    )
    check_rollout_options(options, len(attentions))

    # the wanted rows of the product, from its left end: all of them, or their mixture alone
    if pool_weights is None:
        last = attentions[-1]
        identity = torch.eye(last.shape[-1], dtype=last.dtype, device=last.device)
        rows = at_least_float32(identity)[None]
    else:
        rows = at_least_float32(pool_weights)[:, None]
    is_mean_of_one_row = pool_weights is not None and _is_plain_mean(options)

    def mix(attention: Float[Tensor, "B H N N"]) -> Tensor:
        if is_mean_of_one_row:
            return _sum_over_heads(rows, at_least_float32(attention)) / attention.shape[1]
        return rows @ mixing_matrix(attention, options, num_prefix_tokens)

    for layer in reversed(range(start_layer, len(attentions))):
        # a layer's attention is freed here: the next one takes its place in the processor's cache
        rows = residual * rows + (1 - residual) * mix(attentions[layer])
    return rows if pool_weights is None else rows[:, 0]


def attention_rollout_in_chunks(
    layers: Sequence[AttentionLayer],
    *,
    pool_weights: TokenWeights,
    residual: float = 0.5,
) -> TokenWeights:
    """`attention_rollout` with `pool_weights`, of the mean over the heads, without any layer's N×N
    weights: they are formed for one image and a few query rows at a time, which also keeps them in
    the processor's cache.

    Args:
        layers: captured layers, first layer first.
        pool_weights: how much each output token counts, [B, N].
        residual: weight of the identity, 0 to 1.

    Returns:
        The relevance of each input token, [B, N].
    """

    def roll_up(images: slice) -> TokenWeights:
        row = pool_weights[images, None]
        for layer in reversed(layers):
            mixed = torch.zeros_like(row)
            for queries, attention in layer.attention_rows(images):
                mixed += _sum_over_heads(row[..., queries], attention)
            row = residual * row + (1 - residual) * (mixed / layer.num_heads)
        return row[:, 0]

    return layers[0].in_chunks(roll_up)


@torch.no_grad()
def compute_rollout(forward: Forward, classes: Tensor, options: MapOptions) -> TokenWeights:
    """The map method `rollout`: the same for all classes."""
    layers = forward.record.layers
    pool_weights = at_least_float32(forward.pool_weights)

    # other fusions than the mean need the whole matrix, however large
    matrix_elements = layers[0].num_heads * layers[0].num_tokens ** 2
    if matrix_elements > layers[0].chunk_elements and _is_plain_mean(options):
        return attention_rollout_in_chunks(
            layers[options.start_layer :], pool_weights=pool_weights, residual=options.residual
        )

    def roll_up(images: slice) -> TokenWeights:
        return attention_rollout(
            _LayerAttentions(layers, images, forward.num_prefix_tokens),
            head_fusion=options.head_fusion,
            discard_ratio=options.discard_ratio,
            residual=options.residual,
            start_layer=options.start_layer,
            num_prefix_tokens=forward.num_prefix_tokens,
            pool_weights=pool_weights[images],
        )

    return layers[0].in_chunks(roll_up)


@dataclass(frozen=True)
class _LayerAttentions(Sequence[Tensor]):
    """Each layer's attention of some images, computed when it is asked for."""

    layers: Sequence[AttentionLayer]
    images: slice
    num_prefix_tokens: int

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        attention = self.layers[index].attention(self.images)
        note_drawn(self.layers[index], attention, self.num_prefix_tokens)
        return attention


def _is_plain_mean(options: MapOptions) -> bool:
    return options.head_fusion == "mean" and options.discard_ratio == 0


class LogitsAndRollout(nn.Module):
    """Logits, rollout and pooled features as part of the model's own computation, without hooks: a
    module that exporters can trace.

    Args:
        model: the model whose attention is rolled up, with the default options.
    """

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Images) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, C], maps [B, rows, columns] and features [B, D]."""
        model = self.model
        tokens, attentions = model.forward_features_with_attention(images)
        pool_weights = compute_pool_weights(model, tokens, {})
        relevance = attention_rollout(attentions, pool_weights=pool_weights)
        maps, _ = split_prefix(
            relevance, num_prefix_tokens=model.num_prefix_tokens, grid=model.grid_size
        )
        return model.forward_head(tokens), maps, model.pool(tokens, model.global_pool)


def mixing_matrix(
    attention: Float[Tensor, "B H N N"], options: MapOptions, num_prefix_tokens: int
) -> Float[Tensor, "B N N"]:
    """A layer's fused attention, rows summing to one. At least float32: twelve half-precision
    matrices' product drifts by 1e-2."""
    fuse = HEAD_FUSIONS[options.head_fusion]
    fused = fuse(at_least_float32(attention), dim=1)
    if options.discard_ratio > 0:
        fused = discard_lowest(fused, options.discard_ratio, num_prefix_tokens)
    # of a maximum or minimum, or with entries discarded, rows don't sum to one
    return normalise_rows(fused)


def discard_lowest(
    fused: Float[Tensor, "B N N"], discard_ratio: float, num_prefix_tokens: int
) -> Float[Tensor, "B N N"]:
    """Zero the lowest `discard_ratio` of each image's patch-to-patch entries. Rows and columns of
    prefix tokens are never touched: that would cut the class token off from the patches, not remove
    noise."""
    patches = fused[:, num_prefix_tokens:, num_prefix_tokens:]
    # of each image alone, so that its map doesn't depend on the batch
    count = int(discard_ratio * patches[0].numel())
    if count == 0:
        return fused

    lowest = patches.flatten(1).topk(count, dim=1, largest=False, sorted=False).indices
    mask = torch.ones_like(patches).flatten(1).scatter_(1, lowest, 0.0).reshape(patches.shape)
    fused = fused.clone()
    fused[:, num_prefix_tokens:, num_prefix_tokens:] *= mask
    return fused


def normalise_rows(matrix: Float[Tensor, "B N N"]) -> Float[Tensor, "B N N"]:
    """Rows summing to one. A row of zeros (everything discarded) becomes the identity's: the token
    stays."""
    sums = matrix.sum(dim=-1, keepdim=True)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(sums > 0, matrix / sums.clamp_min(torch.finfo(matrix.dtype).tiny), identity)


def _sum_over_heads(
    rows: Float[Tensor, "b 1 Nq"], attention: Float[Tensor, "b H Nq N"]
) -> Float[Tensor, "b 1 N"]:
    """Σ_h row · A_h: one pass over the weights, no fused matrix."""
    return (rows[:, None] @ attention).sum(dim=1)


def check_rollout_options(options: MapOptions, num_layers: int) -> None:
    """Raise ValueError for an option outside its range."""
    if num_layers == 0:
        raise ValueError("attentions is empty; rollout needs the attention of at least one layer")
    check_choice(options.head_fusion, tuple(HEAD_FUSIONS), name="head_fusion")
    if not 0 <= options.discard_ratio < 1:
        raise ValueError(f"discard_ratio {options.discard_ratio} is outside [0, 1)")
    check_range("residual", options.residual, 0, 1)
    check_range("start_layer", options.start_layer, 0, num_layers - 1)


def check_range(name: str, value: int | float, minimum: int, maximum: int) -> None:
    """Raise ValueError for an option outside its range, both ends included."""
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} {value} is outside {minimum} to {maximum}")
