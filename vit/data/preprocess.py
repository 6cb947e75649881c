"""From RGB pixels to the model's input. torch is imported only where tensors are made, so that
decoding processes start in a fraction of a second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from PIL import Image

from vit.data.depth import DeepImage
from vit.data.images import to_rgb
from vit.runtime.arguments import MAX_SIDE, check_choice

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, UInt8
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Interpolation = Literal["bicubic", "bilinear"]
ResizeMode = Literal["crop", "stretch"]


class Geometry(NamedTuple):
    """Place of the model's input on an upright image.

    Attributes:
        original_size: Width and height of the image.
        box: Left, top, right and bottom of the input, in pixels of the image.
    """

    original_size: tuple[int, int]
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Preprocess:
    """From a PIL image to the model's input, the same way in training, evaluation and explanation.

    The image is scaled to cover `resize_size` (aspect kept, antialiased), and `image_size` is cut
    from its centre.

    Args:
        image_size: Height and width of the model's input.
        crop_pct: Side of the input as a fraction of the scaled image, in (0, 1]; of the mode
            "crop".
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        interpolation: Pillow's filter.
        value_range: Values that become black and white in images of more than 8 bits a channel.
            None: the model was trained on 8 bits, and refuses them.
        resize_mode: "crop"; or "stretch", which scales the whole image to `image_size` in both
            directions.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> preprocess = vit.Preprocess(image_size=(224, 224), crop_pct=0.9)
        >>> vit.explain(my_model, "photo.png", preprocess=preprocess)
    """

    image_size: tuple[int, int]
    crop_pct: float = 1.0
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Interpolation = "bicubic"
    value_range: tuple[float, float] | None = None
    resize_mode: ResizeMode = "crop"

    def __post_init__(self) -> None:
        check_choice(self.interpolation, get_args(Interpolation), name="interpolation")
        check_choice(self.resize_mode, get_args(ResizeMode), name="resize_mode")
        low, high = self.value_range or (0, 1)
        largest = self.crop_pct * MAX_SIDE
        is_right = {
            "crop_pct": 0 < self.crop_pct <= 1,
            "image_size": 1 <= min(self.image_size) <= max(self.image_size) <= largest,
            # far beyond these, normalised pixels overflow and the logits are NaN
            "mean": all(abs(value) <= 1e3 for value in self.mean),
            "std": all(1e-6 <= value <= 1e6 for value in self.std),
            "value_range": low < high and math.isfinite(high - low),
        }
        for name in is_right:
            if not is_right[name]:
                raise ValueError(f"{name} {getattr(self, name)} is out of range")

    @property
    def resize_size(self) -> tuple[int, int]:
        """Height and width that the image covers before the centre crop."""
        if self.resize_mode != "crop":
            return self.image_size
        height, width = self.image_size
        return round(height / self.crop_pct), round(width / self.crop_pct)

    def to_rgb(self, image: Image.Image) -> Image.Image:
        """Convert an image of any mode to RGB, with its values scaled by `value_range`."""
        image = to_rgb(image)
        if not isinstance(image, DeepImage):
            return image
        if self.value_range is None:
            raise ValueError(
                "the image has more than 8 bits a channel, and the model was trained on images of 8"
                " bits; save it with 8 bits"
            )
        return image.scale(*self.value_range)

    def to_uint8(self, image: Image.Image) -> np.ndarray:
        """Return the input's pixels [H, W, 3] of an image of any mode."""
        if 0 in image.size:
            raise ValueError("the image has no pixels")
        image = self.to_rgb(image)
        height, width = self.resize_size
        if image.size != (width, height):
            resample = Image.Resampling[self.interpolation.upper()]
            image = image.resize((width, height), resample, box=self._find_box(image.size))
        return self.crop(np.asarray(image))

    def crop(self, pixels: np.ndarray) -> np.ndarray:
        """Cut the centre [..., H, W, 3] from pixels stored at `resize_size`, [..., H', W', 3]."""
        height, width = self.image_size
        top, left = self._margins
        return pixels[..., top : top + height, left : left + width, :]

    def geometry(self, size: tuple[int, int]) -> Geometry:
        """Compute the part of an image of `size` (width, height) that `to_uint8` returns."""
        left, top, right, bottom = self._find_box(size)
        height, width = self.resize_size
        # original pixels per pixel of the input
        across, down = (right - left) / width, (bottom - top) / height
        top_margin, left_margin = self._margins
        left += left_margin * across
        top += top_margin * down
        height, width = self.image_size
        return Geometry(size, box=(left, top, left + width * across, top + height * down))

    def normalize(self, pixels: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 3 H W"]:
        """Scale and shift pixels 0..255 to the model's input range."""
        import torch

        scale, shift = self.scale_and_shift(pixels.device)
        return torch.addcmul(shift, pixels.permute(0, 3, 1, 2).float(), scale)

    def scale_and_shift(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return two tensors [3, 1, 1], scale and shift, for pixels of 0..255."""
        return _scale_and_shift(tuple(self.mean), tuple(self.std), str(device))

    def __call__(self, images: Sequence[Image.Image]) -> Float[Tensor, "B 3 H W"]:
        """Return the model's input for RGB images of any sizes."""
        import torch

        pixels = np.stack([self.to_uint8(image) for image in images])
        return self.normalize(torch.from_numpy(pixels))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """Return the inverse of `to_dict`; missing values are the defaults."""
        arguments: Any = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**arguments)

    def _find_box(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Find the part of an image of `size` (width, height) that is resized to `resize_size`: all
        of it, or the largest centred box of that aspect."""
        width, height = size
        if self.resize_mode == "stretch":
            return 0, 0, width, height
        target_height, target_width = self.resize_size
        scale = min(width / target_width, height / target_height)
        box_width, box_height = target_width * scale, target_height * scale
        # Pillow refuses a box that rounding has pushed over an edge
        left, top = max((width - box_width) / 2, 0.0), max((height - box_height) / 2, 0.0)
        return left, top, min(left + box_width, width), min(top + box_height, height)

    @property
    def _margins(self) -> tuple[int, int]:
        """Rows above the centre crop, and columns to its left."""
        height, width = self.resize_size
        crop_height, crop_width = self.image_size
        return (height - crop_height) // 2, (width - crop_width) // 2


# cached, so that not every batch copies them to the device
@lru_cache
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: str
) -> tuple[Tensor, Tensor]:
    import torch

    # gradients can't flow through tensors that are made in inference mode
    with torch.inference_mode(False):
        means, stds = torch.tensor([mean, std], dtype=torch.float64).view(2, 3, 1, 1)
        scale = 1 / (255 * stds)
        shift = -means / stds
        return scale.float().to(device), shift.float().to(device)
