"""Augmentation as it is drawn for each sample: on the host, so that all parameters go to the device
in one copy with the indices, and nothing waits for the device."""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom

# width / height of a random crop, from and to, of an input that is a square
CROP_ASPECTS = (3 / 4, 4 / 3)

# left, top, right, bottom
Boxes = Int64[Tensor, "B 4"]


class AugmentParams(NamedTuple):
    """Sampled parameters of each sample of a batch; None where an augmentation is off."""

    is_flipped: Bool[Tensor, " B"]
    # pixels by which the centre crop is moved down and to the right
    shifts: Int64[Tensor, "2 B"]
    # boxes that are cropped instead of the centre
    crops: Float[Tensor, "B 4"] | None
    # brightness, contrast, saturation
    color_factors: Float[Tensor, "3 B"] | None
    # boxes of cutout
    erased_boxes: Boxes | None
    # weight of the image outside its box; the rest, and the box, are its neighbour's
    own_weight: Float[Tensor, " B"] | None
    mixed_boxes: Boxes | None


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images, drawn for every sample and epoch."""

    # pixels by which the centre crop is moved at most
    crop_padding: int = 0
    # smallest and largest fraction of the area that is cropped and resized, instead of the centre
    resized_crop_scale: tuple[float, float] | None = None
    # "alternating" (Jordan 2024) flips a random half in epoch 0, and in each later epoch those that
    # were not flipped in the one before
    flip: Literal["none", "random", "alternating"] = "none"
    # side in pixels of the square that cutout (DeVries & Taylor 2017) erases
    cutout: int = 0
    # largest relative change of brightness, contrast and saturation
    color_jitter: float = 0.0
    # alpha of the Beta distributions of mixup's weights and of cutmix's areas, 0 is off; with both,
    # each sample gets one of them at random
    mixup: float = 0.0
    cutmix: float = 0.0

    @property
    def is_mixing(self) -> bool:
        """True if samples are mixed with their neighbours."""
        return bool(self.mixup or self.cutmix)

    def sample(
        self, rng: StatelessRandom, preprocess: Preprocess, size: tuple[int, int], *, mix: bool
    ) -> AugmentParams:
        """Sample all parameters of a batch. `size`, height and width, is that of the model's input,
        which may be smaller in a schedule than `preprocess` says."""
        # without padding they are 0
        below = 2 * self.crop_padding + 1
        shifts = [rng.integers(f"crop {axis}", below=below) - self.crop_padding for axis in "yx"]
        crops = None
        if self.resized_crop_scale is not None:
            height, width = preprocess.resize_size
            places = self.sample_places(rng).numpy()
            boxes = self.place_crops(places, (height, width), shape=width / height)
            crops = torch.from_numpy(boxes).float()
        color_factors = None
        if self.color_jitter:
            streams = ("brightness", "contrast", "saturation")
            deviations = [2 * rng.uniform(stream) - 1 for stream in streams]
            color_factors = (1 + self.color_jitter * torch.stack(deviations)).clamp(min=0)
        erased_boxes = None
        if self.cutout:
            side = round(self.cutout * size[0] / preprocess.image_size[0])
            sides = torch.full_like(rng.sample_ids, side)
            erased_boxes = _sample_boxes(rng, "cutout", size, sides, sides)
        own_weight = mixed_boxes = None
        if mix and self.is_mixing:
            own_weight, mixed_boxes = self._sample_mix(rng, size)
        return AugmentParams(
            self.sample_flips(rng),
            torch.stack(shifts),
            crops,
            color_factors,
            erased_boxes,
            own_weight,
            mixed_boxes,
        )

    def sample_flips(self, rng: StatelessRandom) -> Bool[Tensor, " B"]:
        """Sample which images are flipped."""
        if self.flip == "random":
            return rng.bits("flip") < 0
        if self.flip == "alternating":
            is_flipped_first = replace(rng, epoch=0).bits("flip") < 0
            return is_flipped_first ^ bool(rng.epoch % 2)
        return torch.zeros(len(rng.sample_ids), dtype=torch.bool)

    def sample_places(self, rng: StatelessRandom) -> Float[Tensor, "4 B"]:
        """Sample area, aspect, horizontal and vertical place of random crops, each from 0 to 1."""
        return torch.stack([rng.uniform(f"crop {name}") for name in ("area", "aspect", "x", "y")])

    def place_crops(self, places: np.ndarray, size: tuple[int, int], *, shape: float) -> np.ndarray:
        """Compute random crops of whole pixels, boxes float64 [B, 4], of images of `size` (height,
        width) for an input of `shape` = width / height; places [4, B] as `sample_places` draws."""
        assert self.resized_crop_scale is not None
        height, width = size
        low, high = self.resized_crop_scale
        # in float64: the boxes are rounded to whole pixels, the same on every machine
        area, aspect, x, y = places.astype(np.float64)
        areas = height * width * (low + (high - low) * area)
        log_low, log_high = (math.log(limit * shape) for limit in CROP_ASPECTS)
        aspects = np.exp(log_low + (log_high - log_low) * aspect)
        box_width = np.minimum(np.sqrt(areas * aspects), width)
        box_height = np.minimum(np.sqrt(areas / aspects), height)
        # an image in another shape than the input's isn't distorted any further
        widest, highest = box_height * math.exp(log_high), box_width / math.exp(log_low)
        box_width = np.maximum(np.rint(np.minimum(box_width, widest)), 1)
        box_height = np.maximum(np.rint(np.minimum(box_height, highest)), 1)
        left = np.floor(x * (width - box_width + 1))
        top = np.floor(y * (height - box_height + 1))
        return np.asarray(np.stack([left, top, left + box_width, top + box_height], axis=-1))

    def _sample_mix(
        self, rng: StatelessRandom, size: tuple[int, int]
    ) -> tuple[Float[Tensor, " B"], Boxes]:
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
            cutmix_boxes = _sample_boxes(rng, "cutmix", size, box_height, box_width)
            boxes = torch.where(is_cutmix[:, None], cutmix_boxes, boxes)
        return weight, boxes


def _sample_boxes(
    rng: StatelessRandom,
    stream: str,
    size: tuple[int, int],
    box_height: Int64[Tensor, " B"],
    box_width: Int64[Tensor, " B"],
) -> Boxes:
    """Sample boxes whose centre is anywhere in the image; they may reach over its edges."""
    top = rng.integers(f"{stream} y", below=size[0]) - box_height // 2
    left = rng.integers(f"{stream} x", below=size[1]) - box_width // 2
    return torch.stack([left, top, left + box_width, top + box_height], dim=1)


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

    return torch.from_numpy(betaincinv(alpha, alpha, np.linspace(0, 1, 4097)))
