"""A model with its preprocessing in one module, made of operations that every runtime has. It takes
pixels of any size.

The resize equals Pillow's, which `Preprocess` uses, to the last bit: a pass over the columns and
one over the rows, with weights of 22 fractional bits and sums rounded to 8-bit pixels. Each pass is
a matrix product. Its matrix is computed from the size of the images, for the columns or rows
that the crop keeps.
"""

from typing import NamedTuple

import PIL
import torch
from jaxtyping import Bool, Float, Float64, UInt8
from torch import Tensor, nn

from vit.data.preprocess import Interpolation, Preprocess

# a weight of one in Pillow's integers
_UNIT = 2.0**22
# radius of the filters, in pixels of the result
_RADIUS = {"bicubic": 2.0, "bilinear": 1.0}
# Pillow resizes rows first where that is faster; before version 13 it always began with columns
_ROWS_MAY_BE_FIRST = int(PIL.__version__.partition(".")[0]) >= 13


class PhotoModel(nn.Module):
    """From pixels to probabilities.

    Args:
        model: From normalised images [B, 3, H, W] to logits, or to a tuple that begins with logits
            and ends with features.
        preprocess: The preprocessing of the model.
        temperature: Divisor of the logits before the softmax.
        multilabel: Each label has a probability of its own, the sigmoid of its logit.
        decision: From probabilities to what is predicted; None where that is the most probable
            class.
        answers: From logits and features to further outputs; None for no more.
    """

    ground: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocess,
        *,
        temperature: float,
        multilabel: bool = False,
        decision: nn.Module | None = None,
        answers: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.multilabel = multilabel
        self.decision = decision
        self.answers = answers
        self.model = model
        self.preprocess = preprocess
        self.temperature = temperature
        scale, shift = preprocess.scale_and_shift()
        ground = torch.tensor(preprocess.ground, dtype=torch.float32).view(3, 1, 1)
        self.register_buffer("ground", ground)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, images: UInt8[Tensor, "B height width 3"]) -> tuple[Tensor, ...]:
        """Compute the probabilities [B, C] of RGB images, the outputs of `model` between its logits
        and features, what is predicted, and the answers."""
        pixels = images.permute(0, 3, 1, 2).float()  # [B, 3, height, width]
        normalised = torch.addcmul(self.shift, self._resize(pixels), self.scale)
        outputs = self.model(normalised)
        if not isinstance(outputs, tuple):
            outputs = (outputs, None)
        logits, *others, features = outputs
        scaled = logits / self.temperature
        probabilities = scaled.sigmoid() if self.multilabel else scaled.softmax(dim=-1)
        predicted = () if self.decision is None else (self.decision(probabilities),)
        answers = () if self.answers is None else self.answers(logits, features)
        return probabilities, *others, *predicted, *answers

    def _resize(self, pixels: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B 3 H W"]:
        """Compute `Preprocess.to_uint8` of each image."""
        # sizes are tensors, because the tracer turns numbers into constants
        positions = [
            torch.arange(side, dtype=torch.float64, device=pixels.device)
            for side in pixels.shape[2:]
        ]
        height, width = (side[-1] + 1 for side in positions)
        vertical, horizontal = self._find_places(height, width)
        rows, columns = (
            compute_resize_weights(side, place, interpolation=self.preprocess.interpolation)
            for side, place in zip(positions, (vertical, horizontal), strict=True)
        )
        # the order matters, because Pillow rounds after each pass
        if _ROWS_MAY_BE_FIRST:
            rows_first = height - vertical.target > 2 * (width - horizontal.target).clamp(min=0)
            resized: Tensor = torch.cond(
                rows_first, _rows_first, _columns_first, (pixels, rows, columns)
            )
        else:
            resized = _columns_first(pixels, rows, columns)
        if self.preprocess.resize_mode != "pad":
            return resized
        is_image = vertical.is_inside[:, None] & horizontal.is_inside
        return torch.where(is_image, resized, self.ground)

    def _find_places(
        self, height: Float64[Tensor, ""], width: Float64[Tensor, ""]
    ) -> tuple["_Place", "_Place"]:
        """Compute `Preprocess._place` along each axis."""
        preprocess = self.preprocess
        sides = (height, width)
        targets = preprocess.resize_size
        pixels = [side / target for side, target in zip(sides, targets, strict=True)]
        if preprocess.resize_mode == "crop":
            # the largest central box with the right aspect
            pixels = [torch.minimum(*pixels)] * 2
        elif preprocess.resize_mode == "pad":
            pixels = [torch.maximum(*pixels)] * 2
        vertical, horizontal = (
            self._find_place(*values)
            for values in zip(sides, targets, pixels, preprocess.image_size, strict=True)
        )
        return vertical, horizontal

    def _find_place(
        self, side: Float64[Tensor, ""], target: int, pixel: Float64[Tensor, ""], count: int
    ) -> "_Place":
        indices = torch.arange(count, dtype=torch.float64, device=side.device)
        if self.preprocess.resize_mode == "pad":
            resized = (side / pixel).round().clamp(1, target)
            indices = indices - ((target - resized) / 2).floor()
            return _Place(torch.zeros_like(side), side, resized, indices)
        start = ((side - target * pixel) / 2).clamp(min=0)
        stop = torch.minimum(start + target * pixel, side)
        # the crop from the middle of the resized box
        return _Place(start, stop, torch.full_like(side, target), indices + (target - count) // 2)


class _Place(NamedTuple):
    """Part of a side of the image that is resized.

    Attributes:
        start, stop: Ends of the part, in pixels of the image.
        target: Pixels that the part becomes.
        indices: Which of these pixels are computed, [count]; beyond them there is a border.
    """

    start: Float64[Tensor, ""]
    stop: Float64[Tensor, ""]
    target: Float64[Tensor, ""]
    indices: Float64[Tensor, " count"]

    @property
    def is_inside(self) -> Bool[Tensor, " count"]:
        """False for the border."""
        return (self.indices >= 0) & (self.indices < self.target)


def compute_resize_weights(
    positions: Float64[Tensor, " side"], place: _Place, *, interpolation: Interpolation
) -> Float64[Tensor, "count side"]:
    """Compute Pillow's integer weights for the pixels of a resized side; 0 for those of a border.

    Args:
        positions: 0, 1, … for the pixels of the side.
        place: The part of the side, and the pixels that are computed of it.
        interpolation: The filter.
    """
    # Pillow takes a box in float32
    start = place.start.float()
    scale = (place.stop.float() - start).double() / place.target
    stretch = scale.clamp(min=1.0)  # antialiasing: the filter grows with the reduction
    radius = _RADIUS[interpolation] * stretch

    centres = start.double() + (place.indices[:, None] + 0.5) * scale  # [count, 1]
    x = ((positions - centres + 0.5) * (1 / stretch)).abs()  # [count, side]
    values = 1 - x
    if interpolation == "bicubic":  # Keys 1981, with a = -0.5
        values = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5)
    # pixels that the filter reaches; their weights sum to one, then are integers of 22 bits
    begin = (centres - radius + 0.5).floor()
    end = (centres + radius + 0.5).floor()
    is_reached = (positions >= begin) & (positions < end) & (x < _RADIUS[interpolation])
    values = torch.where(is_reached, values, 0.0)
    values = values / values.sum(dim=1, keepdim=True) * _UNIT
    integers = values.sign() * (values.abs() + 0.5).floor()
    return torch.where(place.is_inside[:, None], integers, 0.0)


def _columns_first(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return _weigh(_weigh(pixels, columns).transpose(2, 3), rows).transpose(2, 3).contiguous()


def _rows_first(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return _weigh(_weigh(pixels.transpose(2, 3), rows).transpose(2, 3), columns).contiguous()


def _weigh(
    pixels: Float[Tensor, "B 3 others side"], weights: Float64[Tensor, "count side"]
) -> Float[Tensor, "B 3 others count"]:
    """Multiply pixels by integer weights and round to 0…255."""
    # float32 holds the high and the low bits of the weights exactly: two products in it need half
    # the memory of one in float64
    high = (weights / 2**11).round()
    low = weights - high * 2**11
    sums = (pixels @ high.float().T).double() * 2**11 + (pixels @ low.float().T).double()
    return ((sums + _UNIT / 2) / _UNIT).floor().clamp(0, 255).float()
