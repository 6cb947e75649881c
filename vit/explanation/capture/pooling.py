"""Measure the pool weights u of a model: how much each output token of the encoder counts in the
pooled feature, which the model classifies. Explaining mean-pooled models at the class token is a
common mistake.

For a random mixture f of the logits and the tokens x after the last norm, u_j is the mean over the
channels d of |∂f/∂x_jd| / Σ_k |∂f/∂x_kd|. If the pooled feature is a weighted mean of tokens (class
token, mean, both, maximum), this is the weight for any classifier.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.discovery import hook_modules
from vit.explanation.capture.reader import ModelReader
from vit.explanation.capture.watch import has_three_axes
from vit.model.logits import at_least_float32
from vit.runtime.tensors import Logits, Tokens

TokenWeights = Float[Tensor, "B N"]


def measure_pool_weights(
    reader: ModelReader, last_tokens: list[Tokens], logits: Logits
) -> tuple[TokenWeights, Tokens]:
    """Measure how much each token counts, and find the tokens that are pooled among those of
    `capture_last_tokens`. Raise ValueError if the logits don't depend on them, or if tokens are
    mixed after the last block."""
    found = reader.found
    # both are found once, so that no later pass copies numbers to or from its device
    if found.signs is None:
        generator = torch.Generator().manual_seed(0)
        # a plain sum may be constant, if the weights of the classes cancel
        signs = torch.randint(2, logits.shape[1:], generator=generator) * 2 - 1
        found.signs = signs.to(logits)
    score = (logits * found.signs).sum()
    gradients = torch.autograd.grad(score, last_tokens, retain_graph=True, allow_unused=True)
    if found.pooled is None:
        found.pooled = _find_pooled(last_tokens, gradients)
    gradient = gradients[found.pooled]
    assert gradient is not None

    # shares within each channel first, so that a channel with large gradients doesn't dominate
    magnitude = at_least_float32(gradient.abs())
    total = magnitude.sum(dim=1, keepdim=True)
    tiny = torch.finfo(magnitude.dtype).tiny
    shares = torch.where(total > 0, magnitude / total.clamp_min(tiny), 0.0).sum(dim=2)
    return shares / shares.sum(dim=1, keepdim=True), last_tokens[found.pooled]


def _find_pooled(last_tokens: list[Tokens], gradients: Sequence[Tensor | None]) -> int:
    """Return which of the last tokens are pooled: the last ones on the way to the logits."""
    used = {
        number: gradient
        for number, gradient in enumerate(gradients)
        if gradient is not None and gradient.any()
    }
    if 0 not in used:
        raise ValueError(
            "the logits have no gradient at the tokens of the last attention layer (explain a "
            "quantised model before it is quantised, and a head of zeros after its training)"
        )
    pooled = max(used)
    if pooled == 0:
        return pooled
    # between the last block and the pooling there may be only a norm of each token, and all logits
    # must depend on its result: then the gradient of every second token stays separate
    tokens = last_tokens[pooled]
    every_second = (torch.arange(tokens.shape[1], device=tokens.device) % 2 == 0)[:, None]
    (through,) = torch.autograd.grad(
        tokens, last_tokens[0], used[pooled] * every_second, retain_graph=True
    )
    error = (through - used[0] * every_second).abs().max()
    if error > 1e-2 * used[0].abs().max():
        raise ValueError(
            "tokens are mixed after the last attention layer that is known, so no map is exact"
        )
    return pooled


@contextmanager
def capture_last_tokens(reader: ModelReader) -> Iterator[list[Tokens]]:
    """Keep the tokens that leave the last block and those that leave each module after it. Without
    gradients the graph begins there."""
    last_tokens: list[Tensor] = []
    attention = reader.attention

    def keep_last(link: int, tokens: Tensor) -> Tensor | None:
        if link < attention.num_layers:
            return None
        if not tokens.requires_grad:
            torch.set_grad_enabled(True)  # until the caller's context ends
            tokens = tokens.detach().requires_grad_()
        last_tokens[:] = [tokens]
        return tokens

    def on_module(module: nn.Module, args: Any, result: Any) -> Tensor | None:
        # modules before the last block don't matter
        if not last_tokens or not has_three_axes(result) or not result.requires_grad:
            return None
        for ordered in (result, result.permute(attention.axes)):
            # keys and values of an attention pooling have another width, or are mixed
            if ordered.shape == last_tokens[0].shape:
                last_tokens.append(ordered)
                # the model goes on with the tensor that is kept
                return ordered.permute(attention.axes) if ordered is not result else None
        return None

    with reader.watch(keep_last), hook_modules(reader.model, on_module):
        yield last_tokens
