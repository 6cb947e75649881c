"""Augmentation of whole batches on the device they are on, with a fresh draw for every sample."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Augment:
    """What is done to a training image; everything is off by default."""

    crop_padding: int = 0  # pixels: a crop of the same size, shifted by up to this much; edges are reflected
    resized_crop_scale: tuple[float, float] | None = None  # share of the area that a random crop keeps
    flip: Literal["none", "random", "alternating"] = "none"
    cutout: int = 0  # side in pixels of a square set to the mean
    erasing: float = 0.0  # probability of a rectangle set to the mean
    color_jitter: float = 0.0  # strength of brightness, contrast and saturation changes
    rand_augment: tuple[int, float] | None = None  # (operations, magnitude 0..30)
    trivial_augment: bool = False
    mixup: float = 0.0  # alpha of Beta(alpha, alpha)
    cutmix: float = 0.0  # alpha of Beta(alpha, alpha)
