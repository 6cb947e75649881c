"""Augmentation of a batch. Parameters of each sample are drawn on the host, and go to the device in
one copy with the indices, so that nothing waits for the device."""

from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vit.data.crop import Boxes, Crop, CropParams, outside_boxes, sample_centred_boxes
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.runtime.tensors import Images


class MixParams(NamedTuple):
    """Mixture of each sample with its neighbour: the weight of its own image outside its box, which
    is the neighbour's."""

    own_weight: Float[Tensor, " B"]
    boxes: Boxes


class AugmentParams(NamedTuple):
    """Sampled parameters of each sample of a batch; None where an augmentation is off."""

    crop: CropParams
    # brightness, contrast, saturation
    color_factors: Float[Tensor, "3 B"] | None
    # boxes of cutout
    erased_boxes: Boxes | None
    mix: MixParams | None


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images, drawn for every sample and epoch.

    Args:
        crop: Crop and flip.
        color_jitter: Largest relative change of brightness, contrast and saturation.
        cutout: Side in pixels of the square that cutout (DeVries & Taylor 2017) erases.
        mixup: Alpha of the Beta distribution of mixup's weights; 0 is off.
        cutmix: Alpha of the Beta distribution of cutmix's areas; 0 is off. With mixup, too, each
            sample gets one of them at random.
    """

    crop: Crop = field(default_factory=Crop)
    color_jitter: float = 0.0
    cutout: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0

    @property
    def is_mixing(self) -> bool:
        """True if samples are mixed with their neighbours."""
        return bool(self.mixup or self.cutmix)

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
            full_height: Height for which `cutout` is meant; a schedule may train on smaller images.
            mix: Apply mixup and cutmix.
        """
        color_factors = None
        if self.color_jitter:
            streams = ("brightness", "contrast", "saturation")
            deviations = [2 * rng.uniform(stream) - 1 for stream in streams]
            color_factors = (1 + self.color_jitter * torch.stack(deviations)).clamp(min=0)
        erased_boxes = None
        if self.cutout:
            side = round(self.cutout * size[0] / full_height)
            sides = torch.full_like(rng.sample_ids, side)
            erased_boxes = sample_centred_boxes(rng, "cutout", size, sides, sides)
        return AugmentParams(
            crop=self.crop.sample(rng, stored_size),
            color_factors=color_factors,
            erased_boxes=erased_boxes,
            mix=self._sample_mix(rng, size) if mix and self.is_mixing else None,
        )

    def _sample_mix(self, rng: StatelessRandom, size: tuple[int, int]) -> MixParams:
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


def mix_batch(
    images: Images,
    targets: Int64[Tensor, " B"] | Float[Tensor, "B T"],
    params: MixParams,
    *,
    num_classes: int,
) -> tuple[Images, Float[Tensor, "B T"]]:
    """Mix each normalised image with its neighbour; return the images and their targets. Labels
    become class weights [B, num_classes], rows are mixed. The last of an odd batch stays as it is."""
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

    # in place: the pixels are a copy of the stored ones by now
    scale, shift = preprocess.scale_and_shift(pixels.device)
    images = pixels.mul_(scale).add_(shift)
    # 0 is the mean colour once pixels are normalised
    if params.erased_boxes is not None:
        images *= outside_boxes(params.erased_boxes, size)
    return images


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
    return torch.einsum("bchw,c->bhw", images, _luma_weights(images.device))[:, None]


# cached, because each call would copy them to the device
@lru_cache
def _luma_weights(device: torch.device) -> Tensor:
    return torch.tensor((0.2989, 0.587, 0.114), device=device)
