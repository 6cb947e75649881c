"""A forward pass of an image classifier without attention between all patches (ResNet, ConvNeXt,
Swin), so that a vision transformer can be compared with what it replaces: the places of its last
feature map stand for the patches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.forward import (
    AttentionRecord,
    Forward,
    check_differentiable,
    evaluation_mode,
    run_forward,
)
from vit.explanation.capture.layers import SUPPORTED, has_attention
from vit.model.logits import compute_logits
from vit.model.model_info import unwrap_model
from vit.runtime.tensors import Images

FeatureMap = Float[Tensor, "B C rows columns"]


@torch.inference_mode(False)
def run_classifier(
    model: nn.Module,
    images: Images,
    *,
    gradients: bool = False,
    block_tokens: bool = False,
    verify: bool = True,
) -> Forward:
    """`run_forward` of any classifier: of one without attention, `.feature_map` is the last tensor
    on the way to the logits that has several places, `.grid` are these, and no layer is recorded.

    Args:
        model, images, gradients, block_tokens: as of `run_forward`.
        verify: of a model without attention, check on the first image that its classifier reads
            nothing but the feature map, and that its places lie on the image where a map shows them.

    Raises:
        ValueError: as `run_forward`; for a model without feature maps, and where a check fails.
    """
    if has_attention(model):
        return run_forward(
            model, images, gradients=gradients, block_tokens=block_tokens, verify=verify
        )
    check_differentiable(model)
    model = unwrap_model(model)
    # a leaf of its own, so that the caller's tensor gets no gradient
    images = images.detach().clone()
    with evaluation_mode(model):
        if verify:
            _check_feature_map(model, images[:1])
        images.requires_grad_(gradients)
        with torch.set_grad_enabled(gradients), _record_outputs(model) as outputs:
            logits = compute_logits(model, images)

    feature_map = outputs.last
    channels_first = order_channels(model, feature_map, images)
    tokens = channels_first.flatten(2).mT
    rows, columns = channels_first.shape[2:]
    return Forward(
        model=model,
        images=images,
        logits=logits,
        record=AttentionRecord([]),
        pool_weights=torch.full_like(tokens[..., 0].detach(), 1 / (rows * columns)),
        num_prefix_tokens=0,
        grid=(rows, columns),
        tokens=tokens,
        pooling={},
        feature_map=feature_map,
    )


def order_channels(model: nn.Module, features: Tensor | None, images: Images) -> FeatureMap:
    """A feature map with its channels first. Swin's come last: the sides that are in proportion to
    the images' are rows and columns. Raises ValueError where there are none."""
    name = type(model).__name__
    if features is None or features.ndim != 4 or len(features) != len(images):
        raise ValueError(
            f"{name} has no attention that can be read, and no feature map [images, channels, rows, "
            "columns] just before its classifier, which grad-cam and input-x-gradient are drawn on; "
            f"known: {SUPPORTED}, and convolutional and hierarchical models of timm and torchvision"
        )
    height, width = images.shape[-2:]
    first, second, third = features.shape[1:]
    if second * width == third * height:
        return features
    if first * width == second * height:
        return features.permute(0, 3, 1, 2)
    raise ValueError(
        f"a feature map of {first}×{second}×{third} of {name} doesn't lie evenly on images of "
        f"{height}×{width} pixels; take square images"
    )


class _Outputs:
    """What modules gave in one forward pass that has several places: feature maps, and tokens.

    Args:
        cut: the number of the output that passes on without its graph.
    """

    def __init__(self, cut: int | None = None) -> None:
        self.cut = cut
        self.count = 0
        self.last: Tensor | None = None

    def keep(self, module: nn.Module, args: object, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or output.ndim not in (3, 4):
            return None
        # pooled features have one place: two sides of 1, or one of tokens
        if sorted(output.shape[1:])[output.ndim - 3] == 1:
            return None
        self.count += 1
        self.last = output
        return output.detach() if self.count == self.cut else None


@contextmanager
def _record_outputs(model: nn.Module, cut: int | None = None) -> Iterator[_Outputs]:
    outputs = _Outputs(cut)
    handles = [module.register_forward_hook(outputs.keep) for module in model.modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@torch.enable_grad()
def _check_feature_map(model: nn.Module, image: Float[Tensor, "1 3 height width"]) -> None:
    """Raise ValueError where the classifier reads something else beside the last feature map, or
    where that lies otherwise on the image than a map of it is drawn."""
    name = type(model).__name__
    generator = torch.Generator().manual_seed(0)
    # noise, so that no part of the feature map is silent
    noise = torch.randn(image.shape, generator=generator).to(image)
    image = (image + noise).requires_grad_()
    with _record_outputs(model) as outputs:
        compute_logits(model, image)
    feature_map = order_channels(model, outputs.last, image)

    with _record_outputs(model, cut=outputs.count):
        logits = compute_logits(model, image)
    if logits.requires_grad:
        raise ValueError(
            f"the classifier of {name} reads something else beside its last feature map (test-time "
            "augmentation, or several encoders?), so a map of it would show a part of the model"
        )

    # where in the image the corners of the feature map look, as (y, x)
    projection = torch.randn(feature_map.shape[1], generator=generator).to(image)
    sides = [torch.arange(side).to(image) for side in image.shape[2:]]

    def find_centre(row: int, column: int) -> Tensor:
        value = feature_map[0, :, row, column] @ projection.to(feature_map.dtype)
        (gradient,) = torch.autograd.grad(value, image, retain_graph=True)
        weights = gradient[0].square().sum(dim=0)  # [height, width]
        weights = weights / weights.sum()
        return torch.stack([weights.sum(dim=1) @ sides[0], weights.sum(dim=0) @ sides[1]])

    corner = find_centre(0, 0)
    down = find_centre(-1, 0) - corner
    across = find_centre(0, -1) - corner
    rows, columns = feature_map.shape[2:]
    lies_down = rows == 1 or bool(down[0] > down[1].abs())
    lies_across = columns == 1 or bool(across[1] > across[0].abs())
    if not (lies_down and lies_across):
        raise ValueError(
            f"the last feature map of {name} lies on the image in another way than row by row (is "
            "the image mirrored or turned within the model?), so a map of it would be wrong"
        )
