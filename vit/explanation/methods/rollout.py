"""Attention rollout: where, through all layers, did each token's information come from?

Abnar & Zuidema, "Quantifying Attention Flow in Transformers" (2020): every layer mixes the tokens
by Ã = residual·I + (1 - residual)·A, where A is the layer's attention fused over its heads, and the
whole encoder by the product Ã_L … Ã_1. Row i of that product says how much of every input token is
in output token i.

Here A's rows sum to one whatever the fusion and the discarding (they are renormalised *before* the
residual is mixed in), so the identity has the weight that was asked for and rows of the product sum
to one.

`attention_rollout` takes stored attention weights: the ONNX export and the gallery's view of a
single patch use it. `compute_rollout` computes the same row from the queries and keys of captured
layers, without ever holding a layer's weights of the whole batch: `vit explain` uses it, since at
4,096 tokens the weights of one layer of one image take 0.8 GB.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.forward import Forward, split_prefix
from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.capture.pooling import compute_pool_weights
from vit.model.logits import at_least_float32
from vit.model.vision_transformer import Images, VisionTransformer
from vit.options import MapOptions
from vit.runtime.arguments import check_choice

HEAD_FUSIONS: dict[str, Callable[..., Tensor]] = {
    "mean": Tensor.mean,
    "max": Tensor.amax,
    "min": Tensor.amin,
}
# attention weights held at once, 8 MiB: about the cache, and enough work a call
CHUNK_ELEMENTS = 2**21


def attention_rollout(
    attentions: Sequence[Float[Tensor, "B H N N"]],
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
    num_prefix_tokens: int = 1,
    pool_weights: Float[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B N N"] | Float[Tensor, "B N"]:
    """Roll the layers' attention up into one matrix whose rows sum to one (Abnar & Zuidema 2020).

    Args:
        attentions: post-softmax attention [B, H, N, N] of each layer, first layer first.
        head_fusion: how the heads become one matrix: "mean", "max" or "min".
        discard_ratio: fraction of the smallest patch-to-patch entries that is dropped, in [0, 1).
        residual: weight of the identity, 0 to 1; 0.5 is the published half.
        start_layer: layers before it are left out.
        num_prefix_tokens: tokens in front of the patches, which discarding spares.
        pool_weights: how much each output token counts, [B, N]. With it, only that mixture of the
            matrix's rows is computed, from vector-matrix products alone.

    Returns:
        The matrix [B, N, N], or pool_weights · matrix [B, N].

    Raises:
        ValueError: for an option outside its range and for no attention at all.
    """
    options = MapOptions(
        head_fusion=head_fusion,
        discard_ratio=discard_ratio,
        residual=residual,
        start_layer=start_layer,
    )
    check_rollout_options(options, len(attentions))
    attentions = attentions[start_layer:]

    # a row takes vector-matrix products from the last layer to the first, the whole matrix takes
    # products of matrices
    if pool_weights is not None:
        row = at_least_float32(pool_weights)
        for attention in reversed(attentions):
            if _is_plain_mean(options):
                mixed = _sum_over_heads(row, at_least_float32(attention)) / attention.shape[1]
            else:
                mixed = multiply_row(row, mixing_matrix(attention, options, num_prefix_tokens))
            row = residual * row + (1 - residual) * mixed
        return row

    rollout: Tensor | None = None
    for attention in attentions:
        mixing = mixing_matrix(attention, options, num_prefix_tokens)
        identity = torch.eye(mixing.shape[-1], dtype=mixing.dtype, device=mixing.device)
        with_residual = residual * identity + (1 - residual) * mixing
        rollout = with_residual if rollout is None else with_residual @ rollout
    assert rollout is not None
    return rollout


@torch.no_grad()
def compute_rollout(
    forward: Forward, options: MapOptions, *, chunk_elements: int = CHUNK_ELEMENTS
) -> Float[Tensor, "B N"]:
    """`attention_rollout` with `pool_weights`, from the queries and keys of captured layers.

    Of 4,096 tokens the attention of a layer of 12 heads takes 0.8 GB for each image, and 12 layers'
    would have to be kept. Here it is formed for a few images or a few query rows at a time, layer
    after layer, last layer first, which also keeps it in the processor's cache.

    Args:
        forward: the recorded pass.
        options: those of rollout, as `attention_rollout` has them; `check_rollout_options` names
            what is outside its range.
        chunk_elements: attention weights that are held at once.

    Returns:
        The relevance of each input token, [B, N], at least float32.
    """
    layers = forward.record.layers[options.start_layer :]
    pool_weights = at_least_float32(forward.pool_weights)

    def roll_up(images: slice) -> Float[Tensor, "b N"]:
        row = pool_weights[images]
        for layer in reversed(layers):
            # the mean over heads needs no fused matrix, other fusions need whole ones
            if _is_plain_mean(options):
                mixed = _multiply_mean(row, layer, images, chunk_elements)
            else:
                attention = layer.attention(images)
                mixing = mixing_matrix(attention, options, forward.num_prefix_tokens)
                mixed = multiply_row(row, mixing)
            row = options.residual * row + (1 - options.residual) * mixed
        return row

    return in_chunks(layers[0], roll_up, chunk_elements)


def _is_plain_mean(options: MapOptions) -> bool:
    return options.head_fusion == "mean" and options.discard_ratio == 0


def _multiply_mean(
    row: Float[Tensor, "b N"], layer: AttentionLayer, images: slice, chunk_elements: int
) -> Float[Tensor, "b N"]:
    """r·A, where A is the mean of the layer's heads."""
    num_tokens = row.shape[1]
    queries_at_once = max(chunk_elements // (layer.num_heads * num_tokens), 1)
    query, key = layer.query_and_key(images)
    total = torch.zeros_like(row)
    for start in range(0, num_tokens, queries_at_once):
        queries = slice(start, start + queries_at_once)
        weights = layer.scores(query, key, images, queries)  # [b, H, queries, N]
        # in place: fresh memory for each would cost as much again
        torch.softmax(weights, dim=-1, out=weights)
        total += _sum_over_heads(row[:, queries], weights)
    return total / layer.num_heads


class LogitsAndRollout(nn.Module):
    """Logits and rollout as part of the model's own computation, without hooks: a module that
    exporters can trace.

    Args:
        model: the model whose attention is rolled up, with the default options.
    """

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Images) -> tuple[Tensor, Tensor]:
        """Logits [B, C] and maps [B, rows, columns]."""
        model = self.model
        tokens, attentions = model.forward_features_with_attention(images)
        pool_weights = compute_pool_weights(
            model, tokens, {}, num_prefix_tokens=model.num_prefix_tokens
        )
        relevance = attention_rollout(attentions, pool_weights=pool_weights)
        maps, _ = split_prefix(
            relevance, num_prefix_tokens=model.num_prefix_tokens, grid=model.grid_size
        )
        return model.forward_head(tokens), maps


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


def multiply_row(row: Float[Tensor, "b N"], matrix: Float[Tensor, "b N N"]) -> Float[Tensor, "b N"]:
    """r·A of each image."""
    return torch.bmm(row[:, None], matrix)[:, 0]


def _sum_over_heads(
    row: Float[Tensor, "b Nq"], attention: Float[Tensor, "b H Nq N"]
) -> Float[Tensor, "b N"]:
    """Σ_h row · A_h: one pass over the weights, no fused matrix."""
    return (row[:, None, None] @ attention).sum(dim=1)[:, 0]


def in_chunks(
    layer: AttentionLayer,
    compute: Callable[[slice], Tensor],
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """`compute` of a few images of the batch at a time, whose attention matrices of one layer have
    about `chunk_elements` numbers together."""
    size = max(chunk_elements // (layer.num_heads * layer.num_tokens**2), 1)
    starts = range(0, layer.batch, size)
    return torch.cat([compute(slice(start, start + size)) for start in starts])


def check_rollout_options(options: MapOptions, num_layers: int) -> None:
    """Raise ValueError for an option outside its range."""
    if num_layers == 0:
        raise ValueError("attentions is empty; rollout needs the attention of at least one layer")
    check_choice(options.head_fusion, tuple(HEAD_FUSIONS), name="head_fusion")
    if not 0 <= options.discard_ratio < 1:
        raise ValueError(
            f"discard_ratio {options.discard_ratio} is outside [0, 1); 0.9 drops the lowest nine tenths"
        )
    if not 0 <= options.residual <= 1:
        raise ValueError(
            f"residual {options.residual} is outside [0, 1]; 0.5 is the published half"
        )
    if not 0 <= options.start_layer < num_layers:
        raise ValueError(
            f"start_layer {options.start_layer} is outside 0 to {num_layers - 1}, this model's layers"
        )
