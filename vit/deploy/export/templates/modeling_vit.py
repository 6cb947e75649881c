"""The model of this folder for transformers, with its preprocessing.

AutoModelForImageClassification.from_pretrained("FOLDER", trust_remote_code=True)
pipeline("image-classification", model="FOLDER", trust_remote_code=True)
"""

import os

import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageOps
from transformers import (
    BatchFeature,
    ImageClassificationPipeline,
    ImageProcessingMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.image_utils import load_image
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.processing_utils import ImagesKwargs

from .timm_vit import build


class ViTConfig(PretrainedConfig):
    model_type = "vit_with_stem"


class ViTForImageClassification(PreTrainedModel):
    config_class = ViTConfig
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__(config)
        self.vit = build(**config.arguments)
        self.post_init()

    def forward(self, pixel_values, labels=None, **unused):
        logits = self.vit(pixel_values) / self.config.logit_temperature
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class ViTPipeline(ImageClassificationPipeline):
    """Passes images on as they are: the library's own pipeline converts them to RGB first, which cuts
    16-bit grey off at 255 and drops transparency."""

    def preprocess(self, image, timeout=None):
        return self.image_processor(image, return_tensors="pt").to(self.dtype)


def read_rgb(image):
    """Read a file, or convert an image of PIL in any mode, to upright RGB: 16-bit grey is scaled to
    8 bits, transparency becomes white."""
    if isinstance(image, str | os.PathLike) and os.path.isfile(image):
        # only these: some formats of Pillow start programs
        formats = ["AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]
        with Image.open(image, formats=formats) as opened:
            if opened.mode == "F" or opened.width * opened.height > 100_000_000:
                raise ValueError(f"{image} has floating-point pixels, or more than 100 million")
            image = ImageOps.exif_transpose(opened)
    elif isinstance(image, Image.Image):
        image = ImageOps.exif_transpose(image)
    else:
        image = load_image(image)  # a URL
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        image = Image.fromarray(((grey + 128) // 257).astype(np.uint8))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


class ViTProcessor(ImageProcessingMixin):
    """Scales an image to cover `resize_size`, crops `image_size` (height, width) from its centre, and
    normalises it."""

    model_input_names = ("pixel_values",)
    valid_kwargs = ImagesKwargs  # the library requires it

    def __call__(self, images, return_tensors=None, **unused):
        images = images if isinstance(images, list | tuple) else [images]
        pixels = np.stack([self._resize(read_rgb(image)) for image in images])
        std = np.float64(self.image_std)
        scale = (1 / (255 * std)).astype(np.float32)
        shift = (-np.float64(self.image_mean) / std).astype(np.float32)
        values = (pixels.astype(np.float32) * scale + shift).transpose(0, 3, 1, 2)
        return BatchFeature({"pixel_values": values}, tensor_type=return_tensors)

    def _resize(self, image):
        height, width = self.resize_size
        pixel = min(image.width / width, image.height / height)
        left = max((image.width - width * pixel) / 2, 0.0)
        top = max((image.height - height * pixel) / 2, 0.0)
        right = min(left + width * pixel, image.width)
        bottom = min(top + height * pixel, image.height)
        image = image.resize((width, height), self.resample, box=(left, top, right, bottom))

        crop_height, crop_width = self.image_size
        left = (width - crop_width) // 2
        top = (height - crop_height) // 2
        return np.asarray(image.crop((left, top, left + crop_width, top + crop_height)))
