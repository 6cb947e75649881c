"""The preprocessing of this folder for transformers, with the pixels that the model was evaluated on.

AutoImageProcessor.from_pretrained("FOLDER", trust_remote_code=True)
"""

import os

import numpy as np
from PIL import Image
from transformers import BatchFeature, ImageProcessingMixin
from transformers.image_utils import load_image
from transformers.processing_utils import ImagesKwargs

from .read_image import read_rgb


def from_array(array, channels_first=None):
    """Convert an array or tensor [H, W, C], [C, H, W] or [H, W], of whole numbers from 0 to 255 or of
    floats from 0 to 1."""
    array = np.asarray(array.cpu() if hasattr(array, "cpu") else array)
    channels = (1, 3, 4)
    if array.ndim == 3:
        if channels_first is None:
            channels_first = array.shape[-1] not in channels and array.shape[0] in channels
        array = np.moveaxis(array, 0, -1) if channels_first else array
    if array.ndim not in (2, 3) or array.shape[2:] not in ((), (1,), (3,), (4,)):
        raise ValueError(f"an image is [H, W, 3], [3, H, W] or [H, W], not {list(array.shape)}")
    highest = 1 if array.dtype.kind == "f" else 255
    if array.min() < 0 or array.max() > highest:
        limits = f"{array.min():g} to {array.max():g}"
        raise ValueError(f"{array.dtype} values are 0 to {highest}, not {limits}; scale them")
    array = np.rint(array * (255 / highest)).astype(np.uint8)
    return Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array)


class ViTProcessor(ImageProcessingMixin):
    """Scales an image to cover `resize_size`, crops `image_size` (height, width) from its centre, and
    normalises it. In the modes "pad" and "stretch" it shows the whole image. Images are files,
    addresses, images of PIL, or arrays and tensors (see `from_array`), one or several."""

    model_input_names = ("pixel_values",)
    valid_kwargs = ImagesKwargs  # the library requires it

    def __call__(self, images, return_tensors=None, input_data_format=None):
        if isinstance(images, list | tuple) and isinstance(images[0], list | tuple):
            images = np.asarray(images)
        if not isinstance(images, list | tuple):
            images = list(images) if getattr(images, "ndim", 0) == 4 else [images]
        first = None if input_data_format is None else input_data_format == "channels_first"
        pixels = np.stack([self._resize(self._read(image, first)) for image in images])
        std = np.float64(self.image_std)
        scale = (1 / (255 * std)).astype(np.float32)
        shift = (-np.float64(self.image_mean) / std).astype(np.float32)
        values = (pixels.astype(np.float32) * scale + shift).transpose(0, 3, 1, 2)
        return BatchFeature({"pixel_values": values}, tensor_type=return_tensors)

    def _read(self, image, channels_first):
        if isinstance(image, str) and not os.path.isfile(image):
            image = load_image(image)
        elif not isinstance(image, str | os.PathLike | Image.Image):
            image = from_array(image, channels_first)
        return read_rgb(image, self.value_range)

    def _resize(self, image):
        (height, width), (rows, columns) = self.resize_size, self.image_size
        across, down = image.width / width, image.height / height
        box, size = None, (width, height)
        if self.resize_mode == "crop":
            pixel = min(across, down)
            left = max((image.width - width * pixel) / 2, 0.0)
            top = max((image.height - height * pixel) / 2, 0.0)
            right = min(left + width * pixel, image.width)
            box = (left, top, right, min(top + height * pixel, image.height))
        elif self.resize_mode == "pad":
            pixel = max(across, down)
            sides = zip(image.size, size, strict=True)
            size = tuple(min(max(round(side / pixel), 1), limit) for side, limit in sides)
        image = image.resize(size, self.resample, box=box)
        if size != (width, height):
            padded = Image.new("RGB", (width, height), tuple(self.ground))
            padded.paste(image, ((width - size[0]) // 2, (height - size[1]) // 2))
            image = padded
        left, top = (width - columns) // 2, (height - rows) // 2
        return np.asarray(image.crop((left, top, left + columns, top + rows)))
