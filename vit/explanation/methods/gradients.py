"""Maps of the evidence for a class: attention, tokens or pixels weighted by the gradient of the
logit f.

A is the attention and G = ∂f/∂A of a layer [H, N, N], u the weights of the pooling, ()⁺ the positive
part. All functions take a forward pass with gradients and one class of each image, and return the
relevance of each token [B, N], including prefix tokens.
"""

from collections.abc import Iterator
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit.explanation.capture.feature_maps import order_channels
from vit.explanation.capture.forward import Forward, differentiate
from vit.explanation.capture.pooling import TokenWeights
from vit.explanation.capture.watch import AttentionLayer
from vit.explanation.targets import Classes, Numbers
from vit.model.logits import at_least_float32


def compute_gae(forward: Forward, classes: Classes) -> TokenWeights:
    """Generic attention explanation (Chefer, Gur & Wolf, ICCV 2021, eq. 5 and 6).

    Ā = mean_h (G⊙A)⁺, R ← R + Ā·R from R = I, and the map is uᵀ(R − I). The paper reads the class
    token's row at the patches, where the identity is zero; for a mean over patches the identity
    would be nearly the whole map. Maps of models with other scales of logits can't be compared.
    """
    layers = forward.record.differentiate(forward.score(classes))

    def roll_up(images: slice) -> TokenWeights:
        row = at_least_float32(forward.pool_weights)[images]
        without_identity = torch.zeros_like(row)
        # from the last layer on, so that a row is multiplied by matrices
        for layer, heads_gradient in reversed(layers):
            moved = torch.zeros_like(row)
            for queries, attention, gradient in _iterate_rows(layer, heads_gradient, images):
                weighted = (attention * gradient).clamp_min(0).mean(dim=1)  # [b, queries, N]
                moved += (row[:, None, queries] @ weighted)[:, 0]
            row = row + moved
            without_identity += moved
        return without_identity

    return forward.record.layers[0].in_chunks(roll_up)


def _iterate_rows(
    layer: AttentionLayer, heads_gradient: Tensor, images: slice
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield query rows of a layer, A and G, [b, H, rows, N] each: all of them may take gigabytes."""
    gradient, value = layer.gradient_and_value(heads_gradient, images)
    for queries, attention in layer.attention_rows(images):
        yield queries, attention, gradient[:, :, queries] @ value.transpose(-2, -1)


def compute_difference_x_gradient(forward: Forward, classes: Classes) -> TokenWeights:
    """Input times gradient (Shrikumar et al. 2016), summed over each patch; the input is the
    difference from the image's mean colour, which painting a patch over removes. Signed; 0 for
    prefix tokens."""
    pixels = forward.images.detach()
    pixels = pixels - pixels.mean(dim=(-2, -1), keepdim=True)
    gradient = differentiate(forward.score(classes), forward.images)
    product = (pixels * gradient).sum(dim=1, keepdim=True)  # [B, 1, height, width]

    # a mean times the number of pixels is a sum
    patches = F.adaptive_avg_pool2d(product, forward.grid)
    patches = patches * (product[0].numel() / (forward.grid[0] * forward.grid[1]))
    prefix = product.new_zeros(len(product), forward.num_prefix_tokens)
    return torch.cat([prefix, patches.flatten(1)], dim=1)


def compute_fullgrad_plus(forward: Forward, classes: Classes) -> TokenWeights:
    """FullGrad+ without biases (Mehri et al. 2025, section 4): Σ_l Σ_d x ∂f/∂x for the tokens x
    before each block l. Signed. With `LibraGradients`, the sum over the tokens of each block is the
    logit without later biases."""
    inputs = [layer.block_input for layer in forward.record.layers if layer.block_input is not None]
    # one backward pass differentiates by the inputs of all blocks
    gradients = torch.autograd.grad(forward.score(classes).sum(), inputs, retain_graph=True)
    products = [
        (at_least_float32(tokens.detach()) * at_least_float32(gradient)).sum(dim=-1)
        for tokens, gradient in zip(inputs, gradients, strict=True)
    ]
    return torch.stack(products).sum(dim=0)


def compute_grad_cam(forward: Forward, classes: Classes) -> TokenWeights:
    """Grad-CAM (Selvaraju et al. 2017, eq. 1 and 2): max(Σ_k α_k A_k, 0) for the last feature map A
    that the classifier reads, where α_k is the mean of ∂f/∂A_k over its positions."""
    assert forward.feature_map is not None
    gradient = differentiate(forward.score(classes), forward.feature_map)
    ordered = order_channels(gradient, forward.images)
    assert ordered is not None
    weights = ordered.mean(dim=(2, 3))
    # [B, N, C] · [B, C, 1]
    relevance = at_least_float32(forward.tokens.detach()) @ weights[..., None]
    return relevance[..., 0].clamp_min(0)


def compute_removal_map(forward: Forward, classes: Classes) -> TokenWeights:
    """The removal gradient, signed: the loss of the probability, to first order, if a token is left
    out of every layer.

    A gate g_j multiplies each token j wherever it is read: in every softmax,
    A_ij = g_j e^{s_ij} / Σ_k g_k e^{s_ik}, and in the mean of the pooling. With g in {0, 1} that is
    the model without the tokens of gate 0. The map is ∂f/∂g at g = 1,

        ∂f/∂g_j = Σ_layers Σ_heads Σ_i A_ij (G_ij - Σ_k A_ik G_ik) + the same of the pooling.

    f is the probability: a logit may rise together with those of all classes. Raises ValueError if
    the model's pooling isn't a mean of tokens.
    """
    score = forward.value(classes)
    layer_gates = [
        _differentiate_layer(layer, heads_gradient)
        for layer, heads_gradient in forward.record.differentiate(score)
    ]
    return torch.stack(layer_gates).sum(dim=0) + _differentiate_pooling(forward, score)


def _differentiate_layer(layer: AttentionLayer, heads_gradient: Tensor) -> TokenWeights:
    """Differentiate by the gates of one layer."""

    def differentiate_images(images: slice) -> Float[Tensor, "b N"]:
        parts = []
        for _, attention, gradient in _iterate_rows(layer, heads_gradient, images):
            product = attention * gradient
            # without a token, the others share its weight
            shared = attention * product.sum(dim=-1, keepdim=True)
            parts.append((product - shared).sum(dim=(1, 2)))
        return reduce(torch.add, parts)

    return layer.in_chunks(differentiate_images)


def _differentiate_pooling(forward: Forward, score: Numbers) -> TokenWeights:
    """Differentiate by the gates of the pooling: 0 for a class token and for a maximum, which has no
    first order."""
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
    # once, so that no later batch waits for the numbers
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
    """Find the first token of a mean, which may be pooled together with a class token. Raise
    ValueError if the pooling is no mean."""
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
