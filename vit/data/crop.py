"""Crops and flips of a batch: each sample has its own. Also boxes that are erased or mixed."""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from vit.data.random import StatelessRandom
from vit.runtime.tensors import Images

# width / height of a random crop, from and to, of an input that is a square
CROP_ASPECTS = (3 / 4, 4 / 3)

Flip = Literal["none", "random", "alternating"]
# left, top, right, bottom
Boxes = Int64[Tensor, "B 4"]


class CropParams(NamedTuple):
    """Crop and flip of each sample: boxes (left, top, right, bottom), or centre crops, which are
    shifted down and to the right."""

    is_flipped: Bool[Tensor, " B"]
    shifts: Int64[Tensor, "2 B"]
    boxes: Float[Tensor, "B 4"] | None


@dataclass(frozen=True)
class Crop:
    """How training images are cropped and flipped.

    Args:
        padding: Pixels by which the centre crop is moved at most, down and to the right.
        scale: Range of the fraction of the image's area that is cropped and resized; None moves the
            centre crop.
        flip: "random" flips half of the samples; "alternating" (Jordan 2024) flips a random half in
            epoch 0, and in each later epoch those that were not flipped in the one before.
    """

    padding: int = 0
    scale: tuple[float, float] | None = None
    flip: Flip = "none"

    def sample(self, rng: StatelessRandom, stored_size: tuple[int, int]) -> CropParams:
        """Sample the crops of images whose height and width are `stored_size`."""
        boxes = None
        if self.scale is not None:
            height, width = stored_size
            places = self.sample_places(rng).numpy()
            boxes = torch.from_numpy(self.place(places, stored_size, shape=width / height)).float()
        # without padding they are 0, and the crop is the centre
        below = 2 * self.padding + 1
        shifts = [rng.integers(f"crop {axis}", below=below) - self.padding for axis in "yx"]
        return CropParams(self.sample_flips(rng), torch.stack(shifts), boxes)

    def sample_places(self, rng: StatelessRandom) -> Float[Tensor, "4 B"]:
        """Sample area, aspect, horizontal and vertical place of random crops, each from 0 to 1."""
        return torch.stack([rng.uniform(f"crop {name}") for name in ("area", "aspect", "x", "y")])

    def place(self, places: np.ndarray, size: tuple[int, int], *, shape: float) -> np.ndarray:
        """Compute random crops of whole pixels.

        Args:
            places: See `sample_places`, [4, B].
            size: Height and width of the images.
            shape: Width / height of the model's input.

        Returns:
            Left, top, right and bottom of each crop, float64 [B, 4].
        """
        assert self.scale is not None
        height, width = size
        low, high = self.scale
        # in float64: the boxes are rounded to whole pixels, the same on every machine
        area, aspect, x, y = places.astype(np.float64)
        areas = height * width * (low + (high - low) * area)
        log_low, log_high = (math.log(aspect * shape) for aspect in CROP_ASPECTS)
        aspects = np.exp(log_low + (log_high - log_low) * aspect)
        box_width = np.minimum(np.sqrt(areas * aspects), width)
        box_height = np.minimum(np.sqrt(areas / aspects), height)
        # an image in another shape than the input's isn't distorted any further
        widest, highest = box_height * math.exp(log_high), box_width / math.exp(log_low)
        box_width = np.maximum(np.rint(np.minimum(box_width, widest)), 1)
        box_height = np.maximum(np.rint(np.minimum(box_height, highest)), 1)
        left = np.floor(x * (width - box_width + 1))
        top = np.floor(y * (height - box_height + 1))
        boxes: np.ndarray = np.stack([left, top, left + box_width, top + box_height], axis=-1)
        return boxes

    def sample_flips(self, rng: StatelessRandom) -> Bool[Tensor, " B"]:
        """Sample which images are flipped."""
        if self.flip == "random":
            return rng.bits("flip") < 0
        if self.flip == "alternating":
            is_flipped_first = replace(rng, epoch=0).bits("flip") < 0
            return is_flipped_first ^ bool(rng.epoch % 2)
        return torch.zeros(len(rng.sample_ids), dtype=torch.bool)


def crop_and_flip(
    images: UInt8[Tensor, "n S T 3"],
    index: Int64[Tensor, " B"],
    params: CropParams,
    *,
    size: tuple[int, int],
) -> Tensor:
    """Crop and flip images[index]; everything is on one device.

    Returns:
        uint8 [B, H, W, 3], or after a resized crop float [B, 3, H, W] of values 0..255.
    """
    if params.boxes is not None:
        cropped = resized_crop(images.index_select(0, index), params.boxes, size)
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
    """Find the rows or columns of the centre crop, moved by `shifts` and reflected at the edge."""
    lines = (stored - cropped) // 2 + torch.arange(cropped, device=shifts.device)
    lines = lines + shifts[:, None]
    period = max(2 * (stored - 1), 1)
    # folded back in, without repeating the edge
    return torch.minimum(lines % period, period - lines % period)


def resized_crop(
    images: UInt8[Tensor, "B S T 3"], boxes: Float[Tensor, "B 4"], size: tuple[int, int]
) -> Images:
    """Cut out boxes (left, top, right, bottom) and scale them to `size` (height, width), bilinear
    and antialiased."""
    height, width = size
    left, top, right, bottom = boxes.unbind(1)
    row_weights = _resize_weights(top, bottom, source=images.shape[1], target=height)  # [B, H, S]
    column_weights = _resize_weights(left, right, source=images.shape[2], target=width)  # [B, W, T]

    # a resize is two matrix products, with matrices of each sample's own
    rows = torch.bmm(row_weights, images.flatten(2).float())  # [B, H, T * 3]
    rows = rows.view(len(images), height, -1, 3).permute(0, 3, 1, 2).flatten(1, 2)  # [B, 3 * H, T]
    return torch.bmm(rows, column_weights.transpose(1, 2)).view(len(images), 3, height, width)


def _resize_weights(
    start: Float[Tensor, " B"], stop: Float[Tensor, " B"], *, source: int, target: int
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


def sample_centred_boxes(
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


def outside_boxes(boxes: Boxes, size: tuple[int, int]) -> Bool[Tensor, "B 1 H W"]:
    """Mask of each image: false inside its box, which may reach over the edges."""
    left, top, right, bottom = boxes[:, :, None].unbind(1)
    rows, columns = (torch.arange(side, device=boxes.device) for side in size)
    in_rows = (rows >= top) & (rows < bottom)  # [B, H]
    in_columns = (columns >= left) & (columns < right)  # [B, W]
    return ~(in_rows[:, :, None] & in_columns[:, None])[:, None]
