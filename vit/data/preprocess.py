"""From RGB pixels to the model's input.

torch is imported only where tensors are made, so that decoding processes start in a fraction of a
second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from PIL import Image

from vit.data.images import to_rgb
from vit.runtime.arguments import MAX_SIDE, check_choice

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, UInt8
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class Geometry:
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
        crop_pct: Side of the input as a fraction of the scaled image, in (0, 1].
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        interpolation: Pillow's filter.

    Raises:
        ValueError: A value is out of range.
    """

    image_size: tuple[int, int]
    crop_pct: float = 1.0
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct {self.crop_pct} must be in (0, 1]")
        if not 1 <= min(self.image_size) <= max(self.image_size) <= self.crop_pct * MAX_SIDE:
            limit = f"must be positive, and at most crop_pct x {MAX_SIDE:,}"
            raise ValueError(f"image_size {self.image_size} {limit}")
        # far beyond these, normalised pixels overflow and the logits are NaN
        if not all(abs(value) <= 1e3 for value in self.mean):
            raise ValueError(f"mean {self.mean} must be within ±1000")
        if not all(1e-6 <= value <= 1e6 for value in self.std):
            raise ValueError(f"std {self.std} must be from 1e-6 to 1e6")
        check_choice(self.interpolation, get_args(Interpolation), name="interpolation")

    @property
    def resize_size(self) -> tuple[int, int]:
        """Height and width that the image covers before the centre crop."""
        height, width = self.image_size
        return round(height / self.crop_pct), round(width / self.crop_pct)

    def to_uint8(self, image: Image.Image) -> np.ndarray:
        """Return the input's pixels [H, W, 3] of an image of any mode."""
        if image.mode != "RGB":
            image = to_rgb(image)
        height, width = self.resize_size
        if image.size != (width, height):
            resampling = Image.Resampling[self.interpolation.upper()]
            image = image.resize((width, height), resampling, box=self._cover(image.size))
        return self.crop(np.asarray(image))

    def crop(self, pixels: np.ndarray) -> np.ndarray:
        """Cut the centre [..., H, W, 3] from pixels stored at `resize_size`, [..., H', W', 3]."""
        height, width = self.image_size
        top, left = self._margins()
        return pixels[..., top : top + height, left : left + width, :]

    def geometry(self, size: tuple[int, int]) -> Geometry:
        """Compute the part of an image of `size` (width, height) that `to_uint8` returns."""
        height, width = self.image_size
        left, top, right, _ = self._cover(size)
        # original pixels per pixel of the input
        scale = (right - left) / self.resize_size[1]
        margin_top, margin_left = self._margins()
        left += margin_left * scale
        top += margin_top * scale
        return Geometry(size, box=(left, top, left + width * scale, top + height * scale))

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

    def _cover(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Find the largest centred box of an image of `size` (width, height) that has the aspect of
        `resize_size`."""
        width, height = size
        target_height, target_width = self.resize_size
        # original pixels per target pixel that fit in both directions
        scale = min(width / target_width, height / target_height)
        box_width = target_width * scale
        box_height = target_height * scale
        # Pillow refuses a box that rounding has pushed over an edge
        left = max((width - box_width) / 2, 0.0)
        top = max((height - box_height) / 2, 0.0)
        return left, top, min(left + box_width, width), min(top + box_height, height)

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
