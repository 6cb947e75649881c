"""Attention rollout: the share of each input token in each output token, through all layers.

Abnar & Zuidema, "Quantifying Attention Flow in Transformers" (2020): every layer mixes the tokens
by Ã = ½·I + ½·A, where A is the layer's attention fused over its heads, and the whole encoder by
the product Ã_L … Ã_1. Row i of that product has the share of every input token in output token i.

Rows of Ã sum to one. After the mean over heads they do so by themselves. After a maximum, a minimum
or with discarded entries they are divided by their sums, after the identity is mixed in, as in the
program vit-explain (Gildenblat 2020), which divides columns by the sums of the rows.

The rollout of large images does without N×N weights, which don't fit into memory: for 4,096 tokens
those of one layer of one image take 0.8 GB.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.forward import Forward
from vit.explanation.capture.pooling import TokenWeights
from vit.model.logits import at_least_float32
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import check_choice
from vit.runtime.tensors import Images

# more tokens than those of 512 px in patches of 16 px would make a page too large
_MAX_FLOW_TOKENS = 1100
_HEAD_FUSIONS: dict[str, Callable[..., Tensor]] = {
    "mean": Tensor.mean,
    "max": Tensor.amax,
    "min": Tensor.amin,
}


def attention_rollout(
    attentions: Sequence[Float[Tensor, "B _ N N"]],
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    start_layer: int = 0,
    pool_weights: TokenWeights | None = None,
) -> Float[Tensor, "B N N"] | TokenWeights:
    """Multiply the layers' attention into one matrix whose rows sum to one
    (Abnar & Zuidema 2020).

    Args:
        attentions: Attention [B, H, N, N] of each layer after the softmax,
            first layer first.
        head_fusion: Fusion of the heads into one matrix: "mean", "max" or
            "min".
        discard_ratio: Fraction of the smallest entries of each fused matrix
            that are set to 0, in [0, 1); the first entry of the first row is
            kept.
        start_layer: First layer that is used.
        pool_weights: Weight of each output token, [B, N]. Only this mixture of
            rows is computed then, which needs no product of matrices. None: all
            rows.

    Returns:
        The matrix [B, N, N], or pool_weights · matrix [B, N].

    Raises:
        ValueError: An option is outside its range, or `attentions` is empty.

    Example:
        >>> with vit.capture_attention(model) as record: model(images)
        >>> rollout = vit.attention_rollout(record.attentions)
        >>> rollout[:, 0, 1:]  # patches in the class token, [B, patches]
        >>> rollout.mean(dim=1)  # in a mean-pooled model without one
    """
    _check_options(len(attentions), head_fusion, discard_ratio, start_layer)
    if pool_weights is None:
        last = attentions[-1]
        rows = at_least_float32(torch.eye(last.shape[-1], dtype=last.dtype, device=last.device))
        rows = rows[None]
    else:
        rows = at_least_float32(pool_weights)[:, None]
    # rows of the product, from its left end: all of them, or their mixture
    for attention in reversed(attentions[start_layer:]):
        rows = _mix(rows, attention, head_fusion, discard_ratio)
    return rows if pool_weights is None else rows[:, 0]


@torch.no_grad()
def compute_rollout(
    forward: Forward,
    classes: Tensor,
    *,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    start_layer: int = 0,
) -> TokenWeights:
    """Compute the map method `rollout`, which is the same for all classes; see
    `attention_rollout`."""
    layers = forward.record.layers
    _check_options(len(layers), head_fusion, discard_ratio, start_layer)
    pool_weights = at_least_float32(forward.pool_weights)

    def roll_up(images: slice) -> TokenWeights:
        row = pool_weights[images, None]
        for layer in reversed(layers[start_layer:]):
            if head_fusion != "mean" or discard_ratio > 0:
                row = _mix(row, layer.attention(images), head_fusion, discard_ratio)
                continue
            # a plain mean can do without the whole matrix, and with few query rows at a time, which
            # stay in the processor's cache
            mixed = torch.zeros_like(row)
            for queries, attention in layer.attention_rows(images):
                mixed += (row[:, None, :, queries] @ attention).sum(dim=1)
            row = (row + mixed / layer.num_heads) / 2
        return row[:, 0]

    return layers[0].in_chunks(roll_up)


@torch.no_grad()
def measure_attention(forward: Forward, image: int) -> dict[str, Tensor]:
    """Measure what heads and patches of one image attend to, for pictures.

    Args:
        forward: A forward pass.
        image: Place of the image in the batch.

    Returns:
        "heads" [layers, heads, rows, columns], what the pooled feature attends to; and "flow"
        [rows, columns, rows, columns], what each patch attends to by the rollout. A part that would
        be too large is left out, and "heads" of layers with different numbers of heads.
    """
    layers = forward.record.layers
    one = slice(image, image + 1)
    prefix, grid = forward.num_prefix_tokens, forward.grid
    parts = {}
    if len({layer.num_heads for layer in layers}) == 1:
        heads = [layer.attend(forward.pool_weights, one)[0, :, prefix:] for layer in layers]
        parts["heads"] = torch.unflatten(torch.stack(heads), -1, grid).float()
    if layers[0].num_tokens <= _MAX_FLOW_TOKENS:
        # fused layer by layer, so that the heads of one layer are in memory
        fused = [layer.attention(one).mean(dim=1, keepdim=True) for layer in layers]
        flow = attention_rollout(fused)[0, prefix:, prefix:]
        parts["flow"] = flow.reshape(*grid, *grid).float()
    return parts


class LogitsAndRollout(nn.Module):
    """Module that computes logits and rollout without hooks, so that exporters can trace it.

    Args:
        model: The model. Its rollout has the default options.
    """

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Images) -> tuple[Tensor, Tensor]:
        """Compute logits [B, C] and maps [B, rows, columns]."""
        model = self.model
        logits, attentions = model.forward_with_attention(images)
        pool_weights = torch.zeros_like(at_least_float32(attentions[0][:, 0, 0]))
        if model.global_pool == "token":
            pool_weights[:, 0] = 1
        else:
            num_patches = model.grid_size[0] * model.grid_size[1]
            pool_weights[:, model.num_prefix_tokens :] = 1 / num_patches
        relevance = attention_rollout(attentions, pool_weights=pool_weights)
        maps = torch.unflatten(relevance[:, model.num_prefix_tokens :], -1, model.grid_size)
        return logits, maps


def _mix(
    rows: Float[Tensor, "_ n N"],
    attention: Float[Tensor, "B H N N"],
    head_fusion: str,
    discard_ratio: float,
) -> Float[Tensor, "B n N"]:
    """Compute rows · Ã of a layer, with rows that sum to one, in float32 or more: the product of
    twelve half-precision matrices drifts by 1e-2."""
    attention = at_least_float32(attention)
    if rows.shape[1] == 1 and head_fusion == "mean" and discard_ratio == 0:
        # one pass over the weights, without a fused matrix
        return (rows + (rows[:, None] @ attention).sum(dim=1) / attention.shape[1]) / 2
    fused = _HEAD_FUSIONS[head_fusion](attention, dim=1)
    if discard_ratio > 0:
        entries = fused.flatten(1)
        # within each image, so that its map doesn't depend on the batch
        count = int(discard_ratio * entries.shape[1])
        lowest = entries.topk(count, dim=1, largest=False, sorted=False).indices
        kept = entries.scatter(1, lowest, 0.0)
        kept[:, 0] = entries[:, 0]
        fused = kept.reshape(fused.shape)
    identity = torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
    # no row of the sum is zero, also where everything is discarded
    matrix = (identity + fused) / 2
    return rows @ (matrix / matrix.sum(dim=-1, keepdim=True))


def _check_options(
    num_layers: int, head_fusion: str, discard_ratio: float, start_layer: int
) -> None:
    """Raise ValueError if an option is outside its range."""
    if num_layers == 0:
        raise ValueError("attentions is empty; rollout needs the attention of at least one layer")
    check_choice(head_fusion, tuple(_HEAD_FUSIONS), name="head_fusion")
    if not 0 <= discard_ratio < 1:
        raise ValueError(f"discard_ratio {discard_ratio} is outside [0, 1)")
    if not 0 <= start_layer < num_layers:
        raise ValueError(f"start_layer {start_layer} is outside 0 to {num_layers - 1}")
