"""Augmentation of a batch: sample parameters for each sample; apply them to the batch.

Parameters are sampled on the host, a few hundred numbers, and go to the device in one copy with the
indices. So the host knows which operation falls on which sample, and nothing waits for the device.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit.data.boxes import Boxes, outside_boxes, sample_boxes, sample_centred_boxes
from vit.data.color import Operation, apply_operations, jitter_colors, sample_operations
from vit.data.crop import Crop, CropParams
from vit.data.mixing import Mixing, MixParams
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom


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
    ) -> AugmentParams:
        """Sample all parameters of a batch, on the host.

        Args:
            rng: Random numbers of the batch's samples; with the sizes, they alone decide.
            stored_size: Height and width of the images before they are cropped.
            size: Height and width of the images that the model gets.
            full_height: Height of the images for which `cutout` is meant.
            mix: Apply mixup and cutmix.
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
            crop=self.crop.sample(rng, stored_size),
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
    images = pixels.mul_(scale.view(3, 1, 1)).add_(shift.view(3, 1, 1))
    # 0 is the mean colour once pixels are normalised
    for boxes in params.erased_boxes:
        images *= outside_boxes(boxes, size)
    return images
