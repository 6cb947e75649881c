"""The removal gradient: the loss of the score, to first order, if a token is left out of every
layer.

A gate g_j multiplies each token j wherever it is read: in every softmax,
A_ij = g_j e^{s_ij} / Σ_k g_k e^{s_ik}, and in the mean of the pooling. With g in {0, 1} that is the
model without the tokens of gate 0. The map is ∂f/∂g at g = 1. With G = ∂f/∂A of a layer and head,

    ∂f/∂g_j = Σ_layers Σ_heads Σ_i A_ij (G_ij - Σ_k A_ik G_ik) + the same of the pooling,

by one backward pass.
"""

from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from vit.explanation.capture.forward import Forward, differentiate
from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.capture.pooling import TokenWeights
from vit.explanation.methods.gradients import iterate_rows
from vit.explanation.targets import Classes
from vit.model.logits import at_least_float32


def compute_removal_map(forward: Forward, classes: Classes) -> TokenWeights:
    """Compute the removal gradient of the probability, which is also the evidence of the sanity
    checks: a logit may rise together with those of all classes. Signed; see the module's docstring.
    Raises ValueError if the model's pooling isn't a mean of tokens."""
    score = forward.value(classes)
    layer_gates = [
        _differentiate_layer(layer, heads_gradient)
        for layer, heads_gradient in forward.record.differentiate(score)
    ]
    return torch.stack(layer_gates).sum(dim=0) + _differentiate_pooling(forward, score)


def _differentiate_layer(layer: AttentionLayer, heads_gradient: Tensor) -> TokenWeights:
    """Differentiate by the gates of one layer: Σ A_ij (G_ij - Σ_k A_ik G_ik) over heads and queries
    i."""

    def differentiate_images(images: slice) -> Float[Tensor, "b N"]:
        parts = []
        for _, attention, gradient in iterate_rows(layer, heads_gradient, images):
            product = attention * gradient
            # without a token, the others share its weight
            shared = attention * product.sum(dim=-1, keepdim=True)
            parts.append((product - shared).sum(dim=(1, 2)))
        return reduce(torch.add, parts)

    return layer.in_chunks(differentiate_images)


def _differentiate_pooling(forward: Forward, score: Float[Tensor, " B"]) -> TokenWeights:
    """Differentiate by the gates of the pooling: 0 for a class token, which is read whole, and for
    a maximum, which has no first order."""
    result = torch.zeros_like(at_least_float32(forward.pool_weights))
    pool = forward.record.pool
    if pool is not None and pool.output.requires_grad:
        (heads_gradient,) = torch.autograd.grad(
            score.sum(), pool.output, retain_graph=True, allow_unused=True
        )
        # a classifier may read something else
        if heads_gradient is not None:
            gates = _differentiate_layer(pool, heads_gradient)
            # prefix tokens that the pooling does not read keep 0
            result[:, -gates.shape[1] :] = gates
            return result

    gradient = differentiate(score, forward.tokens)
    found = forward.reader.found
    # found once, so that no later batch waits for the numbers
    if found.first_averaged is None:
        found.first_averaged = -1
        if (gradient != 0).sum(dim=1).amax() > 1:  # not one token for each channel
            found.first_averaged = _find_measured_mean(forward)
    first = found.first_averaged
    if first >= 0:
        pooled = at_least_float32(forward.tokens.detach())[:, first:]
        # gradient of the mean, of which each token has an equal part
        gradient = gradient[:, first:].sum(dim=1, keepdim=True) / pooled.shape[1]
        # without a token, the mean moves away from it in proportion to their difference
        centred = pooled - pooled.mean(dim=1, keepdim=True)
        result[:, first:] = (centred * gradient).sum(dim=-1)
    return result


def _find_measured_mean(forward: Forward) -> int:
    """Find the first token of a measured mean, which may be pooled together with a class token.
    Raise ValueError if the pooling is no mean."""
    num_prefix = forward.num_prefix_tokens
    patches = forward.pool_weights[:, num_prefix:]
    # a mean has equal weights on all patches
    if (patches - patches[:, :1]).abs().max() > 1e-3 * patches.abs().max():
        name = type(forward.reader.model).__name__
        raise ValueError(f"{name} pools by something other than a mean, so its gates are unknown")

    # prefix tokens next to the patches may be part of it: all of them, or prompts
    prefix = forward.pool_weights[:, :num_prefix]
    is_part = torch.isclose(prefix, patches[:, :1], rtol=1e-3, atol=0).all(dim=0).tolist()
    first = num_prefix
    while first > 0 and is_part[first - 1]:
        first -= 1
    return first
