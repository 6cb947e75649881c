"""Augmentation of a batch: sample parameters for each sample; apply them to the batch.

Parameters are sampled on the host, a few hundred numbers, and go to the device in one copy with the
indices. So the host knows which operation falls on which sample, and nothing waits for the device.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vit.data.color import Operation, apply_operations, jitter_colors, sample_operations
from vit.data.crop import Boxes, Crop, CropParams, outside_boxes, sample_boxes, sample_centred_boxes
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.runtime.tensors import Images


class MixParams(NamedTuple):
    """Sampled mixture of each sample with its neighbour."""

    # weight of the sample's own image outside its box
    own_weight: Float[Tensor, " B"]
    # area that is the neighbour's
    boxes: Boxes


@dataclass(frozen=True)
class Mixing:
    """How samples are mixed. With both kinds, each sample gets one of them at random.

    Args:
        mixup: Alpha of the Beta distribution of mixup's weights; 0 is off.
        cutmix: Alpha of the Beta distribution of cutmix's areas; 0 is off.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def sample(self, rng: StatelessRandom, size: tuple[int, int]) -> MixParams:
        """Sample the mixtures of images whose height and width are `size`."""
        count = len(rng.sample_ids)
        is_cutmix = torch.full((count,), self.cutmix > 0)
        if self.mixup and self.cutmix:
            is_cutmix = rng.bits("mix kind") < 0

        # all of the image is its own, until one of the two changes that
        weight = torch.ones(count)
        boxes = torch.zeros(count, 4, dtype=torch.int64)
        if self.mixup:
            weight = torch.where(is_cutmix, weight, sample_beta(rng, "mixup", self.mixup))
        if self.cutmix:
            # boxes have the image's aspect
            half = 0.5 * (1 - sample_beta(rng, "cutmix", self.cutmix)).sqrt()
            box_height, box_width = (2 * (half * side).long() for side in size)
            cutmix_boxes = sample_centred_boxes(rng, "cutmix", size, box_height, box_width)
            boxes = torch.where(is_cutmix[:, None], cutmix_boxes, boxes)
        return MixParams(weight, boxes)


def mix_batch(
    images: Images,
    targets: Int64[Tensor, " B"] | Float[Tensor, "B T"],
    params: MixParams,
    *,
    num_classes: int,
) -> tuple[Images, Float[Tensor, "B T"]]:
    """Mix each sample with its neighbour; return the images and their targets.

    The last sample of an odd batch stays as it is.

    Args:
        images: Normalised images.
        targets: Labels, which become class weights [B, num_classes]; or rows, which are mixed.
        params: See `Mixing.sample`.
        num_classes: Number of classes of labels.
    """
    count, _, height, width = images.shape
    # 0 ↔ 1, 2 ↔ 3, …
    partner = (torch.arange(count, device=images.device) ^ 1).clamp(max=count - 1)

    is_own = outside_boxes(params.boxes, (height, width))
    pixel_weight = params.own_weight[:, None, None, None] * is_own  # [B, 1, H, W]
    mixed = torch.lerp(images[partner], images, pixel_weight)

    if targets.ndim == 1:
        # `F.one_hot` would look at the labels on the host
        classes = torch.zeros(count, num_classes, device=targets.device)
        targets = classes.scatter_(1, targets[:, None], 1)
    # for cutmix the fraction of its own pixels, for mixup the weight itself
    weight = pixel_weight.mean(dim=(1, 2, 3))[:, None]
    return mixed, weight * targets + (1 - weight) * targets[partner]


def sample_beta(rng: StatelessRandom, stream: str, alpha: float) -> Float[Tensor, " B"]:
    """Sample Beta(alpha, alpha) by its quantile function, tabulated."""
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


class AugmentParams(NamedTuple):
    """Sampled parameters of each sample of a batch; None and () where an augmentation is off."""

    crop: CropParams
    # brightness, contrast, saturation
    color_factors: Float[Tensor, "3 B"] | None
    # operations of RandAugment, in this order
    operations: tuple[Operation, ...]
    # boxes of cutout and random erasing
    erased_boxes: tuple[Boxes, ...]
    mix: MixParams | None


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images, drawn for every sample and epoch.

    Args:
        crop: Crop and flip.
        color_jitter: Largest relative change of brightness, contrast and saturation.
        rand_augment: RandAugment's operations for each sample, and their magnitude of 10.
        cutout: Side in pixels of the square that cutout (DeVries & Taylor 2017) erases.
        re_prob: Probability of random erasing (Zhong et al. 2020).
        mixing: Mixup and cutmix.
    """

    crop: Crop = field(default_factory=Crop)
    color_jitter: float = 0.0
    rand_augment: tuple[int, float] | None = None
    cutout: int = 0
    re_prob: float = 0.0
    mixing: Mixing = field(default_factory=Mixing)

    def sample(
        self,
        rng: StatelessRandom,
        *,
        stored_size: tuple[int, int],
        size: tuple[int, int],
        full_height: int,
        mix: bool,
        full_sizes: Int64[Tensor, "2 B"] | None = None,
    ) -> AugmentParams:
        """Sample all parameters of a batch, on the host.

        Args:
            rng: Random numbers of the batch's samples; with the sizes, they alone decide.
            stored_size: Height and width of the images before they are cropped.
            size: Height and width of the images that the model gets.
            full_height: Height of the images for which `cutout` is meant.
            mix: Apply mixup and cutmix.
            full_sizes: See `Crop.sample`.
        """
        color_factors = None
        if self.color_jitter:
            streams = ("brightness", "contrast", "saturation")
            deviations = [2 * rng.uniform(stream) - 1 for stream in streams]
            color_factors = (1 + self.color_jitter * torch.stack(deviations)).clamp(min=0)

        operations: list[Operation] = []
        if self.rand_augment is not None:
            count, magnitude = self.rand_augment
            for number in range(count):
                operations += sample_operations(rng, f"rand augment {number}", magnitude)

        # the side is for full-size images; a schedule may train on smaller ones
        erased_boxes = []
        if self.cutout:
            side = round(self.cutout * size[0] / full_height)
            sides = torch.full_like(rng.sample_ids, side)
            erased_boxes.append(sample_centred_boxes(rng, "cutout", size, sides, sides))
        if self.re_prob:
            boxes = sample_boxes(rng, "erasing", size, scale=(0.02, 0.33), aspect=(0.3, 3.3))
            # samples that are not chosen get an empty box
            is_chosen = rng.uniform("erasing") < self.re_prob
            erased_boxes.append(boxes.long() * is_chosen[:, None])

        return AugmentParams(
            crop=self.crop.sample(rng, stored_size, full_sizes),
            color_factors=color_factors,
            operations=tuple(operations),
            erased_boxes=tuple(erased_boxes),
            mix=self.mixing.sample(rng, size) if mix and self.mixing else None,
        )


def color_and_normalize(
    pixels: Tensor, params: AugmentParams, *, preprocess: Preprocess, size: tuple[int, int]
) -> Float[Tensor, "B 3 H W"]:
    """Scale the result of `crop_and_flip` to `size`, change its colours, normalise and erase."""
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
    images = pixels.mul_(scale).add_(shift)
    # 0 is the mean colour once pixels are normalised
    for boxes in params.erased_boxes:
        images *= outside_boxes(boxes, size)
    return images
