"""Augmentation of a batch: sample parameters for each sample; apply them to the batch.

Parameters are sampled on the host, a few hundred numbers, and go to the device in one copy with the
indices. So the host knows which operation falls on which sample, and nothing waits for the device.

Cutout: DeVries & Taylor 2017; random erasing: Zhong et al. 2020; mixup: Zhang et al. 2018; cutmix:
Yun et al. 2019. With both of the last two, each sample gets one of them at random. RandAugment:
Cubuk et al. 2020; its operations and the ranges of their magnitudes are torchvision's.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.config import AugmentConfig
from vit.data.images import Preprocess
from vit.data.random import StatelessRandom
from vit.runtime.tensors import Images

UInt8Images = UInt8[Tensor, "B 3 H W"]
Factors = Float[Tensor, " B"]
# left, top, right, bottom
Boxes = Int64[Tensor, "B 4"]


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
    """One of `OPERATIONS`, and the samples of a batch that get it."""

    name: str
    samples: Int64[Tensor, " n"]
    # -1 to 1
    strength: float


class AugmentParams(NamedTuple):
    """What was sampled for each sample of a batch; None and () where that augmentation is off."""

    is_flipped: Bool[Tensor, " B"]
    # down and right, in pixels
    shifts: Int64[Tensor, "2 B"]
    # of resized crops, in place of shifts
    crop_boxes: Float[Tensor, "B 4"] | None = None
    # brightness, contrast, saturation
    color_factors: Float[Tensor, "3 B"] | None = None
    # RandAugment's, in this order
    operations: tuple[Operation, ...] = ()
    # cutout's and random erasing's
    erased_boxes: tuple[Boxes, ...] = ()
    # the weight of each sample's own image, and the boxes that are its neighbour's
    mix: tuple[Factors, Boxes] | None = None


def sample_params(
    rng: StatelessRandom,
    *,
    augment: AugmentConfig,
    stored_size: tuple[int, int],
    size: tuple[int, int],
    config_height: int,
    mix: bool,
) -> AugmentParams:
    """All random numbers of a batch, on the host.

    Args:
        rng: the random numbers of the batch's samples; with the sizes, they alone decide.
        augment: which augmentations, and how strong.
        stored_size: height and width of the images before they are cropped.
        size: height and width of the images that the model gets.
        config_height: the image height that the pixels in `augment` are meant for.
        mix: whether mixup and cutmix are applied, where `augment` has them.
    """
    crop_boxes = None
    if augment.resized_crop_scale is not None:
        crop_boxes = _sample_boxes(
            rng, "crop", stored_size, scale=augment.resized_crop_scale, aspect=(3 / 4, 4 / 3)
        ).float()

    # without padding they are 0, and the crop is the centre
    padding = augment.crop_padding
    shifts = [rng.integers(f"crop {axis}", below=2 * padding + 1) - padding for axis in "yx"]

    color_factors = None
    if augment.color_jitter:
        streams = ("brightness", "contrast", "saturation")
        deviations = [2 * rng.uniform(stream) - 1 for stream in streams]
        color_factors = (1 + augment.color_jitter * torch.stack(deviations)).clamp(min=0)

    operations: list[Operation] = []
    if augment.rand_augment is not None:
        count, magnitude = augment.rand_augment
        for number in range(count):
            operations += sample_operations(rng, f"rand augment {number}", magnitude)

    # the configured side is for full-size images; a schedule may train on smaller ones
    erased_boxes = []
    if augment.cutout:
        side = round(augment.cutout * size[0] / config_height)
        sides = torch.full_like(shifts[0], side)
        erased_boxes.append(_sample_centred_boxes(rng, "cutout", size, sides, sides))
    if augment.re_prob:
        boxes = _sample_boxes(rng, "erasing", size, scale=(0.02, 0.33), aspect=(0.3, 3.3))
        # samples that are not chosen get an empty box
        is_chosen = rng.uniform("erasing") < augment.re_prob
        erased_boxes.append(boxes.long() * is_chosen[:, None])

    return AugmentParams(
        is_flipped=sample_flips(rng, augment.flip),
        shifts=torch.stack(shifts),
        crop_boxes=crop_boxes,
        color_factors=color_factors,
        operations=tuple(operations),
        erased_boxes=tuple(erased_boxes),
        mix=_sample_mix(rng, size, augment) if mix and augment.mixes else None,
    )


def crop_and_flip(
    images: UInt8[Tensor, "n S T 3"],
    index: Int64[Tensor, " B"],
    params: AugmentParams,
    *,
    size: tuple[int, int],
) -> Tensor:
    """Crop and flip images[index]; everything is on one device.

    Returns:
        uint8 [B, H, W, 3], or after a resized crop float [B, 3, H, W] of values 0..255.
    """
    if params.crop_boxes is not None:
        cropped = resized_crop(images.index_select(0, index), params.crop_boxes, size)
        return torch.where(params.is_flipped[:, None, None, None], cropped.flip(3), cropped)

    # crop, shift and flip are one choice of rows and columns, so pixels are read once
    down, right = params.shifts
    rows = _find_lines(down, stored=images.shape[1], cropped=size[0])
    columns = _find_lines(right, stored=images.shape[2], cropped=size[1])
    columns = torch.where(params.is_flipped[:, None], columns.flip(1), columns)
    pixel_rows = index[:, None] * images.shape[1] + rows
    pixels = pixel_rows[:, :, None] * images.shape[2] + columns[:, None, :]  # [B, H, W]
    # index_select of 3-byte rows took a sixth of the time of images[index, rows, columns] on a CPU
    return images.view(-1, 3).index_select(0, pixels.flatten()).view(*pixels.shape, 3)


def _find_lines(
    shifts: Int64[Tensor, " B"], *, stored: int, cropped: int
) -> Int64[Tensor, "B cropped"]:
    """The rows or columns of the centre crop, moved by `shifts`; beyond the edge it is reflected."""
    lines = (stored - cropped) // 2 + torch.arange(cropped, device=shifts.device)
    lines = lines + shifts[:, None]
    period = max(2 * (stored - 1), 1)
    # folded back in, without repeating the edge
    return torch.minimum(lines % period, period - lines % period)


def color_and_normalize(
    pixels: Tensor, params: AugmentParams, *, preprocess: Preprocess, size: tuple[int, int]
) -> Float[Tensor, "B 3 H W"]:
    """Scale what `crop_and_flip` gave to `size`, change its colours, normalise and erase."""
    if pixels.dtype == torch.uint8:
        pixels = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)

    if params.color_factors is not None:
        pixels = jitter_colors(pixels, params.color_factors)
    if params.operations:
        pixels = apply_operations(pixels.round().to(torch.uint8), params.operations).float()

    # in place: the pixels are a copy of the stored ones by now
    scale, shift = preprocess.scale_and_shift(pixels.device)
    images = pixels.mul_(scale.view(3, 1, 1)).add_(shift.view(3, 1, 1))
    # 0 is the mean colour once pixels are normalised
    for boxes in params.erased_boxes:
        images *= outside_boxes(boxes, size)
    return images


def mix_batch(
    images: Images, labels: Int64[Tensor, " B"], params: AugmentParams, *, num_classes: int
) -> tuple[Images, Float[Tensor, "B C"]]:
    """Mixup or cutmix of each sample with its neighbour, and the class weights of the mixtures.

    The last sample of an odd batch stays as it is.
    """
    assert params.mix is not None
    own_weight, boxes = params.mix
    count, _, height, width = images.shape
    # 0 ↔ 1, 2 ↔ 3, …
    partner = (torch.arange(count, device=images.device) ^ 1).clamp(max=count - 1)

    is_own = outside_boxes(boxes, (height, width))
    pixel_weight = own_weight[:, None, None, None] * is_own  # [B, 1, H, W]
    mixed = torch.lerp(images[partner], images, pixel_weight)

    # `F.one_hot` would look at the labels on the host
    classes = torch.zeros(count, num_classes, device=labels.device).scatter_(1, labels[:, None], 1)
    # of cutmix, the part of the pixels; of mixup, the weight itself
    weight = pixel_weight.mean(dim=(1, 2, 3))[:, None]
    return mixed, weight * classes + (1 - weight) * classes[partner]


def sample_operations(rng: StatelessRandom, stream: str, magnitude: float) -> list[Operation]:
    """One operation of RandAugment for each sample; `magnitude` is 0 to 10."""
    chosen = rng.integers(stream, below=len(OPERATIONS))
    is_negative = rng.bits(f"{stream} sign") < 0
    operations = []
    # samples are listed on the host: no list is ever read back from the device
    for strength in (magnitude / 10, -magnitude / 10):
        for number, name in enumerate(OPERATIONS):
            is_chosen = (chosen == number) & (is_negative == (strength < 0))
            samples = torch.nonzero(is_chosen).flatten()
            if len(samples):
                operations.append(Operation(name, samples, strength))
    return operations


def apply_operations(images: UInt8Images, operations: Sequence[Operation]) -> UInt8Images:
    """The images after the operations, whose samples are on the images' device."""
    # a sample gets one operation of each round, and rounds follow one another in the list
    result = images.clone()
    for name, samples, strength in operations:
        result[samples] = _apply_operation(result[samples], name, strength)
    return result


def _apply_operation(images: UInt8Images, name: str, strength: float) -> UInt8Images:
    # takes long to import
    from torchvision.transforms.v2 import functional

    height, width = images.shape[2:]
    # 1 leaves the image as it is
    factor = 1 + 0.9 * strength
    # shears leave the upper left corner where it is
    shear = 0.3 * strength
    # whole pixels, as torchvision's
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


# torchvision's `affine` and `adjust_sharpness` would copy matrices to the device, and wait
def _affine(
    images: UInt8Images,
    *,
    x_weights: tuple[float, float, float] = (1.0, 0.0, 0.0),
    y_weights: tuple[float, float, float] = (0.0, 1.0, 0.0),
) -> UInt8Images:
    """What lies at (x, y) of the result, in pixels from the centre, is taken from (x, y, 1) ·
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
    """Blurred at 0 by Pillow's SMOOTH filter, 1 around 5, of 13; the outermost pixels stay."""
    blurred = images.float()
    inside = blurred[:, :, 1:-1, 1:-1]
    inside.copy_(((9 * F.avg_pool2d(blurred, 3, 1) + 4 * inside) / 13).round())
    return (blurred + factor * (images - blurred)).clamp(0, 255).to(torch.uint8)


def sample_flips(rng: StatelessRandom, flip: str) -> Bool[Tensor, " B"]:
    """Alternating (Jordan 2024): at random in epoch 0, the other way round every epoch after it."""
    if flip == "random":
        return rng.bits("flip") < 0
    if flip == "alternating":
        is_flipped_first = replace(rng, epoch=0).bits("flip") < 0
        return is_flipped_first ^ bool(rng.epoch % 2)
    return torch.zeros(len(rng.sample_ids), dtype=torch.bool)


def _sample_boxes(
    rng: StatelessRandom,
    stream: str,
    size: tuple[int, int],
    *,
    scale: tuple[float, float],
    aspect: tuple[float, float],
) -> Float[Tensor, "B 4"]:
    """Boxes anywhere inside the image, of a fraction of its area within `scale` and a width / height
    within `aspect`, whose logarithm is uniform."""
    height, width = size
    # in float64: the boxes are rounded to whole pixels, the same on every machine
    fraction = rng.uniform(f"{stream} area").double()
    areas = height * width * (scale[0] + (scale[1] - scale[0]) * fraction)
    log_low, log_high = map(math.log, aspect)
    position = rng.uniform(f"{stream} aspect").double()
    aspects = torch.exp(log_low + (log_high - log_low) * position)

    box_width = (areas * aspects).sqrt().round().clamp(1, width)
    box_height = (areas / aspects).sqrt().round().clamp(1, height)
    left = (rng.uniform(f"{stream} x") * (width - box_width + 1)).floor()
    top = (rng.uniform(f"{stream} y") * (height - box_height + 1)).floor()
    return torch.stack([left, top, left + box_width, top + box_height], dim=1)


def _sample_centred_boxes(
    rng: StatelessRandom,
    stream: str,
    size: tuple[int, int],
    box_height: Int64[Tensor, " B"],
    box_width: Int64[Tensor, " B"],
) -> Boxes:
    """Boxes whose centre is anywhere in the image; they may reach over its edges."""
    top = rng.integers(f"{stream} y", below=size[0]) - box_height // 2
    left = rng.integers(f"{stream} x", below=size[1]) - box_width // 2
    return torch.stack([left, top, left + box_width, top + box_height], dim=1)


def _sample_mix(
    rng: StatelessRandom, size: tuple[int, int], augment: AugmentConfig
) -> tuple[Factors, Boxes]:
    """The weight of each sample's own image, and the boxes that are its neighbour's."""
    count = len(rng.sample_ids)
    is_cutmix = torch.full((count,), augment.cutmix > 0)
    if augment.mixup and augment.cutmix:
        is_cutmix = rng.bits("mix kind") < 0

    # all of the image is its own, until one of the two changes that
    weight = torch.ones(count)
    boxes = torch.zeros(count, 4, dtype=torch.int64)
    if augment.mixup:
        weight = torch.where(is_cutmix, weight, _sample_beta(rng, "mixup", augment.mixup))
    if augment.cutmix:
        # of the image's aspect
        half = 0.5 * (1 - _sample_beta(rng, "cutmix", augment.cutmix)).sqrt()
        box_height, box_width = (2 * (half * side).long() for side in size)
        cutmix_boxes = _sample_centred_boxes(rng, "cutmix", size, box_height, box_width)
        boxes = torch.where(is_cutmix[:, None], cutmix_boxes, boxes)
    return weight, boxes


def _sample_beta(rng: StatelessRandom, stream: str, alpha: float) -> Factors:
    """Beta(alpha, alpha) by its quantile function, tabulated."""
    table = _beta_quantiles(alpha)
    position = rng.uniform(stream).double() * (len(table) - 1)
    below = position.long()
    return torch.lerp(table[below], table[below + 1], position - below).float()


@cache
def _beta_quantiles(alpha: float) -> Float[Tensor, " q"]:
    # scipy takes long to import
    from scipy.special import betaincinv

    probabilities = torch.linspace(0, 1, 4097, dtype=torch.float64)
    return torch.from_numpy(betaincinv(alpha, alpha, probabilities.numpy()))


def resized_crop(
    images: UInt8[Tensor, "B S T 3"], boxes: Float[Tensor, "B 4"], size: tuple[int, int]
) -> Images:
    """Cut out boxes of whole pixels and scale them to `size`, bilinear and antialiased.

    Args:
        images: uint8 [B, S, T, 3].
        boxes: left, top, right, bottom, whole numbers as float [B, 4].
        size: height and width of the result.
    """
    height, width = size
    left, top, right, bottom = boxes.unbind(1)
    row_weights = _resize_weights(top, bottom, source=images.shape[1], target=height)  # [B, H, S]
    column_weights = _resize_weights(left, right, source=images.shape[2], target=width)  # [B, W, T]

    # a resize is two matrix products, with matrices of each sample's own
    rows = torch.bmm(row_weights, images.flatten(2).float())  # [B, H, T * 3]
    rows = rows.view(len(images), height, -1, 3).permute(0, 3, 1, 2).flatten(1, 2)  # [B, 3 * H, T]
    return torch.bmm(rows, column_weights.transpose(1, 2)).view(len(images), 3, height, width)


def _resize_weights(
    start: Factors, stop: Factors, *, source: int, target: int
) -> Float[Tensor, "B target source"]:
    """Rows of a triangle filter that sum to one; its half width is the larger of the two pixels."""
    start = start[:, None, None]
    stop = stop[:, None, None]
    scale = (stop - start) / target
    centre = start + (torch.arange(target, device=start.device)[:, None] + 0.5) * scale
    pixel = torch.arange(source, device=start.device) + 0.5
    weights = (1 - (pixel - centre).abs() / scale.clamp(min=1)).clamp(min=0)  # [B, target, source]
    # nothing beyond the box, as if it had been cut out first
    weights = weights * ((pixel > start) & (pixel < stop))
    return weights / weights.sum(dim=2, keepdim=True)


def outside_boxes(boxes: Boxes, size: tuple[int, int]) -> Bool[Tensor, "B 1 H W"]:
    """False inside the boxes, which may reach over the edges, and true elsewhere."""
    height, width = size
    left, top, right, bottom = boxes[:, :, None].unbind(1)
    rows = torch.arange(height, device=boxes.device)
    columns = torch.arange(width, device=boxes.device)
    in_rows = (rows >= top) & (rows < bottom)  # [B, H]
    in_columns = (columns >= left) & (columns < right)  # [B, W]
    return ~(in_rows[:, :, None] & in_columns[:, None])[:, None]


def jitter_colors(images: Images, factors: Float[Tensor, "3 B"]) -> Images:
    """Brightness, contrast and saturation, as torchvision's ColorJitter in this order.

    At a factor of 0 the image is black, its mean luma, or grey; at 1 it stays as it is.
    """
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind()
    images = (images * brightness).clamp(0, 255)
    mean = to_grey(images).mean(dim=(2, 3), keepdim=True)
    images = (mean + contrast * (images - mean)).clamp(0, 255)
    grey = to_grey(images)
    return (grey + saturation * (images - grey)).clamp(0, 255)


def to_grey(images: Images) -> Float[Tensor, "B 1 H W"]:
    """Luma by ITU-R 601-2, as in torchvision."""
    return torch.einsum("bchw,c->bhw", images, _luma_weights(images.device, images.dtype))[:, None]


# each would be a copy to the device
@lru_cache
def _luma_weights(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor((0.2989, 0.587, 0.114), device=device, dtype=dtype)
