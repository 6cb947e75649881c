"""Mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) of each sample with its neighbour."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vit.data.boxes import Boxes, outside_boxes, sample_centred_boxes
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
    images: Images, labels: Int64[Tensor, " B"], params: MixParams, *, num_classes: int
) -> tuple[Images, Float[Tensor, "B C"]]:
    """Mix each sample with its neighbour; return the images and their class weights.

    The last sample of an odd batch stays as it is.
    """
    count, _, height, width = images.shape
    # 0 ↔ 1, 2 ↔ 3, …
    partner = (torch.arange(count, device=images.device) ^ 1).clamp(max=count - 1)

    is_own = outside_boxes(params.boxes, (height, width))
    pixel_weight = params.own_weight[:, None, None, None] * is_own  # [B, 1, H, W]
    mixed = torch.lerp(images[partner], images, pixel_weight)

    # `F.one_hot` would look at the labels on the host
    classes = torch.zeros(count, num_classes, device=labels.device).scatter_(1, labels[:, None], 1)
    # for cutmix the fraction of its own pixels, for mixup the weight itself
    weight = pixel_weight.mean(dim=(1, 2, 3))[:, None]
    return mixed, weight * classes + (1 - weight) * classes[partner]


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
