"""Maps of the evidence for a class: attention, tokens or pixels weighted by the gradient of the
logit.

Notation: A is the attention and G = ∂f/∂A of a layer [H, N, N], f the class's logit before the
softmax, u the weights of the pooling, ()⁺ the positive part. All functions take a forward pass with
gradients and one class of each image, and return the relevance of each token [B, N], including
prefix tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from vit.explanation.capture.feature_maps import order_channels
from vit.explanation.capture.forward import Forward, differentiate
from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.capture.pooling import TokenWeights
from vit.explanation.targets import Classes
from vit.model.logits import at_least_float32


def compute_gae(forward: Forward, classes: Classes) -> TokenWeights:
    """Generic attention explanation (Chefer, Gur & Wolf, ICCV 2021, eq. 5 and 6).

    Ā = mean_h (G⊙A)⁺, R ← R + Ā·R from R = I, and the map is uᵀ(R − I). The paper reads the class
    token's row at the patches, where the identity is zero; for a mean over patches the identity,
    the tokens' own share, would be nearly the whole map.

    Ā grows with the logit's scale, so maps of models with other scales can't be compared.
    """
    layers = forward.record.differentiate(forward.score(classes))

    def roll_up(images: slice) -> TokenWeights:
        row = at_least_float32(forward.pool_weights)[images]
        without_identity = torch.zeros_like(row)
        # from the last layer on, so that a row is multiplied by matrices, and no matrices by each
        # other
        for layer, heads_gradient in reversed(layers):
            moved = torch.zeros_like(row)
            for queries, attention, gradient in iterate_rows(layer, heads_gradient, images):
                weighted = (attention * gradient).clamp_min(0).mean(dim=1)  # [b, queries, N]
                moved += (row[:, None, queries] @ weighted)[:, 0]
            row = row + moved
            without_identity += moved
        return without_identity

    return forward.record.layers[0].in_chunks(roll_up)


def iterate_rows(
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
    before each block l. Signed. In a pass within `LibraGradients`, the sum over the tokens of each
    block is the logit without later biases."""
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
    that the classifier reads, where α_k is the mean of ∂f/∂A_k over its places."""
    features = forward.feature_map
    assert features is not None
    gradient = differentiate(forward.score(classes), features)
    # the places of the gradient are averaged, its channels are kept
    places = order_channels(gradient, forward.images)
    assert places is not None
    weights = places.mean(dim=(2, 3))
    # [B, N, C] · [B, C, 1]
    relevance = at_least_float32(forward.tokens.detach()) @ weights[..., None]
    return relevance[..., 0].clamp_min(0)
