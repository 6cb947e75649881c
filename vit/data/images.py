"""From a file to RGB pixels, and from RGB pixels to what the model takes.

torch is imported only where tensors are made, so that decoding processes start in a fraction of a
second.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vit.runtime.arguments import MAX_SIDE, check_choice, check_kind
from vit.runtime.files import open_regular

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, UInt8
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
ImageInput = str | Path | Image.Image | np.ndarray
ImageInputs = ImageInput | Iterable[ImageInput]
Interpolation = Literal["bicubic", "bilinear"]
_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}

IMAGE_SUFFIXES = (
    ".avif",
    ".bmp",
    ".gif",
    ".jfif",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
# photos of telephones, which the package pillow-heif reads
HEIF_SUFFIXES = (".heic", ".heif")
HEIF_HINT = "pip install 'vit-pipeline[heic]' reads .heic"
# what image files are opened as, whatever their names: some of Pillow's other formats start
# programs
IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# A file of some kB may hold very many pixels. The threads of a pool decode images of more than this
# one at a time, each in a new thread: glibc keeps the memory that a thread's allocations took, so
# that eight threads would keep eight large images.
_LARGE_PIXELS = 25_000_000
# of more pixels none is decoded, unless the environment's VIT_MAX_PIXELS says another number
_MAX_PIXELS = 100_000_000
_MAX_PIXELS_HINT = "set VIT_MAX_PIXELS in the environment to read it"
_large_image_lock = threading.Lock()

# that are converted or hashed at once
_BAND_PIXELS = 2**22


@cache
def has_heif() -> bool:
    """Whether the package that reads HEIC is installed; Pillow knows of it then."""
    try:
        from pillow_heif import register_heif_opener  # type: ignore[import-not-found]  # an extra
    except ImportError:
        return False
    register_heif_opener()
    return True


def is_image_name(path: str) -> bool:
    """Whether a file is an image that is read, by its suffix; hidden ones are not."""
    # Path.suffix would take many times longer
    text = path.lower()
    has_suffix = text.endswith(IMAGE_SUFFIXES) or (text.endswith(HEIF_SUFFIXES) and has_heif())
    return has_suffix and not os.path.basename(path).startswith(".")


def read_image(
    file: Path | BinaryIO, *, name: str = "image", draft_side: int | None = None
) -> Image.Image:
    """Decode an image file of any mode into upright RGB.

    EXIF rotation is applied, 16-bit grey is scaled to 8 bits, transparency is laid on white, and of
    an animation the first frame is taken.

    Args:
        file: a path, or a file opened for reading bytes.
        name: of an opened file, in messages.
        draft_side: pixels of a side that are enough: JPEG files are decoded at an eighth of their
            size or more, in a fraction of the time. None: the full size.

    Raises:
        ValueError: the file is truncated, is not an image, or has more than 100 million pixels (or
            those of the environment's VIT_MAX_PIXELS).
        FileNotFoundError: there is no such file.
    """
    if isinstance(file, Path):
        try:
            with open_regular(file) as opened:
                return read_image(opened, name=str(file), draft_side=draft_side)
        except IsADirectoryError as error:
            text = "is a folder that holds no images, or can't be read"
            raise ValueError(f"{file} {text}") from error

    try:
        # Pillow warns about odd metadata and large images; neither changes the pixels
        formats = (*IMAGE_FORMATS, "HEIF") if has_heif() else IMAGE_FORMATS
        max_pixels = _max_pixels()
        # Pillow has a limit of its own
        if max_pixels > _MAX_PIXELS:
            Image.MAX_IMAGE_PIXELS = max_pixels
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=formats) as image:
            num_pixels = image.width * image.height
            if num_pixels > max_pixels:
                text = f"it has {image.width:,} x {image.height:,} pixels, more than {max_pixels:,}"
                raise ValueError(f"{text}; {_MAX_PIXELS_HINT}")
            if draft_side is not None:
                image.draft("RGB", (draft_side, draft_side))
            is_large = num_pixels > _LARGE_PIXELS
            # the main thread doesn't wait: a process forked while the lock is held would wait for
            # ever
            if is_large and threading.current_thread() is not threading.main_thread():
                with _large_image_lock, ThreadPoolExecutor(1) as decoder:
                    return decoder.submit(_decode, image).result()
            return _decode(image)
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} can't be read as an image: {_explain_format(file)}") from error
    except Image.DecompressionBombError as error:
        text = f"it has more than {max_pixels:,} pixels; {_MAX_PIXELS_HINT}"
        raise ValueError(f"{name} can't be read as an image: {text}") from error
    except Exception as error:
        # Pillow's decoders answer broken bytes with nearly any
        reason = re.sub(r" object at 0x[0-9a-f]+", "", str(error)) or type(error).__name__
        raise ValueError(f"{name} can't be read as an image: {reason}") from error


def _max_pixels() -> int:
    text = os.environ.get("VIT_MAX_PIXELS") or str(_MAX_PIXELS)
    if not text.isdecimal():
        raise ValueError(f"VIT_MAX_PIXELS={text} in the environment is not a number of pixels")
    return int(text)


def _explain_format(file: BinaryIO) -> str:
    """Why none of our decoders takes a file."""
    file.seek(0)
    header = file.read(12)
    if not header:
        return "it is empty"
    if header[4:8] == b"ftyp" and header[8:11] in (b"hei", b"hev", b"mif", b"msf"):
        return f"it is HEIC; {HEIF_HINT}"
    return f"it is not one of {', '.join(IMAGE_FORMATS)}"


def _decode(image: Image.Image) -> Image.Image:
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as RGB: 16-bit grey scaled to 8, transparency laid on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image

    # the copies in between take up to 8 times the memory of the result
    if image.width * image.height <= _BAND_PIXELS:
        return _convert(image)
    rgb = Image.new("RGB", image.size)
    for top, band in divide(image):
        rgb.paste(_convert(band), (0, top))
    return rgb


def divide(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Bands of an image from the top down, each with the row that it begins at: what is done to
    these takes little memory."""
    band_height = max(_BAND_PIXELS // max(image.width, 1), 1)
    for top in range(0, image.height, band_height):
        bottom = min(top + band_height, image.height)
        yield top, image.crop((0, top, image.width, bottom))


def _convert(image: Image.Image) -> Image.Image:
    # 16-bit grey, also when Pillow widens it to 32 bits
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError(
            "floating-point pixels have no fixed range; save it with 8 or 16 bits a channel"
        )
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        # premultiplied: Pillow converts these to LA and RGBA alone
        if image.mode in ("La", "RGBa"):
            image = image.convert(image.mode.upper())
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


@dataclass(frozen=True)
class Geometry:
    """Where the model's input lies on an upright image."""

    # width, height
    original_size: tuple[int, int]
    # left, top, right, bottom in that image's pixels
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Preprocess:
    """From a PIL image to the model's input, the same way in training, evaluation and explanation.

    The image is scaled to cover `resize_size` (aspect kept, antialiased), and `image_size` is cut
    from its centre.

    Args:
        image_size: height and width of the model's input.
        crop_pct: the input's part of the scaled image, in (0, 1].
        mean: of each channel, for pixels in [0, 1].
        std: of each channel, for pixels in [0, 1].
        interpolation: Pillow's filter.

    Raises:
        ValueError: a value is out of range.
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
        check_choice(self.interpolation, _RESAMPLING, name="interpolation")

    @property
    def resize_size(self) -> tuple[int, int]:
        """Height and width that the image covers before the centre crop."""
        height, width = self.image_size
        return round(height / self.crop_pct), round(width / self.crop_pct)

    def to_uint8(self, image: Image.Image) -> np.ndarray:
        """Pixels [H, W, 3] of an image of any mode."""
        if image.mode != "RGB":
            image = to_rgb(image)
        height, width = self.resize_size
        if image.size != (width, height):
            resampling = _RESAMPLING[self.interpolation]
            image = image.resize((width, height), resampling, box=self._cover(image.size))
        return self.crop(np.asarray(image))

    def crop(self, pixels: np.ndarray) -> np.ndarray:
        """Cut the centre [..., H, W, 3] from pixels stored at `resize_size`, [..., H', W', 3]."""
        height, width = self.image_size
        top, left = self._margins()
        return pixels[..., top : top + height, left : left + width, :]

    def geometry(self, size: tuple[int, int]) -> Geometry:
        """What `to_uint8` takes of an image of `size` (width, height)."""
        height, width = self.image_size
        left, top, right, _ = self._cover(size)
        # original pixels per pixel of the input
        scale = (right - left) / self.resize_size[1]
        margin_top, margin_left = self._margins()
        left += margin_left * scale
        top += margin_top * scale
        return Geometry(size, box=(left, top, left + width * scale, top + height * scale))

    def normalize(self, pixels: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B 3 H W"]:
        """Pixels 0..255 to the model's input range."""
        import torch

        scale, shift = self.scale_and_shift(pixels.device)
        channels_first = pixels.permute(0, 3, 1, 2).float()  # [B, 3, H, W]
        return torch.addcmul(shift.view(3, 1, 1), channels_first, scale.view(3, 1, 1))

    def scale_and_shift(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Two tensors [3]: a pixel of 0..255 becomes pixel * scale + shift."""
        return _scale_and_shift(tuple(self.mean), tuple(self.std), str(device))

    def __call__(self, images: Sequence[Image.Image]) -> Float[Tensor, "B 3 H W"]:
        """The model's input for RGB images of any sizes."""
        import torch

        pixels = np.stack([self.to_uint8(image) for image in images])
        return self.normalize(torch.from_numpy(pixels))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """The inverse of `to_dict`; what is missing is the default."""
        arguments: Any = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**arguments)

    def _cover(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """The centred box of the original (width, height) that has the aspect of `resize_size`."""
        width, height = size
        target_height, target_width = self.resize_size
        # original pixels per target pixel, as many as fit in both directions
        scale = min(width / target_width, height / target_height)
        box_width = target_width * scale
        box_height = target_height * scale
        # max, min: Pillow refuses a box that rounding pushed over an edge
        left = max((width - box_width) / 2, 0.0)
        top = max((height - box_height) / 2, 0.0)
        return left, top, min(left + box_width, width), min(top + box_height, height)

    def _margins(self) -> tuple[int, int]:
        """Above and to the left of the centre crop."""
        height, width = self.resize_size
        crop_height, crop_width = self.image_size
        return (height - crop_height) // 2, (width - crop_width) // 2


# else each batch would copy them to the device again
@lru_cache
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: str
) -> tuple[Tensor, Tensor]:
    import torch

    # what is made in inference mode could not be differentiated through elsewhere
    with torch.inference_mode(False):
        means, stds = torch.tensor([mean, std], dtype=torch.float64)
        scale = 1 / (255 * stds)
        shift = -means / stds
        return scale.float().to(device), shift.float().to(device)


def list_images(images: ImageInputs) -> Iterator[str | Image.Image]:
    """Each image as the path of a file or as an upright PIL image in RGB, in order.

    Args:
        images: paths, PIL images or arrays, one or several. A folder stands for the image files
            below it, sorted. An array (or torch tensor) is uint8 [H, W, 3], [H, W] or, of several
            images, [N, H, W, 3]. A path that doesn't exist is passed on, since reading it says so,
            and in a list a folder without images too.

    Raises:
        ValueError: a folder by itself has no images, or an array is of another kind.
    """
    if isinstance(images, str | Path):
        # not Path.is_dir, which raises for a name of 300 characters
        if not os.path.isdir(images):
            yield str(images)
            return
        paths = _list_folder(images)
        if not paths:
            raise ValueError(f"{images} holds no images")
        yield from paths
    elif isinstance(images, Image.Image):
        # Pillow would copy also what is upright
        is_upright = images.getexif().get(ExifTags.Base.Orientation, 1) == 1
        yield to_rgb(images if is_upright else ImageOps.exif_transpose(images))
    # before sequences: arrays and tensors are iterable, too
    elif hasattr(images, "__array__"):
        yield from _list_array(np.asarray(images))
    else:
        expected = "a path, an image, an array or a list of them"
        check_kind(images, Iterable, name="images", expected=expected)
        for image in images:
            if isinstance(image, str | Path) and os.path.isdir(image):
                yield from _list_folder(image) or [str(image)]
            else:
                yield from list_images(image)


def _list_array(pixels: np.ndarray) -> Iterator[Image.Image]:
    is_color = pixels.ndim in (3, 4) and pixels.shape[-1] == 3
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or is_color):
        raise ValueError(
            f"an array of {pixels.dtype} {list(pixels.shape)} is not an image; pass uint8 of 0 to "
            "255, [H, W, 3] or [H, W]"
        )
    if pixels.ndim < 4:
        pixels = pixels[None]
    for image in pixels:
        yield Image.fromarray(image).convert("RGB")


def _list_folder(folder: str | Path) -> list[str]:
    return sorted(filter(is_image_name, list_files(folder)))


def list_files(
    folder: str | Path,
    *,
    hidden: bool = True,
    check_link: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Files below a folder, those of each directory in sorted order.

    Args:
        folder: its directories that can't be read are left out where links are not followed.
        hidden: whether directories whose names begin with a dot are read.
        check_link: called with each link, to a file or a directory, before it is followed; None:
            links to directories are not followed.

    Raises:
        OSError: a directory can't be read.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        directory = waiting.pop()
        # one level at a time: os.walk recurses, and folders may be nested deeper than Python's stack
        try:
            with os.scandir(directory) as entries:
                sorted_entries = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            if check_link is not None and os.path.exists(directory):
                raise
            continue

        subfolders = []
        for entry in sorted_entries:
            is_link = entry.is_symlink()
            # of a link that leads to itself, is_dir raises
            is_folder = os.path.isdir(entry.path) if is_link else entry.is_dir()
            if is_folder and not hidden and entry.name.startswith("."):
                continue
            if is_link and check_link is not None:
                check_link(entry.path)
            if not is_folder:
                yield entry.path
            elif check_link is not None or not is_link:
                subfolders.append(entry.path)
        # the last of `waiting` is read first
        waiting += reversed(subfolders)
