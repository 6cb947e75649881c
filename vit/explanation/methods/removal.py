"""The removal gradient: what the score would lose, to first order, if a token were left out of every layer.

Give each token j a gate g_j that multiplies it wherever it is read: in every softmax, A_ij = g_j e^{s_ij} / Σ_k g_k
e^{s_ik}, and in the mean of the pooling. With g in {0, 1} that is the model without the tokens of gate 0. The map is
∂f/∂g at g = 1. With G = ∂f/∂A of a layer and head,

    ∂f/∂g_j = Σ_layers Σ_heads Σ_i A_ij (G_ij - Σ_k A_ik G_ik) + the same of the pooling,

from one backward pass to the attention layers' results.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.explanation.capture.layers import AttentionLayer, at_least_float32
from vit.explanation.capture.pooling import tells_pooling
from vit.explanation.capture.readout import Forward, run_forward
from vit.explanation.capture.tokens import keep_tokens
from vit.explanation.methods.rollout import CHUNK_ELEMENTS, in_chunks


def compute_removal_gradient(forward: Forward, score: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """∂score/∂g of each token at g = 1, signed; score [B] is a logit or a probability of each image."""
    gradients = forward.record.heads_gradients(score, retain_graph=True)
    layers = zip(forward.record.layers, gradients, strict=True)
    return torch.stack([_of_layer(layer, gradient) for layer, gradient in layers]).sum(dim=0) + _of_pooling(
        forward, score
    )


def average_over_subsets(
    forward: Forward, compute: Callable[[Forward], Float[Tensor, "B kept"]], *, passes: int
) -> Float[Tensor, "B N"]:
    """The mean of `compute` over `passes` forward passes that keep a random half of the patches each; a patch's mean is
    over the passes that keep it. The halves are the same for every image, so that batches don't matter. Raises
    ValueError for a model whose tokens cannot be left out."""
    prefix, patches = forward.num_prefix_tokens, forward.grid[0] * forward.grid[1]
    images = forward.images.detach()
    total, count = images.new_zeros(len(images), prefix + patches), images.new_zeros(prefix + patches)
    for kept in _halves_on(images.device, patches, passes):
        with keep_tokens(forward.model, kept.expand(len(images), -1)):
            part = run_forward(forward.model, images, gradients=True, grid=forward.grid, verify=False)
        tokens = torch.cat([torch.arange(prefix, device=images.device), kept + prefix])
        total[:, tokens] += compute(part).detach()
        count[tokens] += 1
    return total / count.clamp_min(1)


def draw_halves(patches: int, count: int) -> Iterator[Int[Tensor, " kept"]]:
    """`count` random halves of the patches in reading order, always the same; each second one is the rest of the one
    before it."""
    generator = torch.Generator().manual_seed(0)
    for drawn in range(0, count, 2):
        first, second = torch.randperm(patches, generator=generator).tensor_split(2)
        yield from (first.sort().values, second.sort().values)[: count - drawn]


@lru_cache(maxsize=4)
def _halves_on(device: torch.device, patches: int, count: int) -> list[Tensor]:
    return [half.to(device) for half in draw_halves(patches, count)]


def _of_layer(layer: AttentionLayer, heads_gradient: Float[Tensor, "B Nq E"]) -> Float[Tensor, "B N"]:
    """A few query rows at a time: of 4,096 tokens the matrices of one layer would take gigabytes."""

    def gate(images: slice) -> Float[Tensor, "b N"]:
        query, key = layer.scaled_query_and_key(images)
        gradient, value = layer.gradient_and_value(heads_gradient, images)
        size = max(CHUNK_ELEMENTS // (layer.num_heads * layer.num_tokens), 1)
        parts = []
        for rows in (slice(start, start + size) for start in range(0, gradient.shape[2], size)):
            attention = layer.scores(query, key, images, rows).softmax(dim=-1)
            parts.append(_gate(attention, gradient[:, :, rows] @ value.transpose(-2, -1)))
        return sum(parts[1:], parts[0])

    return in_chunks(layer, gate)


def _gate(attention: Float[Tensor, "B H Nq N"], gradient: Float[Tensor, "B H Nq N"]) -> Float[Tensor, "B N"]:
    """Σ over heads and queries i of A_ij (G_ij - Σ_k A_ik G_ik)."""
    product = attention * gradient
    return (product - attention * product.sum(dim=-1, keepdim=True)).sum(dim=(1, 2))


def _of_pooling(forward: Forward, score: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """Gates of the pooling. 0 where a class token is read, which is read whole, and of a maximum, which has no first
    order. Raises ValueError for a pooling of another library that is no mean of tokens."""
    model, tokens, pooling = forward.model, forward.tokens, forward.pooling
    result = torch.zeros_like(at_least_float32(forward.readout))
    first = forward.num_prefix_tokens
    kind = model.global_pool if tells_pooling(model) else "mean"

    def differentiate(tensor: Tensor) -> Tensor:
        return at_least_float32(torch.autograd.grad(score.sum(), tensor, retain_graph=True)[0])

    values = at_least_float32(tokens.detach())
    if kind == "mean":  # as it was measured, in part perhaps: a class token beside it is read whole
        patches = forward.readout[:, first:]
        if (patches - patches[:, :1]).abs().max() > 1e-3 * patches.abs().max():
            raise ValueError(f"{type(model).__name__} pools by something else than a mean, so its gates are unknown")
        start = 0 if torch.allclose(forward.readout[:, :first], patches[:, :1], rtol=1e-3, atol=0) else first
        values = values[:, start:] - values[:, start:].mean(dim=1, keepdim=True)
        result[:, start:] = (values * differentiate(tokens)[:, start:]).sum(dim=-1)
    elif kind in ("avg", "avgmax"):
        start = 0 if getattr(model, "pool_include_prefix", False) else first
        values = values[:, start:]
        # the gradients of a mean's and of a maximum's tokens each sum to that of the pooled feature
        gradient = differentiate(tokens)[:, start:].sum(dim=1, keepdim=True) / values.shape[1]
        weight = 1.0 if kind == "avg" else 0.5
        result[:, start:] = weight * ((values - values.mean(dim=1, keepdim=True)) * gradient).sum(dim=-1)
    elif kind == "attention":  # one head, one query
        gradient = differentiate(pooling["pooled"])[:, None] @ values[:, first:].transpose(1, 2)
        result[:, first:] = _gate(forward.readout[:, None, None, first:], gradient[:, None])
    elif kind == "map":
        query, key = at_least_float32(pooling["q_norm"].detach()), at_least_float32(pooling["k_norm"].detach())
        attention = (query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)).softmax(dim=-1)  # [B, H, latents, N]
        value = torch.unflatten(at_least_float32(pooling["kv"].detach()).chunk(2, dim=-1)[1], -1, (query.shape[1], -1))
        gradient = torch.unflatten(differentiate(pooling["heads"]), -1, (query.shape[1], -1)).transpose(1, 2)
        of_tokens = _gate(attention, gradient @ value.permute(0, 2, 3, 1))
        result[:, -of_tokens.shape[1] :] = of_tokens
    return result
