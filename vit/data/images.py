"""From a file to RGB pixels, and from RGB pixels to what the model takes.

torch is imported only where tensors are made, so that decoding processes start in a fraction of a second.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vit.runtime.arguments import MOST_PIXELS
from vit.runtime.files import open_regular

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, UInt8
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Interpolation = Literal["bicubic", "bilinear"]
_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


# what image files are opened as, whatever their names: some of Pillow's other formats start programs
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_BAND = 2**22  # pixels that are converted at once
_LARGE = 50_000_000  # pixels of an image that one process decodes at a time: a file of some kB may hold so many


def read_image(file: Path | BinaryIO, *, name: str | None = None) -> Image.Image:
    """Decode an image file of any mode into upright RGB; `name` stands for it in messages.

    EXIF rotation is applied, 16-bit grey is scaled to 8, transparency is laid on white, an animation gives its first
    frame. Raises ValueError when the file is truncated or no image, FileNotFoundError when it is absent.
    """
    with open_image(file, name=name) as image:
        return image


@contextmanager
def open_image(file: Path | BinaryIO, *, name: str | None = None) -> Iterator[Image.Image]:
    """`read_image` for as long as the context lasts: of all threads together only so many pixels are decoded at once
    that they fit into memory, and of all processes one large image. Open no second one inside it."""
    with ExitStack() as stack:
        with open_header(file, name=name) as image:
            stack.enter_context(_in_flight.hold(image.width * image.height))
            if image.width * image.height > _LARGE:
                stack.enter_context(_wait_for_other_processes())
            encoding = image.format, _estimate_jpeg_quality(getattr(image, "quantization", None))
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            image = to_rgb(image)
        image.info["encoding"] = encoding
        yield image


@contextmanager
def open_header(file: Path | BinaryIO, *, name: str | None = None) -> Iterator[Image.Image]:
    """An image file of which format and size were read, and no pixel yet; raises as `read_image`, also for what fails
    inside the context."""
    name = name or str(file if isinstance(file, Path) else getattr(file, "name", "image"))
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(open_regular(file)) if isinstance(file, Path) else file
        except IsADirectoryError as error:
            raise ValueError(f"{name} is a folder that holds no images, or can't be read") from error
        try:
            # Pillow warns about odd metadata and big pictures; neither changes the pixels we return
            with warnings.catch_warnings(action="ignore"):
                yield stack.enter_context(Image.open(opened, formats=FORMATS))
        except UnidentifiedImageError as error:
            raise ValueError(f"{name} can't be read as an image: it is none of {', '.join(FORMATS)}") from error
        except Exception as error:  # Pillow's decoders answer broken bytes with nearly any
            reason = re.sub(r" object at 0x[0-9a-f]+", "", str(error)) or type(error).__name__
            raise ValueError(f"{name} can't be read as an image: {reason}") from error


def check_header(file: Path | BinaryIO, *, name: str | None = None) -> None:
    """Read format and size of an image file; raises as `read_image`."""
    with open_header(file, name=name):
        pass


def _estimate_jpeg_quality(tables: Mapping[int, Sequence[int]] | None) -> float:
    """libjpeg's quality, 1 to 100, whose luminance table sums up to the same; NaN without tables."""
    scale = sum(tables[0]) / 3688 if tables and 0 in tables else math.nan  # the sum at quality 50
    return scale if math.isnan(scale) else round(100 - 50 * scale if scale <= 1 else 50 / scale)


def keep_pixels(image: Image.Image) -> Image.Image | None:
    """The image, where its pixels and those of all others that are kept so fit into memory."""
    return image if _kept.keep(image) else None


class _PixelsInFlight:
    """Lets threads hold at most `most` pixels together; one image may have more."""

    def __init__(self, most: int) -> None:
        self.most = self._free = most
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        count = min(count, self.most)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            self._release(count)

    def keep(self, image: Image.Image) -> bool:
        """Whether there is room for the image: it is taken until the image is freed."""
        count = image.width * image.height
        with self._changed:
            if count > self._free:
                return False
            self._free -= count
        weakref.finalize(image, self._release, count).atexit = False
        return True

    def _release(self, count: int) -> None:
        with self._changed:
            self._free += count
            self._changed.notify_all()


_in_flight, _kept = _PixelsInFlight(100_000_000), _PixelsInFlight(100_000_000)
os.register_at_fork(after_in_child=lambda: _in_flight.__init__(_in_flight.most))  # type: ignore[misc]


@contextmanager
def _wait_for_other_processes() -> Iterator[None]:
    """Those that decode large images, too: each has an `_in_flight` of its own."""
    with open(__file__, "rb") as file:  # any that all of them have
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB: 16-bit grey scaled to 8, transparency laid on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    rows = max(_BAND // max(image.width, 1), 1)
    if image.height <= rows:
        return _convert(image)
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        whole.paste(_convert(image.crop((0, top, image.width, min(top + rows, image.height)))), (0, top))
    return whole


def _convert(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey, also when Pillow widens it to 32 bits
        grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; save it with 8 or 16 bits a channel")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = (image.convert(image.mode.upper()) if image.mode in ("La", "RGBa") else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


@dataclass(frozen=True)
class Geometry:
    """Where the model's input lies on an upright image."""

    original_size: tuple[int, int]  # width, height
    box: tuple[float, float, float, float]  # left, top, right, bottom in that image's pixels


@dataclass(frozen=True)
class Preprocess:
    """From a PIL image to the model's input, the same way in training, evaluation and explanation.

    The image is scaled to cover `resize_size` (aspect kept, antialiased), and `image_size` (H, W) is cut from
    its centre. `mean` and `std` are of pixels in [0, 1].
    """

    image_size: tuple[int, int]
    crop_pct: float = 1.0
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        if min(self.image_size) < 1:
            raise ValueError(f"image_size {self.image_size} must be two positive numbers")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct {self.crop_pct} must be in (0, 1]")
        if not max(self.image_size) <= self.crop_pct * MOST_PIXELS:
            sides = f"image_size {self.image_size} and crop_pct {self.crop_pct}"
            raise ValueError(f"{sides} ask for images of more than {MOST_PIXELS:,} pixels a side")
        # of pixels in [0, 1], or of 0..255; far beyond, normalised pixels overflow and the logits are NaN
        if not all(abs(value) <= 1e3 for value in self.mean) or not all(1e-6 <= value <= 1e6 for value in self.std):
            raise ValueError(f"mean {self.mean} must be within ±1000, and std {self.std} from 1e-6 to 1e6")
        if self.interpolation not in _RESAMPLING:
            raise ValueError(f"unknown interpolation {self.interpolation!r}; known: {', '.join(_RESAMPLING)}")

    @property
    def resize_size(self) -> tuple[int, int]:
        """(H', W') that the whole image covers before the centre crop."""
        height, width = self.image_size
        return round(height / self.crop_pct), round(width / self.crop_pct)

    def to_uint8(self, image: Image.Image) -> np.ndarray:
        """Pixels [H, W, 3] of an image of any mode."""
        size, image = self.resize_size[::-1], image if image.mode == "RGB" else to_rgb(image)
        if image.size != size:
            image = image.resize(size, _RESAMPLING[self.interpolation], box=self._cover(image.size))
        return self.crop(np.asarray(image))

    def crop(self, pixels: np.ndarray) -> np.ndarray:
        """Cut the centre [..., H, W, 3] from pixels stored at `resize_size`, [..., H', W', 3]."""
        top, left = self._margins()
        return pixels[..., top : top + self.image_size[0], left : left + self.image_size[1], :]

    def geometry(self, size: tuple[int, int]) -> Geometry:
        """What `to_uint8` takes of an image of `size` (width, height)."""
        left, top, right, _ = self._cover(size)
        pixel = (right - left) / self.resize_size[1]  # original pixels per pixel of the input
        (margin_top, margin_left), (height, width) = self._margins(), self.image_size
        left, top = left + margin_left * pixel, top + margin_top * pixel
        return Geometry(original_size=size, box=(left, top, left + width * pixel, top + height * pixel))

    def normalize(self, pixels: UInt8[Tensor, "B _ _ _"]) -> Float[Tensor, "B 3 H W"]:
        """Pixels 0..255, [B, H, W, 3] or [B, 3, H, W], to the model's input range."""
        import torch

        if pixels.shape[-1] == 3 and pixels.shape[1] != 3:
            pixels = pixels.permute(0, 3, 1, 2)  # [B, 3, H, W]
        scale, shift = self.scale_and_shift(pixels.device)
        return torch.addcmul(shift.view(3, 1, 1), pixels.float(), scale.view(3, 1, 1))

    def scale_and_shift(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """(scale, shift), each [3]: a pixel of 0..255 becomes pixel * scale + shift. The same two tensors each time."""
        return _scale_and_shift(tuple(self.mean), tuple(self.std), str(device))

    def __call__(self, images: Sequence[Image.Image]) -> Float[Tensor, "B 3 H W"]:
        """The model's input for RGB images of any sizes."""
        import torch

        return self.normalize(torch.from_numpy(np.stack([self.to_uint8(image) for image in images])))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """The inverse of `to_dict`; reads the earlier name of `crop_pct`, crop_fraction, too."""
        values = {"crop_pct" if key == "crop_fraction" else key: value for key, value in values.items()}
        tuples: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**tuples)

    def _cover(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """The centred box of the original (width, height) that has the aspect of `resize_size`."""
        (width, height), (target_height, target_width) = size, self.resize_size
        pixel = min(width / target_width, height / target_height)
        # max, min: Pillow refuses a box that rounding pushed over an edge
        left = max((width - target_width * pixel) / 2, 0.0)
        top = max((height - target_height * pixel) / 2, 0.0)
        return left, top, min(left + target_width * pixel, width), min(top + target_height * pixel, height)

    def _margins(self) -> tuple[int, int]:
        (height, width), (inner_height, inner_width) = self.resize_size, self.image_size
        return (height - inner_height) // 2, (width - inner_width) // 2


@lru_cache  # else each batch would copy them to the device again
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: str) -> tuple[Tensor, Tensor]:
    import torch

    with torch.inference_mode(False):  # or what is made in it could not be differentiated through elsewhere
        means, stds = torch.tensor([mean, std], dtype=torch.float64)
        return (1 / (255 * stds)).float().to(device), (-means / stds).float().to(device)
