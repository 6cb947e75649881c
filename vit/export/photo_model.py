"""A model with its preprocessing in one module, of operations that every runtime has: pixels of any size come in.

The resize is that of Pillow, which `Preprocess` uses, to the last bit: a pass over the columns and one over the rows,
with weights of 22 fractional bits and sums rounded to 8-bit pixels. Each pass is a matrix product; the matrix is
computed from the size of the images, for those columns or rows alone that the crop keeps.
"""

import PIL
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor, nn

from vit.data.images import Interpolation, Preprocess

_UNIT = 2.0**22  # of Pillow's integer weights
_RADIUS = {"bicubic": 2.0, "bilinear": 1.0}  # of the filters, in pixels of the result
_ROWS_MAY_BE_FIRST = int(PIL.__version__.partition(".")[0]) >= 13  # where that is faster; before, columns always were


class PhotoModel(nn.Module):
    """From pixels to probabilities: (probabilities [B, classes], and what `model` gives after its logits).

    `model` takes normalised images [B, 3, H, W] to logits or to a tuple that begins with them, in its parameters'
    precision.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, preprocess: Preprocess, *, temperature: float) -> None:
        super().__init__()
        self.model, self.preprocess, self.temperature = model, preprocess, temperature
        scale, shift = preprocess.scale_and_shift()
        self.register_buffer("scale", scale.view(3, 1, 1))
        self.register_buffer("shift", shift.view(3, 1, 1))

    def forward(self, images: Shaped[Tensor, "B height width 3"]) -> tuple[Tensor, ...]:
        """Images in RGB of 0 to 255, uint8 or floating point."""
        pixels = images.permute(0, 3, 1, 2).float()  # [B, 3, height, width]
        if images.is_floating_point():
            pixels = pixels.round().clamp(0, 255)
        normalised = torch.addcmul(self.shift, self._resize(pixels), self.scale)
        outputs = self.model(normalised.to(next(self.model.parameters()).dtype))
        logits, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        return (logits.float() / self.temperature).softmax(dim=-1), *(other.float() for other in others)

    def _resize(self, pixels: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B 3 H W"]:
        sides = [torch.arange(side, dtype=torch.float64, device=pixels.device) for side in pixels.shape[2:]]
        targets, counts = self.preprocess.resize_size, self.preprocess.image_size
        # as `Preprocess` cuts the box that it resizes, and then the crop
        scales = [(side[-1] + 1) / target for side, target in zip(sides, targets, strict=True)]
        pixel = torch.minimum(*scales)
        rows, columns = (
            compute_resize_weights(side, pixel, target, count, interpolation=self.preprocess.interpolation)
            for side, target, count in zip(sides, targets, counts, strict=True)
        )
        if not _ROWS_MAY_BE_FIRST:
            return _columns_first(pixels, rows, columns)
        height, width = (side[-1] + 1 - target for side, target in zip(sides, targets, strict=True))
        rows_first = height > 2 * width.clamp(min=0)
        resized: Tensor = torch.cond(rows_first, _rows_first, _columns_first, (pixels, rows, columns))
        return resized


def compute_resize_weights(
    positions: Float64[Tensor, " side"],
    pixel: Float64[Tensor, ""],
    target: int,
    count: int,
    *,
    interpolation: Interpolation,
) -> Float64[Tensor, "{count} side"]:
    """Pillow's weights, integers, of the middle `count` of `target` pixels that cover the middle of a side.

    `positions`: 0, 1, … of the side's pixels. `pixel`: how many of them one of the result covers.
    """
    size = positions[-1] + 1
    start = ((size - target * pixel) / 2).clamp(min=0)
    stop = torch.minimum(start + target * pixel, size)
    start, stop = start.float(), stop.float()  # Pillow takes a box in float32
    scale = (stop - start).double() / target
    stretch = scale.clamp(min=1.0)  # antialiasing: the filter grows with the reduction
    radius, first = _RADIUS[interpolation] * stretch, (target - count) // 2
    places = torch.arange(first, first + count, dtype=torch.float64, device=positions.device)[:, None]
    centres = start.double() + (places + 0.5) * scale
    x = ((positions - centres + 0.5) * (1 / stretch)).abs()  # [count, side]
    values = 1 - x
    if interpolation == "bicubic":  # Keys 1981, with a = -0.5
        values = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5)
    first_taken, end = (centres - radius + 0.5).floor(), (centres + radius + 0.5).floor()
    inside = (positions >= first_taken) & (positions < end) & (x < _RADIUS[interpolation])
    values = torch.where(inside, values, 0.0)
    values = values / values.sum(dim=1, keepdim=True) * _UNIT
    return values.sign() * (values.abs() + 0.5).floor()


def _columns_first(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return _weigh(_weigh(pixels, columns).transpose(2, 3), rows).transpose(2, 3).contiguous()


def _rows_first(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return _weigh(_weigh(pixels.transpose(2, 3), rows).transpose(2, 3), columns).contiguous()


def _weigh(
    pixels: Float[Tensor, "B 3 others side"], weights: Float64[Tensor, "count side"]
) -> Float[Tensor, "B 3 others count"]:
    """Pixels times integer weights, rounded to 0…255. Two products in float32, of the weights' high and low bits,
    which it holds exactly, and half the memory of one in float64."""
    high = (weights / 2**11).round()
    low = weights - high * 2**11
    sums = [(pixels @ part.float().T).double() for part in (high, low)]
    exact = sums[0] * 2**11 + sums[1]
    return ((exact + _UNIT / 2) / _UNIT).floor().clamp(0, 255).float()
