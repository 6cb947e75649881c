"""A model with its preprocessing in one module, made of operations that every runtime has. It takes
pixels of any size.

The resize equals Pillow's, which `Preprocess` uses, to the last bit: a pass over the columns and
one over the rows, with weights of 22 fractional bits and sums rounded to 8-bit pixels. Each pass
gathers the pixels that the filter reaches and sums them in 32-bit integers. Matrix products would be
less exact in runtimes that compute them in bfloat16 or TF32.
"""

from typing import NamedTuple

import PIL
import torch
from jaxtyping import Bool, Float, Float64, Int32, Int64, Shaped, UInt8
from torch import Tensor, nn

from vit.data.preprocess import Interpolation, Preprocess

# a weight of one in Pillow's integers
_UNIT = 2**22
# radius of the filters, in pixels of the result
_RADIUS = {"bicubic": 2, "bilinear": 1}
# a pass sums the filter's pixels in this many parts, which need less memory one after another
_NUM_PARTS = 4
# Pillow resizes rows first where that is faster; before version 13 it always began with columns
_ROWS_MAY_BE_FIRST = int(PIL.__version__.partition(".")[0]) >= 13


class Classifier(nn.Module):
    """From normalised images to logits, probabilities and what follows from them.

    Args:
        model: From normalised images [B, 3, H, W] to a tuple of logits, any other outputs, and
            features.
        temperature: Divisor of the logits before the softmax.
        multilabel: Each label has a probability of its own, the sigmoid of its logit.
        decision: From probabilities to what is predicted; None where that is the most probable
            class.
        answers: From logits and features to further outputs; None for no more.
        dtype: Type in which `model` computes; inputs and outputs are float32.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        multilabel: bool = False,
        decision: nn.Module | None = None,
        answers: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.multilabel = multilabel
        self.decision = decision
        self.answers = answers
        self.dtype = dtype

    def forward(self, pixel_values: Float[Tensor, "B 3 H W"]) -> tuple[Tensor, ...]:
        """Compute logits divided by the temperature and probabilities [B, C], the outputs of `model`
        between its logits and features, what is predicted, the answers, and the features."""
        outputs = self.model(pixel_values.to(self.dtype))
        logits, *others, features = (output.float() for output in outputs)
        scaled = logits / self.temperature
        probabilities = scaled.sigmoid() if self.multilabel else scaled.softmax(dim=-1)
        predicted = () if self.decision is None else (self.decision(probabilities),)
        answers = () if self.answers is None else self.answers(logits, features)
        return scaled, probabilities, *others, *predicted, *answers, features


class PhotoModel(nn.Module):
    """From pixels to probabilities.

    Args:
        classifier: From normalised images to what `Classifier` gives.
        preprocess: The preprocessing of the model.
    """

    ground: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, classifier: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.classifier = classifier
        self.preprocess = preprocess
        scale, shift = preprocess.scale_and_shift()
        ground = torch.tensor(preprocess.ground, dtype=torch.uint8)
        self.register_buffer("ground", ground)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, images: UInt8[Tensor, "B height width 3"]) -> tuple[Tensor, ...]:
        """Compute what `classifier` gives of RGB images, between its logits and features, and the
        normalised images.

        OpenVINO computes in bfloat16 by default, except what leads to an output without a matrix
        product: the normalised images are one so that the weights of the resize stay in float32.
        """
        resized = self._resize(images).permute(0, 3, 1, 2)
        normalised = torch.addcmul(self.shift, resized.float(), self.scale)
        _, *outputs, _ = self.classifier(normalised)
        return *outputs, normalised

    def _resize(self, pixels: UInt8[Tensor, "B height width 3"]) -> UInt8[Tensor, "B H W 3"]:
        """Compute `Preprocess.to_uint8` of each image."""
        count = self._count_taps(*pixels.shape[1:3])
        sizes = torch.tensor(pixels.shape[1:3], device=pixels.device)
        height, width = sizes.double()
        vertical, horizontal = self._find_places(height, width)
        rows, columns = (
            compute_taps(side, place, count=count, interpolation=self.preprocess.interpolation)
            for side, place in ((height, vertical), (width, horizontal))
        )
        # the order matters, because Pillow rounds after each pass
        is_tall = height - vertical.target > 2 * (width - horizontal.target).clamp(min=0)
        rows_first = is_tall & _ROWS_MAY_BE_FIRST
        first, second = (
            _Taps(*(torch.where(rows_first, *pair) for pair in zip(*taps, strict=True)))
            for taps in ((rows, columns), (columns, rows))
        )
        turned = _turn(pixels, sizes, ~rows_first)
        resized = _weigh(_weigh(turned, first).transpose(1, 2), second)
        resized = torch.where(rows_first, resized.transpose(1, 2), resized)
        resized = self._cut(resized)
        if self.preprocess.resize_mode != "pad":
            return resized
        is_image = self._cut(
            vertical.is_inside[None, :, None, None] & horizontal.is_inside[:, None]
        )
        return torch.where(is_image, resized, self.ground)

    def _cut(self, pixels: Shaped[Tensor, "B n n C"]) -> Shaped[Tensor, "B H W C"]:
        height, width = self.preprocess.image_size
        return pixels[:, :height, :width]

    def _count_taps(self, height: int, width: int) -> int | torch.SymInt:
        """Return a multiple of `_NUM_PARTS` that is at least the number of pixels that a filter
        reaches along a side."""
        diameter = 2 * _RADIUS[self.preprocess.interpolation]
        if self.preprocess.resize_mode == "pad":
            # a side that becomes few pixels is reduced by up to half more than the other
            diameter = 3 * diameter // 2
        target_height, target_width = self.preprocess.resize_size
        reaches = (diameter * height // target_height, diameter * width // target_width)
        is_crop = self.preprocess.resize_mode == "crop"
        reach = torch.sym_min(*reaches) if is_crop else torch.sym_max(*reaches)
        return (torch.sym_max(reach, diameter) + 1) // _NUM_PARTS * _NUM_PARTS + _NUM_PARTS

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
        # both sides have as many, so that either pass may come first; `_cut` drops the rest
        longest = max(self.preprocess.image_size)
        indices = torch.arange(longest, dtype=torch.float64, device=side.device)
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


class _Taps(NamedTuple):
    """The pixels of a side that become each pixel of a resized side.

    Attributes:
        places: Their indices along the side, [count, taps].
        weights: Pillow's integers, 0 for pixels beyond the filter, the image or the border.
    """

    places: Int64[Tensor, "count taps"]
    weights: Int32[Tensor, "count taps"]


def compute_taps(
    side: Float64[Tensor, ""],
    place: _Place,
    *,
    count: int | torch.SymInt,
    interpolation: Interpolation,
) -> _Taps:
    """Compute Pillow's integer weights for the pixels of a resized side.

    Args:
        side: Pixels of the side.
        place: The part of the side, and the pixels that are computed of it.
        count: Number of taps.
        interpolation: The filter.
    """
    # Pillow takes a box in float32
    start = place.start.float()
    scale = (place.stop.float() - start).double() / place.target
    stretch = scale.clamp(min=1.0)  # antialiasing: the filter grows with the reduction
    radius = _RADIUS[interpolation] * stretch

    centres = start.double() + (place.indices[:, None] + 0.5) * scale  # [count, 1]
    # pixels that the filter reaches; their weights sum to one, then are integers of 22 bits
    begin = (centres - radius + 0.5).floor().clamp(min=0)
    end = torch.minimum((centres + radius + 0.5).floor(), side)
    positions = begin + torch.arange(count, dtype=torch.float64, device=side.device)
    x = ((positions - centres + 0.5) * (1 / stretch)).abs()  # [count, taps]
    values = 1 - x
    if interpolation == "bicubic":  # Keys 1981, with a = -0.5
        values = torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5)
    values = torch.where((positions < end) & (x < _RADIUS[interpolation]), values, 0.0)
    values = values / values.sum(dim=1, keepdim=True) * _UNIT
    integers = values.sign() * (values.abs() + 0.5).floor()
    weights = torch.where(place.is_inside[:, None], integers, 0.0)
    # a border's pixels are anywhere
    places = torch.minimum(positions.clamp(min=0), side - 1)
    return _Taps(places.long(), weights.int())


def _turn(
    pixels: UInt8[Tensor, "B height width 3"],
    sizes: Int64[Tensor, "2"],
    is_turned: Bool[Tensor, ""],
) -> UInt8[Tensor, "B side others 3"]:
    """Transpose images of these sizes (height, width), or leave them as they are."""
    strides = torch.stack([sizes[1], torch.ones_like(sizes[1])])
    side, others = torch.where(is_turned, sizes.flip(0), sizes).tolist()
    down, across = torch.where(is_turned, strides.flip(0), strides)
    rows, columns = (torch.arange(size, device=pixels.device) for size in (side, others))
    places = rows[:, None] * down + columns * across
    turned = pixels.flatten(1, 2).index_select(1, places.flatten())
    return torch.unflatten(turned, 1, places.shape)


def _weigh(
    pixels: UInt8[Tensor, "B side others 3"], taps: _Taps
) -> UInt8[Tensor, "B count others 3"]:
    """Sum the pixels of the taps by their integer weights, and round to 0…255."""
    lines = pixels.flatten(2)
    parts = [torch.unflatten(values, 1, (_NUM_PARTS, -1)).transpose(0, 1) for values in taps]
    sums = torch.tensor(_UNIT // 2, dtype=torch.int32, device=pixels.device)
    for part in range(_NUM_PARTS):
        places, weights = (values[part] for values in parts)
        reached = lines.index_select(1, places.flatten())
        reached = torch.unflatten(reached, 1, places.shape)  # [B, count, taps, others * 3]
        sums = sums + (reached.int() * weights[..., None]).sum(2, dtype=torch.int32)
    rounded = (sums.clamp(min=0) // _UNIT).clamp(max=255)
    return torch.unflatten(rounded.to(torch.uint8), 2, (-1, 3))
