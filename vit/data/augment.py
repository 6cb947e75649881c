"""Augmentation of whole batches on the device they are on, with a fresh draw for every sample.

StatelessRandom are made on the host, where they are a few hundred integers, and go to the device with the sample's
indices: so the host knows which operation falls on which sample, and nothing waits for the device.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Self

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.config import AugmentConfig
from vit.data import kernels
from vit.data.images import Preprocess
from vit.data.policies import RAND_AUGMENT, TRIVIAL_AUGMENT, apply_operations
from vit.data.random import StatelessRandom


class Augment(AugmentConfig):
    """What is done to a training image: the values of the configuration's augment section, all off by default.

    Cutout: DeVries & Taylor 2017; random erasing: Zhong et al. 2020; RandAugment: Cubuk et al. 2020;
    TrivialAugment: Müller & Hutter 2021; mixup: Zhang et al. 2018; cutmix: Yun et al. 2019. With both of the
    last two, each pair of samples gets one of them at random.
    """

    @property
    def mixes(self) -> bool:
        """Whether targets are mixtures."""
        return self.mixup > 0 or self.cutmix > 0

    def without_random_crop(self) -> Self:
        """What is left when resized crop and random flip were done where the image was decoded."""
        if self.resized_crop_scale is None:
            return self
        flip = "alternating" if self.flip == "alternating" else "none"
        return self.model_copy(update={"resized_crop_scale": None, "flip": flip})


def cut_pixels(
    images: UInt8[Tensor, "n S T 3"],
    index: Int64[Tensor, " B"],
    sample_ids: Int64[Tensor, " B"],
    *,
    rng: StatelessRandom,
    augment: Augment,
    size: tuple[int, int],
) -> Tensor:
    """Crop and flip images[index]; `index` and `sample_ids` are on the host.

    Gives uint8 [B, H, W, 3], or after a resized crop float [B, 3, H, W], of values 0..255.
    """
    device, full = images.device, (images.shape[1], images.shape[2])
    flipped = _draw_flips(rng, sample_ids, augment.flip)
    if augment.resized_crop_scale is not None:
        boxes = _draw_crops(rng, sample_ids, full, augment.resized_crop_scale)
        pixels = images.index_select(0, index.to(device, non_blocking=True))
        cropped = kernels.resized_crop(pixels, boxes.to(device, non_blocking=True), size)
        mirror = flipped.to(device, non_blocking=True)[:, None, None, None]
        return torch.where(mirror, cropped.flip(3), cropped)
    top, left = (full[0] - size[0]) // 2, (full[1] - size[1]) // 2
    rows = (top + torch.arange(size[0])).expand(len(index), -1)
    columns = (left + torch.arange(size[1])).expand(len(index), -1)
    if augment.crop_padding:
        span = 2 * augment.crop_padding + 1
        rows = rows + rng.integers("crop y", sample_ids, below=span)[:, None] - augment.crop_padding
        columns = columns + rng.integers("crop x", sample_ids, below=span)[:, None] - augment.crop_padding
    rows, columns = _reflect(rows, full[0]), _reflect(columns, full[1])
    columns = torch.where(flipped[:, None], columns.flip(1), columns)
    index, rows, columns = (part.to(device, non_blocking=True) for part in (index, rows, columns))
    return kernels.gather_pixels(images, index, rows, columns)


def finish_images(
    pixels: Tensor,
    sample_ids: Int64[Tensor, " B"],
    *,
    rng: StatelessRandom,
    augment: Augment,
    preprocess: Preprocess,
    size: tuple[int, int],
) -> Float[Tensor, "B 3 H W"]:
    """Colours, normalisation and erasing of what `cut_pixels` gave, scaled to `size` where that differs."""
    if pixels.dtype == torch.uint8:
        pixels = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    if augment.color_jitter:
        pixels = _jitter(pixels, rng, sample_ids, augment.color_jitter)
    if augment.rand_augment is not None:
        count, magnitude = augment.rand_augment
        for number in range(count):
            stream, strength = f"rand augment {number}", torch.full((len(sample_ids),), magnitude / 10)
            pixels = apply_operations(pixels, rng, sample_ids, strength, stream=stream, ranges=RAND_AUGMENT)
    if augment.trivial_augment:
        strength = rng.integers("trivial strength", sample_ids, below=31) / 30
        pixels = apply_operations(
            pixels, rng, sample_ids, strength, stream="trivial augment", ranges=TRIVIAL_AUGMENT
        )
    scale, shift = preprocess.scale_and_shift(pixels.device)
    images = pixels.mul_(scale.view(3, 1, 1)).add_(shift.view(3, 1, 1))
    if augment.cutout:
        side = round(augment.cutout * size[0] / preprocess.image_size[0])
        boxes = _draw_cutout(rng, sample_ids, size, side)
        images *= kernels.outside_boxes(boxes.to(images.device, non_blocking=True), size)
    if augment.re_prob:
        boxes = _draw_erasing(rng, sample_ids, size, augment.re_prob)
        images *= kernels.outside_boxes(boxes.to(images.device, non_blocking=True), size)
    return images


def mix_batch(
    images: Float[Tensor, "B 3 H W"],
    labels: Int64[Tensor, " B"],
    sample_ids: Int64[Tensor, " B"],
    *,
    rng: StatelessRandom,
    augment: Augment,
    num_classes: int,
) -> tuple[Float[Tensor, "B 3 H W"], Float[Tensor, "B C"]]:
    """Mixup or cutmix of each sample with its neighbour (an odd last one stays), and the class shares."""
    count, (height, width) = len(sample_ids), images.shape[-2:]
    partner = (torch.arange(count) ^ 1).clamp(max=count - 1).to(images.device, non_blocking=True)
    cuts = torch.full((count,), augment.cutmix > 0)
    if augment.mixup and augment.cutmix:
        cuts = rng.bits("mix kind", sample_ids) < 0
    weight = torch.ones(count)
    boxes = torch.zeros(count, 4, dtype=torch.int64)
    if augment.mixup:
        weight = torch.where(cuts, weight, _draw_beta(rng, "mixup", sample_ids, augment.mixup))
    if augment.cutmix:
        kept = _draw_beta(rng, "cutmix", sample_ids, augment.cutmix)
        boxes = torch.where(cuts[:, None], _draw_patches(rng, sample_ids, (height, width), kept), boxes)
    weight, boxes = weight.to(images.device, non_blocking=True), boxes.to(images.device, non_blocking=True)
    share = weight[:, None, None, None] * kernels.outside_boxes(boxes, (height, width))  # [B, 1, H, W]
    mixed = torch.lerp(images[partner], images, share)
    own = share.mean(dim=(1, 2, 3))[:, None]
    classes = F.one_hot(labels, num_classes).to(torch.float32)
    return mixed, own * classes + (1 - own) * classes[partner]


# --- random numbers: drawn on the host, one for each sample --------------------


def _draw_flips(rng: StatelessRandom, ids: Int64[Tensor, " B"], flip: str) -> Tensor:
    """Bool [B]. Alternating (Jordan 2024): a coin in epoch 0, the other way round every epoch after it."""
    if flip == "random":
        return rng.bits("flip", ids) < 0
    if flip == "alternating":
        return (replace(rng, epoch=0).bits("flip", ids) < 0) ^ bool(rng.epoch % 2)
    return torch.zeros(len(ids), dtype=torch.bool)


def _reflect(index: Int64[Tensor, "B n"], size: int) -> Int64[Tensor, "B n"]:
    """Fold indices outside 0 … size - 1 back in, without repeating the edge."""
    period = max(2 * (size - 1), 1)
    index = index % period
    return torch.minimum(index, period - index)


def _draw_crops(
    rng: StatelessRandom, ids: Int64[Tensor, " B"], full: tuple[int, int], scale: tuple[float, float]
) -> Float[Tensor, "B 4"]:
    """Boxes with a share of the area in `scale` and an aspect of 3/4 … 4/3, cut off where the image ends."""
    height, width = full
    area = height * width * (scale[0] + (scale[1] - scale[0]) * rng.uniform("crop area", ids).double())
    aspect = torch.exp((2 * rng.uniform("crop aspect", ids).double() - 1) * math.log(4 / 3))
    across = (area * aspect).sqrt().round().clamp(1, width)
    down = (area / aspect).sqrt().round().clamp(1, height)
    left = (rng.uniform("crop x", ids) * (width - across + 1)).floor()
    top = (rng.uniform("crop y", ids) * (height - down + 1)).floor()
    return torch.stack([left, top, left + across, top + down], dim=1).float()


def _jitter(images: Float[Tensor, "B 3 H W"], rng: StatelessRandom, ids: Tensor, strength: float) -> Tensor:
    for name, adjust in (
        ("brightness", kernels.adjust_brightness),
        ("contrast", kernels.adjust_contrast),
        ("saturation", kernels.adjust_saturation),
    ):
        factor = (1 + strength * (2 * rng.uniform(name, ids) - 1)).clamp(min=0)
        images = adjust(images, factor.to(images.device, non_blocking=True))
    return images


def _draw_cutout(
    rng: StatelessRandom, ids: Int64[Tensor, " B"], size: tuple[int, int], side: int
) -> Int64[Tensor, "B 4"]:
    """Squares whose centre is anywhere in the image."""
    top = rng.integers("cutout y", ids, below=size[0]) - side // 2
    left = rng.integers("cutout x", ids, below=size[1]) - side // 2
    return torch.stack([left, top, left + side, top + side], dim=1)


def _draw_erasing(
    rng: StatelessRandom, ids: Int64[Tensor, " B"], size: tuple[int, int], probability: float
) -> Int64[Tensor, "B 4"]:
    """Rectangles inside the image, 2 … 33 % of its area, aspect 0.3 … 3.3; empty for samples not chosen."""
    height, width = size
    area = height * width * (0.02 + 0.31 * rng.uniform("erasing area", ids).double())
    aspect = 0.3 * torch.exp(math.log(11) * rng.uniform("erasing aspect", ids).double())
    across = (area * aspect).sqrt().round().clamp(1, width)
    down = (area / aspect).sqrt().round().clamp(1, height)
    left = (rng.uniform("erasing x", ids) * (width - across + 1)).floor()
    top = (rng.uniform("erasing y", ids) * (height - down + 1)).floor()
    boxes = torch.stack([left, top, left + across, top + down], dim=1).long()
    return boxes * (rng.uniform("erasing", ids) < probability)[:, None]


def _draw_patches(
    rng: StatelessRandom, ids: Int64[Tensor, " B"], size: tuple[int, int], kept: Float[Tensor, " B"]
) -> Int64[Tensor, "B 4"]:
    """Boxes of the image's aspect, a share 1 - kept of its area, centred anywhere, cut off at the edges."""
    half = 0.5 * (1 - kept).sqrt()
    low, high = [], []
    for axis, side in (("x", size[1]), ("y", size[0])):
        middle, reach = rng.integers(f"cutmix {axis}", ids, below=side), (half * side).long()
        low.append((middle - reach).clamp(min=0))
        high.append((middle + reach).clamp(max=side))
    return torch.stack([*low, *high], dim=1)


def _draw_beta(
    rng: StatelessRandom, stream: str, ids: Int64[Tensor, " B"], alpha: float
) -> Float[Tensor, " B"]:
    """Beta(alpha, alpha) by its quantile function, tabulated."""
    table = _beta_quantiles(alpha)
    place = rng.uniform(stream, ids).double() * (len(table) - 1)
    below = place.long()
    return torch.lerp(table[below], table[below + 1], place - below).float()


@lru_cache(maxsize=8)
def _beta_quantiles(alpha: float) -> Float[Tensor, " q"]:
    from scipy.special import betaincinv

    return torch.from_numpy(betaincinv(alpha, alpha, torch.linspace(0, 1, 4097, dtype=torch.float64).numpy()))
