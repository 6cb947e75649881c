"""Colours of a batch: jitter, and the operations of RandAugment (Cubuk et al. 2020).

The operations and the ranges of their magnitudes are torchvision's.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.data.random import StatelessRandom
from vit.runtime.tensors import Images

UInt8Images = UInt8[Tensor, "B 3 H W"]

# RandAugment's operations
OPERATIONS = (
    "identity",
    "shear x",
    "shear y",
    "translate x",
    "translate y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)


class Operation(NamedTuple):
    """One of `OPERATIONS`, the samples of a batch that get it, and its strength from -1 to 1."""

    name: str
    samples: Int64[Tensor, " n"]
    strength: float


def jitter_colors(images: Images, factors: Float[Tensor, "3 B"]) -> Images:
    """Change brightness, contrast and saturation, in this order, as torchvision's ColorJitter does.

    At a factor of 0 the image is black, its mean luma, or grey; at 1 it stays as it is.
    """
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind()
    images = (images * brightness).clamp(0, 255)
    mean = to_grey(images).mean(dim=(2, 3), keepdim=True)
    images = (mean + contrast * (images - mean)).clamp(0, 255)
    grey = to_grey(images)
    return (grey + saturation * (images - grey)).clamp(0, 255)


def to_grey(images: Images) -> Float[Tensor, "B 1 H W"]:
    """Compute luma by ITU-R 601-2, as torchvision does."""
    return torch.einsum("bchw,c->bhw", images, _luma_weights(images.device, images.dtype))[:, None]


# cached, because each call would copy them to the device
@lru_cache
def _luma_weights(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor((0.2989, 0.587, 0.114), device=device, dtype=dtype)


def sample_operations(rng: StatelessRandom, stream: str, magnitude: float) -> list[Operation]:
    """Sample an operation of RandAugment for each sample; `magnitude` is 0 to 10."""
    chosen = rng.integers(stream, below=len(OPERATIONS))
    is_negative = rng.bits(f"{stream} sign") < 0
    operations = []
    # samples are listed on the host, so that no list is read back from the device
    for strength in (magnitude / 10, -magnitude / 10):
        for number, name in enumerate(OPERATIONS):
            is_chosen = (chosen == number) & (is_negative == (strength < 0))
            samples = torch.nonzero(is_chosen).flatten()
            if len(samples):
                operations.append(Operation(name, samples, strength))
    return operations


def apply_operations(images: UInt8Images, operations: Sequence[Operation]) -> UInt8Images:
    """Apply the operations; their samples are on the images' device."""
    # the list has one round after another; in each, a sample gets one operation
    result = images.clone()
    for name, samples, strength in operations:
        result[samples] = _apply_operation(result[samples], name, strength)
    return result


def _apply_operation(images: UInt8Images, name: str, strength: float) -> UInt8Images:
    # takes long to import
    from torchvision.transforms.v2 import functional

    height, width = images.shape[2:]
    # a factor of 1 leaves the image as it is
    factor = 1 + 0.9 * strength
    # a shear keeps the upper left corner in place
    shear = 0.3 * strength
    # whole pixels, as in torchvision
    right = float(int(150 / 331 * width * strength))
    down = float(int(150 / 331 * height * strength))
    match name:
        case "shear x":
            images = _affine(images, x_weights=(1.0, shear, shear * height / 2))
        case "shear y":
            images = _affine(images, y_weights=(shear, 1.0, shear * width / 2))
        case "translate x":
            images = _affine(images, x_weights=(1.0, 0.0, -right))
        case "translate y":
            images = _affine(images, y_weights=(0.0, 1.0, -down))
        case "rotate":
            cos = math.cos(math.radians(30 * strength))
            sin = math.sin(math.radians(30 * strength))
            images = _affine(images, x_weights=(cos, -sin, 0.0), y_weights=(sin, cos, 0.0))
        case "brightness":
            images = functional.adjust_brightness(images, factor)
        case "color":
            images = functional.adjust_saturation(images, factor)
        case "contrast":
            images = functional.adjust_contrast(images, factor)
        case "sharpness":
            images = _adjust_sharpness(images, factor)
        case "posterize":
            images = functional.posterize(images, 8 - round(4 * abs(strength)))
        case "solarize":
            images = functional.solarize(images, 255 * (1 - abs(strength)))
        case "autocontrast":
            images = functional.autocontrast(images)
        case "equalize":
            images = functional.equalize(images)
    return images


# torchvision's `affine` and `adjust_sharpness` copy matrices to the device and wait, ours don't
def _affine(
    images: UInt8Images,
    *,
    x_weights: tuple[float, float, float] = (1.0, 0.0, 0.0),
    y_weights: tuple[float, float, float] = (0.0, 1.0, 0.0),
) -> UInt8Images:
    """Transform images: the pixel at (x, y), counted from the centre, is read at (x, y, 1) ·
    `x_weights` and (x, y, 1) · `y_weights`, bilinear."""
    height, width = images.shape[2:]
    y = torch.arange(height, device=images.device)[:, None] - (height - 1) / 2
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    sources = [weights[0] * x + weights[1] * y + weights[2] for weights in (x_weights, y_weights)]
    # the axes of `grid_sample` run from -1 to 1
    grid = torch.stack([sources[0] * 2 / width, sources[1] * 2 / height], dim=-1)
    grid = grid.expand(len(images), -1, -1, -1)
    return F.grid_sample(images.float(), grid, align_corners=False).round().to(torch.uint8)


def _adjust_sharpness(images: UInt8Images, factor: float) -> UInt8Images:
    """Blend with Pillow's SMOOTH filter (weights 1 around 5), which 0 gives; the edge stays."""
    blurred = images.float()
    inside = blurred[:, :, 1:-1, 1:-1]
    inside.copy_(((9 * F.avg_pool2d(blurred, 3, 1) + 4 * inside) / 13).round())
    return (blurred + factor * (images - blurred)).clamp(0, 255).to(torch.uint8)
