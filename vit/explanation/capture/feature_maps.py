"""Find the feature map of an image classifier without attention between all patches (ResNet,
ConvNeXt, Swin), so that a vision transformer can be compared with it. The places of the last
feature map take the role of the patches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.layers import SUPPORTED
from vit.model.logits import compute_logits
from vit.runtime.tensors import Images

FeatureMap = Float[Tensor, "B C rows columns"]


def order_channels(model: nn.Module, features: Tensor | None, images: Images) -> FeatureMap:
    """Return a feature map with its channels first; Swin's are last. The two sides with the images'
    proportions are rows and columns. Raise ValueError if there are none."""
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
    """The last output of a module in one forward pass that has several places: a feature map or
    tokens.

    Args:
        cut: Number of the output that is passed on without its graph.
    """

    def __init__(self, cut: int | None = None) -> None:
        self.cut = cut
        self.count = 0
        self.last: Tensor | None = None

    def keep(self, module: nn.Module, args: object, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or output.ndim not in (3, 4):
            return None
        # pooled features have one place: two sides of 1, or one token
        if sorted(output.shape[1:])[output.ndim - 3] == 1:
            return None
        self.count += 1
        self.last = output
        return output.detach() if self.count == self.cut else None


@contextmanager
def record_outputs(model: nn.Module, cut: int | None = None) -> Iterator[_Outputs]:
    outputs = _Outputs(cut)
    handles = [module.register_forward_hook(outputs.keep) for module in model.modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@torch.enable_grad()
def check_feature_map(model: nn.Module, image: Float[Tensor, "1 3 height width"]) -> None:
    """Raise ValueError if the classifier also reads something other than the last feature map, or
    if its places aren't on the image where a map of it is drawn."""
    name = type(model).__name__
    generator = torch.Generator().manual_seed(0)
    # noise, so that no part of the feature map is zero
    noise = torch.randn(image.shape, generator=generator).to(image)
    image = (image + noise).requires_grad_()
    with record_outputs(model) as outputs:
        compute_logits(model, image)
    feature_map = order_channels(model, outputs.last, image)

    # with the graph cut at the feature map, logits that still have a gradient read something else
    with record_outputs(model, cut=outputs.count):
        logits = compute_logits(model, image)
    if logits.requires_grad:
        raise ValueError(
            f"the classifier of {name} reads something other than its last feature map (test-time "
            "augmentation, or several encoders?), so a map of it would show a part of the model"
        )

    # find the centre of the pixels that each corner of the feature map reads, as (y, x)
    # a random mixture of channels, because single channels may be zero at a place
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
    # a step down the feature map has to be a step down the image, more than to its side
    lies_down = rows == 1 or bool(down[0] > down[1].abs())
    lies_across = columns == 1 or bool(across[1] > across[0].abs())
    if not (lies_down and lies_across):
        raise ValueError(
            f"the last feature map of {name} isn't on the image row by row (is the image mirrored or "
            "turned within the model?), so a map of it would be wrong"
        )
