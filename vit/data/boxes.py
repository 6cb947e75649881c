"""Random boxes of images: areas to crop, to erase, or to take from another image."""

import math

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vit.data.random import StatelessRandom

# left, top, right, bottom
Boxes = Int64[Tensor, "B 4"]


def sample_boxes(
    rng: StatelessRandom,
    stream: str,
    size: tuple[int, int],
    *,
    scale: tuple[float, float],
    aspect: tuple[float, float],
) -> Float[Tensor, "B 4"]:
    """Sample boxes of whole pixels anywhere inside the image.

    Args:
        rng: Random numbers of the samples.
        stream: Name of the random numbers.
        size: Height and width of the image.
        scale: Range of the box's fraction of the image's area.
        aspect: Range of width / height, whose logarithm is uniform.
    """
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
    height, width = size
    left, top, right, bottom = boxes[:, :, None].unbind(1)
    rows = torch.arange(height, device=boxes.device)
    columns = torch.arange(width, device=boxes.device)
    in_rows = (rows >= top) & (rows < bottom)  # [B, H]
    in_columns = (columns >= left) & (columns < right)  # [B, W]
    return ~(in_rows[:, :, None] & in_columns[:, None])[:, None]
