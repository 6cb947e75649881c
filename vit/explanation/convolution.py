"""Maps of image classifiers without attention between all patches (ResNet, ConvNeXt, Swin), so that
a vision transformer can be compared with what it replaces.

- grad-cam: Grad-CAM (Selvaraju et al. 2017, eq. 1 and 2), max(Σ_k α_k A_k, 0), of the last feature
  map A of the model, where α_k is the mean of ∂f/∂A_k over its places.
- input-x-gradient: x·∂f/∂x of the normalised pixels (Shrikumar et al. 2016), summed over the part
  of the image that each place of that feature map stands for. Signed.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit.bundle import Bundle
from vit.data.images import ImageInputs, list_images
from vit.explanation.items import items_from_images
from vit.explanation.targets import build_target, find_output_kind
from vit.model.logits import compute_logits
from vit.options import TargetLike
from vit.runtime.arguments import check_choice
from vit.runtime.device import copy_to_device

METHODS = ("grad-cam", "input-x-gradient")


@torch.inference_mode(False)
def explain_without_attention(
    bundle: Bundle,
    images: ImageInputs,
    method: str = "grad-cam",
    *,
    target: TargetLike = "auto",
    batch_size: int = 16,
) -> Float[Tensor, "n rows columns"]:
    """Maps of a model whose attention can't be read, or that has none.

    Args:
        bundle: the model, of timm, torchvision or Hugging Face, with its preprocessing.
        images: paths, folders, PIL images, uint8 arrays [H, W, 3], or one of them.
        method: "grad-cam" or "input-x-gradient", see above.
        target: what to explain: "auto" (the predicted class), or one class as of `vit.explain`.
        batch_size: images at a time.

    Returns:
        The maps [images, rows, columns] on the grid of the last feature map.

    Raises:
        ValueError: for another method, an unknown class, and a model without feature maps.

    Example:
        >>> bundle = vit.load_bundle("timm:resnet50")
        >>> explain_without_attention(bundle, "photo.png").shape  # [1, 7, 7]
    """
    check_choice(method, METHODS, name="method")
    device = next(bundle.model.parameters()).device
    kind = find_output_kind(bundle.model, bundle.class_names)
    score_of, choose_targets = build_target(target, bundle.class_names, kind)
    items = items_from_images(list_images(images))
    maps = []
    for start in range(0, len(items), batch_size):
        photos = [item.read()[0] for item in items[start : start + batch_size]]
        pixels = np.stack([bundle.preprocess.to_uint8(photo) for photo in photos])
        batch = bundle.preprocess.normalize(copy_to_device(torch.from_numpy(pixels), device))
        batch.requires_grad_()
        with torch.enable_grad():
            logits, features = _run(bundle.model, batch)
            classes = choose_targets(logits.detach())[:, 0]
            score = score_of.score(logits, classes).sum()
        wanted = features if method == "grad-cam" else batch
        (gradient,) = torch.autograd.grad(score, wanted)
        with torch.no_grad():
            shape = batch.shape[-2:]
            feature_map = _channels_first(features, shape)
            if method == "grad-cam":
                weights = _channels_first(gradient, shape).mean(dim=(2, 3), keepdim=True)
                relevance = (weights * feature_map).sum(dim=1).clamp_min(0)
            else:
                grid = (feature_map.shape[2], feature_map.shape[3])
                product = (batch * gradient).sum(dim=1, keepdim=True)
                pixels_per_place = product[0].numel() / (grid[0] * grid[1])
                relevance = F.adaptive_avg_pool2d(product, grid)[:, 0] * pixels_per_place
        maps.append(relevance.cpu())
    return torch.cat(maps)


def _run(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the last tensor on the way to them that has more than one place."""
    feature_maps: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output.requires_grad:
            sides = sorted(output.shape[1:])
            # pooled features have two sides of one place
            if sides[1] > 1:
                feature_maps[:] = [output]

    handles = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        logits = compute_logits(model, images)
    finally:
        for handle in handles:
            handle.remove()
    if not feature_maps:
        raise ValueError(
            f"{type(model).__name__} has no feature map [images, channels, rows, columns], which "
            "grad-cam and input-x-gradient are drawn on; vit.explain takes vision transformers"
        )
    return logits, feature_maps[0]


def _channels_first(features: Tensor, image_shape: torch.Size) -> Float[Tensor, "B C rows columns"]:
    """Swin's channels come last: the sides that are in proportion to the image's are rows and
    columns."""
    height, width = image_shape
    first, second, third = features.shape[1:]
    if second * width == third * height:
        return features
    if first * width == second * height:
        return features.permute(0, 3, 1, 2)
    raise ValueError(
        f"a feature map of {first}×{second}×{third} doesn't lie evenly on images of "
        f"{height}×{width} pixels"
    )
