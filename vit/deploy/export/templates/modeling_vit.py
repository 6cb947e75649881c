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

from vit.data.depth import guess_range, is_deep, read_values, refuse_dicom, scale_values

from .timm_vit import build

MULTILABEL = "multi_label_classification"


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
        loss = None
        if labels is not None and self.config.problem_type == MULTILABEL:
            loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        elif labels is not None:
            loss = F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class ViTPipeline(ImageClassificationPipeline):
    """Passes images on as they are: the library's own pipeline converts them to RGB first, which cuts
    16-bit grey off at 255 and drops transparency. Where thresholds decide, "predicted" says so for each
    label or class, and the predicted class comes first."""

    def preprocess(self, image, timeout=None):
        return self.image_processor(image, return_tensors="pt").to(self.dtype)

    def postprocess(self, outputs, function_to_apply=None, top_k=5):
        config = self.model.config
        rows = super().postprocess(outputs, function_to_apply, config.num_labels)
        thresholds = (getattr(config, "operating_point", None) or {}).get("thresholds", {})
        if config.problem_type == MULTILABEL:
            for row in rows:
                row["predicted"] = row["score"] >= thresholds.get(row["label"], 0.5)
        elif thresholds:
            ((name, threshold),) = thresholds.items()
            others = [row for row in rows if row["label"] != name]
            (chosen,) = [row for row in rows if row["label"] == name]
            if chosen["score"] < threshold:
                chosen = others[0]
            rows.sort(key=lambda row: row is not chosen)
            rows = [{**row, "predicted": row is chosen} for row in rows]
        return rows[:top_k]


def read_rgb(image, value_range=None):
    """Read a file, or convert an image of PIL in any mode, to upright RGB: transparency becomes
    white, and of more than 8 bits the model's range becomes 0 to 255."""
    if isinstance(image, str | os.PathLike) and os.path.isfile(image):
        refuse_dicom(image)
        # only these: some formats of Pillow start programs
        formats = ["AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]
        with Image.open(image, formats=formats) as opened:
            if opened.width * opened.height > 100_000_000 or max(opened.size) > 65_535:
                raise ValueError(f"{image} has more than 100 million pixels or 65,535 a side")
            image = _scale_deep(opened, value_range)
    elif isinstance(image, Image.Image):
        image = _scale_deep(image, value_range)
    else:
        image = load_image(image)  # a URL
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _scale_deep(image, value_range):
    if not is_deep(image):
        return ImageOps.exif_transpose(image)
    values, limits, is_inverted = read_values(image)
    low, high = value_range or guess_range(values, limits)
    return Image.fromarray(scale_values(values, low, high, is_inverted=is_inverted))


class ViTProcessor(ImageProcessingMixin):
    """Scales an image to cover `resize_size`, crops `image_size` (height, width) from its centre, and
    normalises it. In the modes "pad" and "stretch" it shows the whole image."""

    model_input_names = ("pixel_values",)
    valid_kwargs = ImagesKwargs  # the library requires it

    def __call__(self, images, return_tensors=None, **unused):
        images = images if isinstance(images, list | tuple) else [images]
        pixels = np.stack([self._resize(read_rgb(image, self.value_range)) for image in images])
        std = np.float64(self.image_std)
        scale = (1 / (255 * std)).astype(np.float32)
        shift = (-np.float64(self.image_mean) / std).astype(np.float32)
        values = (pixels.astype(np.float32) * scale + shift).transpose(0, 3, 1, 2)
        return BatchFeature({"pixel_values": values}, tensor_type=return_tensors)

    def _resize(self, image):
        height, width = self.resize_size
        if self.resize_mode == "stretch":
            return np.asarray(image.resize((width, height), self.resample))
        if self.resize_mode == "pad":
            pixel = max(image.width / width, image.height / height)
            columns = min(max(round(image.width / pixel), 1), width)
            rows = min(max(round(image.height / pixel), 1), height)
            padded = Image.new("RGB", (width, height), tuple(self.ground))
            image = image.resize((columns, rows), self.resample)
            padded.paste(image, ((width - columns) // 2, (height - rows) // 2))
            return np.asarray(padded)
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
