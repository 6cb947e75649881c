"""The removal gradient: what the score would lose, to first order, if a token were left out of
every layer.

Give each token j a gate g_j that multiplies it wherever it is read: in every softmax, A_ij = g_j
e^{s_ij} / Σ_k g_k e^{s_ik}, and in the mean of the pooling. With g in {0, 1} that is the model
without the tokens of gate 0. The map is ∂f/∂g at g = 1. With G = ∂f/∂A of a layer and head,

    ∂f/∂g_j = Σ_layers Σ_heads Σ_i A_ij (G_ij - Σ_k A_ik G_ik) + the same of the pooling,

from one backward pass to the attention layers' results.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from vit.explanation.capture.forward import Forward
from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.capture.pooling import compute_latent_attention, has_known_pooling
from vit.explanation.methods.rollout import CHUNK_ELEMENTS, in_chunks
from vit.model.logits import at_least_float32


def compute_removal_gradient(forward: Forward, score: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """∂score/∂g of each token at g = 1, see above.

    Args:
        forward: a forward pass with gradients.
        score: a logit or a probability of each image, in its graph.

    Returns:
        What the score would lose without each token, to first order; signed.

    Raises:
        ValueError: for a pooling of another library that is not a mean of tokens.
    """
    layer_gates = [
        _differentiate_layer(layer, heads_gradient)
        for layer, heads_gradient in forward.record.differentiate(score)
    ]
    return torch.stack(layer_gates).sum(dim=0) + _differentiate_pooling(forward, score)


def _differentiate_layer(
    layer: AttentionLayer, heads_gradient: Float[Tensor, "B Nq E"]
) -> Float[Tensor, "B N"]:
    """A few query rows at a time: of 4,096 tokens the matrices of one layer would take
    gigabytes."""
    queries_at_once = max(CHUNK_ELEMENTS // (layer.num_heads * layer.num_tokens), 1)

    def differentiate(images: slice) -> Float[Tensor, "b N"]:
        query, key = layer.query_and_key(images)
        gradient, value = layer.gradient_and_value(heads_gradient, images)
        # all keys of a few queries: a softmax needs its whole row
        parts = []
        for start in range(0, gradient.shape[2], queries_at_once):
            queries = slice(start, start + queries_at_once)
            attention = layer.scores(query, key, images, queries).softmax(dim=-1)
            attention_gradient = gradient[:, :, queries] @ value.transpose(-2, -1)
            parts.append(_differentiate_gates(attention, attention_gradient))
        return sum(parts[1:], parts[0])

    return in_chunks(layer, differentiate)


def _differentiate_gates(
    attention: Float[Tensor, "B H Nq N"], gradient: Float[Tensor, "B H Nq N"]
) -> Float[Tensor, "B N"]:
    """Σ over heads and queries i of A_ij (G_ij - Σ_k A_ik G_ik)."""
    product = attention * gradient
    return (product - attention * product.sum(dim=-1, keepdim=True)).sum(dim=(1, 2))


def _differentiate_pooling(forward: Forward, score: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """Gates of the pooling. 0 where a class token is read, which is read whole, and of a maximum,
    which has no first order."""
    model = forward.model
    if not has_known_pooling(model):
        return _differentiate_measured_mean(forward, score)

    num_prefix = forward.num_prefix_tokens
    tokens = at_least_float32(forward.tokens.detach())
    result = torch.zeros_like(at_least_float32(forward.pool_weights))
    match model.global_pool:
        case "avg" | "avgmax":
            first = 0 if getattr(model, "pool_include_prefix", False) else num_prefix
            pooled = tokens[:, first:]
            gradient = _gradient_of(score, forward.tokens)[:, first:]
            # a mean's and a maximum's tokens each have gradients that sum to the pooled feature's
            gradient = gradient.sum(dim=1, keepdim=True) / pooled.shape[1]
            weight = 1.0 if model.global_pool == "avg" else 0.5
            centred = pooled - pooled.mean(dim=1, keepdim=True)
            result[:, first:] = weight * (centred * gradient).sum(dim=-1)
        case "map":
            attention = compute_latent_attention(
                at_least_float32(forward.pooling["q_norm"].detach()),
                at_least_float32(forward.pooling["k_norm"].detach()),
            )
            num_heads = attention.shape[1]
            value = at_least_float32(forward.pooling["kv"].detach()).chunk(2, dim=-1)[1]
            value = torch.unflatten(value, -1, (num_heads, -1))  # [B, N, H, K]
            heads_gradient = _gradient_of(score, forward.pooling["heads"])
            heads_gradient = torch.unflatten(heads_gradient, -1, (num_heads, -1)).transpose(1, 2)
            gates = _differentiate_gates(attention, heads_gradient @ value.permute(0, 2, 3, 1))
            result[:, -gates.shape[1] :] = gates
    return result


def _differentiate_measured_mean(
    forward: Forward, score: Float[Tensor, " B"]
) -> Float[Tensor, "B N"]:
    """Gates of a mean as it was measured, in part perhaps: a class token beside it is read
    whole."""
    # a mean has equal weights on all patches
    num_prefix = forward.num_prefix_tokens
    patches = forward.pool_weights[:, num_prefix:]
    if (patches - patches[:, :1]).abs().max() > 1e-3 * patches.abs().max():
        name = type(forward.model).__name__
        raise ValueError(f"{name} pools by something else than a mean, so its gates are unknown")

    prefix = forward.pool_weights[:, :num_prefix]
    includes_prefix = torch.allclose(prefix, patches[:, :1], rtol=1e-3, atol=0)
    first = 0 if includes_prefix else num_prefix
    # without a token, the mean moves away from it by as much as the token differs from it
    pooled = at_least_float32(forward.tokens.detach())[:, first:]
    centred = pooled - pooled.mean(dim=1, keepdim=True)
    gradient = _gradient_of(score, forward.tokens)[:, first:]
    result = torch.zeros_like(at_least_float32(forward.pool_weights))
    result[:, first:] = (centred * gradient).sum(dim=-1)
    return result


def _gradient_of(score: Float[Tensor, " B"], tensor: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(score.sum(), tensor, retain_graph=True)
    return at_least_float32(gradient)
