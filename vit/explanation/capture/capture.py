"""Read the attention of an unmodified vision transformer while its fused kernels stay on.

Fused attention never returns its weights, so hooks keep what enters it (queries and keys), and softmax(q kᵀ · scale) is
computed again when it is asked for. The forward pass is untouched: logits with and without capture are bit-equal.

The gradient of a score f with respect to a layer's attention A follows from the heads' output O = A·V:
∂f/∂A = (∂f/∂O) Vᵀ, per head. One backward pass to the O's gives it for all layers; no N×N tensor enters the graph.

Each capture is verified: where A·V of its first image is not what the layer computed (an unknown mask, a position bias,
a gate …), it raises instead of returning something plausible. That waits for the device; of many batches the first is
verified (`verify`).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vit.explanation.capture.layers import LAYER_KINDS, SUPPORTED, AttentionLayer

_HIERARCHICAL = re.compile(
    "swin|hiera|mvit|multiscalevit|maxvit|maxxvit|pyramidvision|twins|davit|focalnet|levit|metaformer|nextvit"
)
# bytes of queries and keys of all layers; above it the tokens they are made of are kept, half as many
QUERY_KEY_LIMIT = 2**28


class AttentionRecord:
    """What `capture_attention` leaves of the last forward pass, first layer first."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self._layers = layers

    @property
    def layers(self) -> list[AttentionLayer]:
        """The layers. Raises RuntimeError where the last forward pass did not go through them all."""
        missing = [layer.name for layer in self._layers if not layer.captured]
        if len(missing) == len(self._layers):
            raise RuntimeError("no attention was captured: run the model inside capture_attention first")
        if missing:
            count = f"{len(missing)} of {len(self._layers)} attention layers were not captured"
            raise RuntimeError(f"{count}: the forward pass bypassed {', '.join(missing)}")
        return self._layers

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that the layers are part of."""
        return [layer.block for layer in self._layers]

    @property
    def attentions(self) -> list[Float[Tensor, "B H Nq N"]]:
        """Each layer's weights after the softmax."""
        return [layer.attention() for layer in self.layers]

    def gradients(self, score: Tensor, *, retain_graph: bool = False) -> list[Float[Tensor, "B H Nq N"]]:
        """∂score/∂attention of each layer, by one backward pass. Needs `capture_attention(gradients=True)`. `score` is
        a scalar or [B]: images don't mix, so the gradient of the sum holds each image's own."""
        gradients = self.heads_gradients(score, retain_graph=retain_graph)
        return [layer.attention_gradient(grad) for layer, grad in zip(self.layers, gradients, strict=True)]

    def heads_gradients(self, score: Tensor, *, retain_graph: bool = False) -> list[Tensor]:
        """∂score/∂heads of each layer: what `AttentionLayer.attention_gradient` takes."""
        heads = [layer.heads for layer in self.layers if layer.heads is not None]
        if not score.requires_grad or not heads or not all(tensor.requires_grad for tensor in heads):
            raise RuntimeError(
                "nothing to differentiate: use capture_attention(model, gradients=True) with gradients enabled, "
                "on parameters or images that require them"
            )
        return list(torch.autograd.grad(score.sum(), heads, retain_graph=retain_graph))


@contextmanager
def capture_attention(
    model: nn.Module,
    *,
    gradients: bool = False,
    query_key_limit: int = QUERY_KEY_LIMIT,
    block_tokens: bool = False,
    verify: bool = True,
) -> Iterator[AttentionRecord]:
    """Record every layer's attention in forward passes inside the `with`; the last one stays in the record.

    `gradients` keeps the autograd graph for `record.gradients`, `block_tokens` what leaves each block. Where queries
    and keys of all layers would take more than `query_key_limit` bytes, they are computed again when asked for: half
    the memory, more time.
    Raises ValueError for a model whose attention is not understood (hierarchical models, unknown layers).
    """
    layers, handles = find_attention_layers(model), list[RemovableHandle]()
    # timm's: it would run the blocks again in the backward pass, with what they computed first in no graph
    checkpointed: list[Any] = [m for m in model.modules() if gradients and getattr(m, "grad_checkpointing", False)]

    def forget(module: nn.Module, args: object) -> None:
        for layer in layers:  # a pass that bypasses a layer must not leave the one before it in its place
            layer.captured = False

    try:
        for module in checkpointed:
            module.grad_checkpointing = False
        handles.append(layers[0].module.register_forward_pre_hook(forget))
        for layer in layers:
            limit = query_key_limit // (2 * len(layers))
            handles += layer.attach(gradients=gradients, token_limit=limit, block_tokens=block_tokens, verify=verify)
        yield AttentionRecord(layers)
    finally:
        for handle in handles:
            handle.remove()
        for module in checkpointed:
            module.grad_checkpointing = True


def find_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The model's self-attention layers in order, or ValueError with why they cannot be read."""
    family = type(model).__name__
    if _HIERARCHICAL.search(family.lower()):
        raise ValueError(
            f"{family} is hierarchical: it attends within windows or merges patches between stages, so no attention "
            f"between all of its input patches exists to be explained; known: {SUPPORTED}"
        )
    layers: list[AttentionLayer] = []
    for block_name, block in model.named_modules():
        for name, module in block.named_children():
            kind = next((kind for kind in LAYER_KINDS if kind.matches(module, block)), None)
            if kind is not None:
                layers.append(kind(f"{block_name}.{name}".removeprefix("."), module, block))
    if not layers:
        raise ValueError(f"no attention layer of a known kind in {family}; known: {SUPPORTED}")
    return layers
