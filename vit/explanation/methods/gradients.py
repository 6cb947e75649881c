"""Maps that ask which patches speak for a class: attention weighted by the gradient of that class's logit.

Notation: A attention and G = ∂f/∂A of a layer [H, N, N], f the class's logit before the softmax, u the readout vector,
()⁺ the positive part. Everything is for a whole batch; N×N matrices exist for a few images at a time.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.explanation.capture.layers import AttentionLayer, at_least_float32
from vit.explanation.capture.readout import Forward, classify_token
from vit.explanation.methods.rollout import in_chunks, normalise_rows, propagate, through_matrices


def compute_gae(
    forward: Forward, score: Float[Tensor, " B"], *, start_layer: int = 0, scale_free: bool = False
) -> Float[Tensor, "B N"]:
    """Generic attention explanation (Chefer, Gur & Wolf, ICCV 2021, eq. 5 and 6): Ā = mean_h (G⊙A)⁺, R ← R + Ā·R from
    R = I, read as uᵀR.

    Ā grows with the logit's scale, and so does the weight of Ā against the identity: maps of models whose logits differ
    in scale don't compare. `scale_free` makes the rows of Ā sum to one.
    """

    def fuse(weighted: Tensor) -> Tensor:
        mixing = weighted.clamp_min(0).mean(dim=1)
        return normalise_rows(mixing) if scale_free else mixing

    mix = _through_weighted_attention(forward, score, fuse)
    return propagate(forward.readout, forward.record.layers[start_layer:], mix, residual=1.0, attention_weight=1.0)


def compute_gradient_rollout(
    forward: Forward, score: Float[Tensor, " B"], *, residual: float = 0.5, start_layer: int = 0
) -> Float[Tensor, "B N"]:
    """Rollout of (mean_h G⊙A)⁺ with rows made to sum to one: vit-explain's idea (2020) with its pairing of gradients
    and layers, normalised axis and residual weight put right."""
    mix = _through_weighted_attention(forward, score, lambda both: normalise_rows(both.mean(dim=1).clamp_min(0)))
    return propagate(forward.readout, forward.record.layers[start_layer:], mix, residual=residual)


def compute_attention_gradcam(forward: Forward, score: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """Grad-CAM on the last layer's attention (Chefer et al. 2021, baseline): each head's row uᵀA weighted by the mean
    of uᵀG over the patches, averaged over heads, positive part."""
    layer, heads_gradient = forward.record.layers[-1], forward.record.heads_gradients(score, retain_graph=True)[-1]

    def weigh(images: slice) -> Tensor:
        readout = at_least_float32(forward.readout[images])[:, None, None]  # [b, 1, 1, N]
        attention = (readout @ layer.attention(images))[:, :, 0]  # [b, H, N]
        gradient = (readout @ layer.attention_gradient(heads_gradient, images))[:, :, 0]
        weight = gradient[..., forward.num_prefix_tokens :].mean(dim=-1, keepdim=True)
        return (attention * weight).mean(dim=1).clamp_min(0)

    return in_chunks(layer, weigh)


def compute_legrad(forward: Forward, classes: Int[Tensor, " B"], *, start_layer: int = 0) -> Float[Tensor, "B N"]:
    """LeGrad (Bousselham et al. 2024, eq. 4 to 8): the score s of every layer is the classifier on the mean of the
    tokens leaving it; the map is (∂s/∂A)⁺ averaged over heads, queries and layers."""
    layers = forward.record.layers[start_layer:]
    total = torch.zeros_like(at_least_float32(forward.readout))
    for layer in layers:
        assert layer.block_tokens is not None
        assert layer.heads is not None
        logits = classify_token(forward, layer.block_tokens.mean(dim=1))
        score = logits.gather(1, classes[:, None]).sum()
        (heads_gradient,) = torch.autograd.grad(score, layer.heads, retain_graph=True)
        gradient = partial(layer.attention_gradient, heads_gradient)
        total += in_chunks(layer, lambda images: gradient(images).clamp_min(0).mean(dim=(1, 2)))  # noqa: B023
    return total / len(layers)


def compute_cdam(forward: Forward, score: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """Class-discriminative attention map (Brocki, Binda & Chung 2023): Σ_d T ∂f/∂T for the tokens T that enter the last
    attention. Signed."""
    tokens = forward.record.layers[-1].tokens
    assert tokens is not None
    (gradient,) = torch.autograd.grad(score.sum(), tokens, retain_graph=True)
    return (at_least_float32(tokens.detach()) * at_least_float32(gradient)).sum(dim=-1)


def compute_input_x_gradient(
    forward: Forward, score: Float[Tensor, " B"], *, from_mean: bool = False
) -> Float[Tensor, "B N"]:
    """x·∂f/∂x of the normalised pixels (Shrikumar et al. 2016), summed over each patch. Signed; 0 for prefix tokens.
    `from_mean` takes each pixel's difference to the image's mean colour for x: what painting a patch over removes."""
    (gradient,) = torch.autograd.grad(score.sum(), forward.images, retain_graph=True)
    pixels = forward.images.detach()
    pixels = pixels - pixels.mean(dim=(-2, -1), keepdim=True) if from_mean else pixels
    product = at_least_float32(pixels * gradient).sum(dim=1, keepdim=True)  # [B, 1, h, w]
    rows, columns = forward.grid
    height, width = product.shape[-2] // rows, product.shape[-1] // columns
    patches = torch.nn.functional.avg_pool2d(product, (height, width)) * (height * width)
    prefix = product.new_zeros(len(product), forward.num_prefix_tokens)
    return torch.cat([prefix, patches.flatten(1)], dim=1)


def compute_fullgrad_plus(forward: Forward, score: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """FullGrad+ without biases (Mehri et al. 2025, section 4): Σ_l Σ_d x ∂f/∂x of the tokens x that enter each block l.
    Signed. Of a pass within `LibraGradients`, each block's sum over the tokens is the logit but for later biases."""
    inputs = [layer.block_input for layer in forward.record.layers if layer.block_input is not None]
    gradients = torch.autograd.grad(score.sum(), inputs, retain_graph=True)
    products = [
        (at_least_float32(tokens.detach()) * at_least_float32(gradient)).sum(dim=-1)
        for tokens, gradient in zip(inputs, gradients, strict=True)
    ]
    return torch.stack(products).sum(dim=0)


def _through_weighted_attention(
    forward: Forward, score: Float[Tensor, " B"], fuse: Callable[[Float[Tensor, "b H N N"]], Float[Tensor, "b N N"]]
) -> Callable[[AttentionLayer, Float[Tensor, "B N"]], Float[Tensor, "B N"]]:
    """r·fuse(G⊙A) for `propagate`. A layer's gradient is found by the layer, never by its position."""
    gradients = forward.record.heads_gradients(score, retain_graph=True)
    of_layer = dict(zip([layer.name for layer in forward.record.layers], gradients, strict=True))
    return through_matrices(
        lambda layer, images: fuse(layer.attention(images) * layer.attention_gradient(of_layer[layer.name], images))
    )
