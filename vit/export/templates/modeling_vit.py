"""The model of this folder for transformers, with the preprocessing that it was trained with.

AutoModelForImageClassification.from_pretrained("FOLDER", trust_remote_code=True)
pipeline("image-classification", model="FOLDER", trust_remote_code=True)
"""

import numpy as np
import torch.nn.functional as F
from PIL import ImageOps
from transformers import BatchFeature, ImageProcessingMixin, PretrainedConfig, PreTrainedModel
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


class ViTProcessor(ImageProcessingMixin):
    """Scales an image to cover `resize_size`, cuts `image_size` (height, width) from its centre,
    normalises."""

    model_input_names = ("pixel_values",)
    valid_kwargs = ImagesKwargs  # of the library, which asks for it

    def __call__(self, images, return_tensors=None, **unused):
        images = images if isinstance(images, list | tuple) else [images]
        pixels = np.stack([self._resize(load_image(image)) for image in images])
        std = np.float64(self.image_std)
        scale = (1 / (255 * std)).astype(np.float32)
        shift = (-np.float64(self.image_mean) / std).astype(np.float32)
        values = (pixels.astype(np.float32) * scale + shift).transpose(0, 3, 1, 2)
        return BatchFeature({"pixel_values": values}, tensor_type=return_tensors)

    def _resize(self, image):
        image = ImageOps.exif_transpose(image).convert("RGB")
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
