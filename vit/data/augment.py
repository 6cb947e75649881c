"""Augmentation of whole batches on the device they are on, drawn anew for every sample.

Random numbers are drawn on the host, a few hundred integers, and go to the device with the indices in one copy: so the
host knows which operation falls on which sample, and nothing waits for the device.
"""

import math
from dataclasses import replace
from functools import lru_cache

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vit.config import AugmentConfig
from vit.data import kernels
from vit.data.images import Preprocess
from vit.data.kernels import Integers, Size, Stored
from vit.data.policies import RAND_AUGMENT, TRIVIAL_AUGMENT, apply_operations, draw_operations
from vit.data.random import SampleIds, StatelessRandom

Images = Float[Tensor, "B 3 H W"]
Boxes = Int64[Tensor, "B 4"]  # left, top, right, bottom
Draws = dict[str, Tensor]  # what was drawn for each sample of a batch, by name
_JITTER = ("brightness", "contrast", "saturation")


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


def draw(
    ids: SampleIds, *, rng: StatelessRandom, augment: Augment, full: Size, size: Size, side: int, mix: bool
) -> Draws:
    """All random numbers of a batch, on the host: for stored images of `full` size, cut and finished at `size`. `side`
    is the height that the configuration's pixels are meant for."""
    drawn = draw_cut(ids, rng=rng, augment=augment, full=full) | draw_finish(
        ids, rng=rng, augment=augment, size=size, side=side
    )
    return drawn | draw_mix(ids, rng=rng, augment=augment, size=size) if mix else drawn


def draw_cut(ids: SampleIds, *, rng: StatelessRandom, augment: Augment, full: Size) -> Draws:
    """What `cut_pixels` takes, for stored images of `full` size."""
    drawn = {"flipped": _draw_flips(rng, ids, augment.flip)}
    if augment.resized_crop_scale is not None:
        return drawn | {"crop": _draw_crops(rng, ids, full, augment.resized_crop_scale)}
    padding = augment.crop_padding
    for axis in "yx" if padding else "":
        drawn[f"shift {axis}"] = rng.integers(f"crop {axis}", ids, below=2 * padding + 1) - padding
    return drawn


def cut_pixels(images: Stored, index: Integers, drawn: Draws, *, size: Size) -> Tensor:
    """Crop and flip images[index]; everything is on one device.

    Gives uint8 [B, H, W, 3], or after a resized crop float [B, 3, H, W], of values 0..255.
    """
    full, flipped = (images.shape[1], images.shape[2]), drawn["flipped"]
    if "crop" in drawn:
        cropped = kernels.resized_crop(images.index_select(0, index), drawn["crop"], size)
        return torch.where(flipped[:, None, None, None], cropped.flip(3), cropped)
    rows, columns = (
        _choose_lines(index, drawn.get(f"shift {axis}"), full=of_stored, size=wanted)
        for axis, of_stored, wanted in zip("yx", full, size, strict=True)
    )
    columns = torch.where(flipped[:, None], columns.flip(1), columns)
    return kernels.gather_pixels(images, index, rows, columns)


def draw_finish(ids: SampleIds, *, rng: StatelessRandom, augment: Augment, size: Size, side: int) -> Draws:
    """What `finish_images` takes, for images of `size`."""
    drawn: Draws = {}
    for name in _JITTER if augment.color_jitter else ():
        drawn[name] = (1 + augment.color_jitter * (2 * rng.uniform(name, ids) - 1)).clamp(min=0)
    if augment.rand_augment is not None:
        count, magnitude = augment.rand_augment
        strength = torch.full((len(ids),), magnitude / 10)
        for number in range(count):
            stream = f"rand augment {number}"
            drawn |= draw_operations(rng, ids, strength, stream=stream, ranges=RAND_AUGMENT, size=size)
    if augment.trivial_augment:
        stream, strength = "trivial augment", rng.integers("trivial strength", ids, below=31) / 30
        drawn |= draw_operations(rng, ids, strength, stream=stream, ranges=TRIVIAL_AUGMENT, size=size)
    if augment.cutout:
        drawn["cutout"] = _draw_cutout(rng, ids, size, round(augment.cutout * size[0] / side))
    if augment.re_prob:
        drawn["erasing"] = _draw_erasing(rng, ids, size, augment.re_prob)
    return drawn


def finish_images(pixels: Tensor, drawn: Draws, *, augment: Augment, preprocess: Preprocess, size: Size) -> Images:
    """Colours, normalisation and erasing of what `cut_pixels` gave, scaled to `size` where that differs."""
    if pixels.dtype == torch.uint8:
        pixels = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    for name in _JITTER if augment.color_jitter else ():
        pixels = getattr(kernels, f"adjust_{name}")(pixels, drawn[name])
    for number in range(augment.rand_augment[0] if augment.rand_augment else 0):
        pixels = apply_operations(pixels, drawn, stream=f"rand augment {number}")
    if augment.trivial_augment:
        pixels = apply_operations(pixels, drawn, stream="trivial augment")
    scale, shift = preprocess.scale_and_shift(pixels.device)
    images = pixels.mul_(scale.view(3, 1, 1)).add_(shift.view(3, 1, 1))
    for name in ("cutout", "erasing"):
        if name in drawn:
            images *= _outside(drawn[name], images)
    return images


def draw_mix(ids: SampleIds, *, rng: StatelessRandom, augment: Augment, size: Size) -> Draws:
    """What `mix_batch` takes: the weight of each sample's own image, and the boxes that are its neighbour's."""
    count = len(ids)
    is_cutmix = torch.full((count,), augment.cutmix > 0)
    if augment.mixup and augment.cutmix:
        is_cutmix = rng.bits("mix kind", ids) < 0
    weight, boxes = torch.ones(count), torch.zeros(count, 4, dtype=torch.int64)
    if augment.mixup:
        weight = torch.where(is_cutmix, weight, _draw_beta(rng, "mixup", ids, augment.mixup))
    if augment.cutmix:
        kept = _draw_beta(rng, "cutmix", ids, augment.cutmix)
        boxes = torch.where(is_cutmix[:, None], _draw_cutmix(rng, ids, size, kept), boxes)
    return {"mix weight": weight, "mix boxes": boxes}


def mix_batch(
    images: Images, labels: Integers, drawn: Draws, *, num_classes: int
) -> tuple[Images, Float[Tensor, "B C"]]:
    """Mixup or cutmix of each sample with its neighbour (an odd last one stays), and their class weights."""
    count = len(images)
    partner = (torch.arange(count, device=images.device) ^ 1).clamp(max=count - 1)
    weight = drawn["mix weight"][:, None, None, None] * _outside(drawn["mix boxes"], images)
    mixed = torch.lerp(images[partner], images, weight)  # weight [B, 1, H, W]
    own = weight.mean(dim=(1, 2, 3))[:, None]
    # of integers below num_classes; `F.one_hot` looks at them on the host
    classes = torch.zeros(count, num_classes, device=labels.device).scatter_(1, labels[:, None], 1)
    return mixed, own * classes + (1 - own) * classes[partner]


def _outside(boxes: Boxes, images: Images) -> Tensor:
    """Bool [B, 1, H, W]: false inside the boxes."""
    return kernels.outside_boxes(boxes, (images.shape[-2], images.shape[-1]))


def _draw_flips(rng: StatelessRandom, ids: SampleIds, flip: str) -> Tensor:
    """Bool [B]. Alternating (Jordan 2024): at random in epoch 0, the other way round every epoch after it."""
    if flip == "random":
        return rng.bits("flip", ids) < 0
    if flip == "alternating":
        return (replace(rng, epoch=0).bits("flip", ids) < 0) ^ bool(rng.epoch % 2)
    return torch.zeros(len(ids), dtype=torch.bool)


def _choose_lines(index: Integers, shift: Integers | None, *, full: int, size: int) -> Tensor:
    """[B, n]: rows or columns of the centre crop, moved by `shift`; outside of the image it is reflected."""
    lines = ((full - size) // 2 + torch.arange(size, device=index.device)).expand(len(index), -1)
    if shift is not None:
        lines = lines + shift[:, None]
    period = max(2 * (full - 1), 1)
    return torch.minimum(lines % period, period - lines % period)  # folded back in, without repeating the edge


def _draw_box(rng: StatelessRandom, stream: str, ids: SampleIds, size: Size, *, area: Tensor, aspect: Tensor) -> Tensor:
    """Boxes [B, 4] of an area in pixels and an aspect (width / height), anywhere inside the image."""
    across = (area * aspect).sqrt().round().clamp(1, size[1])
    down = (area / aspect).sqrt().round().clamp(1, size[0])
    left = (rng.uniform(f"{stream} x", ids) * (size[1] - across + 1)).floor()
    top = (rng.uniform(f"{stream} y", ids) * (size[0] - down + 1)).floor()
    return torch.stack([left, top, left + across, top + down], dim=1)


def _draw_crops(rng: StatelessRandom, ids: SampleIds, full: Size, scale: tuple[float, float]) -> Float[Tensor, "B 4"]:
    """Boxes of a fraction of the area in `scale` and an aspect of 3/4 … 4/3, cut off where the image ends."""
    low, high = scale
    area = full[0] * full[1] * (low + (high - low) * rng.uniform("crop area", ids).double())
    aspect = torch.exp((2 * rng.uniform("crop aspect", ids).double() - 1) * math.log(4 / 3))
    return _draw_box(rng, "crop", ids, full, area=area, aspect=aspect).float()


def _draw_cutout(rng: StatelessRandom, ids: SampleIds, size: Size, side: int) -> Boxes:
    """Squares whose centre is anywhere in the image."""
    top = rng.integers("cutout y", ids, below=size[0]) - side // 2
    left = rng.integers("cutout x", ids, below=size[1]) - side // 2
    return torch.stack([left, top, left + side, top + side], dim=1)


def _draw_erasing(rng: StatelessRandom, ids: SampleIds, size: Size, probability: float) -> Boxes:
    """Rectangles inside the image, 2 … 33 % of its area, aspect 0.3 … 3.3; empty for samples not chosen."""
    area = size[0] * size[1] * (0.02 + 0.31 * rng.uniform("erasing area", ids).double())
    aspect = 0.3 * torch.exp(math.log(11) * rng.uniform("erasing aspect", ids).double())
    boxes = _draw_box(rng, "erasing", ids, size, area=area, aspect=aspect).long()
    return boxes * (rng.uniform("erasing", ids) < probability)[:, None]


def _draw_cutmix(rng: StatelessRandom, ids: SampleIds, size: Size, kept: Tensor) -> Boxes:
    """Boxes of the image's aspect and a fraction 1 - kept of its area, centred anywhere, cut off at the edges."""
    half = 0.5 * (1 - kept).sqrt()
    low, high = [], []
    for axis, side in (("x", size[1]), ("y", size[0])):
        middle, reach = rng.integers(f"cutmix {axis}", ids, below=side), (half * side).long()
        low.append((middle - reach).clamp(min=0))
        high.append((middle + reach).clamp(max=side))
    return torch.stack([*low, *high], dim=1)


def _draw_beta(rng: StatelessRandom, stream: str, ids: SampleIds, alpha: float) -> Float[Tensor, " B"]:
    """Beta(alpha, alpha) by its quantile function, tabulated."""
    table = _beta_quantiles(alpha)
    place = rng.uniform(stream, ids).double() * (len(table) - 1)
    below = place.long()
    return torch.lerp(table[below], table[below + 1], place - below).float()


@lru_cache(maxsize=8)
def _beta_quantiles(alpha: float) -> Float[Tensor, " q"]:
    from scipy.special import betaincinv

    return torch.from_numpy(betaincinv(alpha, alpha, torch.linspace(0, 1, 4097, dtype=torch.float64).numpy()))
