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
    """Scales an image to cover `resize_size`, cuts `image_size` (height, width) from its centre, normalises."""

    model_input_names = ("pixel_values",)
    valid_kwargs = ImagesKwargs  # of the library, which asks for it

    def __call__(self, images, return_tensors=None, **unused):
        images = images if isinstance(images, list | tuple) else [images]
        pixels = np.stack([self._resize(load_image(image)) for image in images]).astype(np.float32)
        mean, std = np.float64([self.image_mean, self.image_std])
        scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
        values = (pixels * scale + shift).transpose(0, 3, 1, 2)
        return BatchFeature({"pixel_values": values}, tensor_type=return_tensors)

    def _resize(self, image):
        image = ImageOps.exif_transpose(image).convert("RGB")
        full, kept = self.resize_size[::-1], self.image_size[::-1]  # (width, height), as Pillow
        pixel = min(image.size[0] / full[0], image.size[1] / full[1])
        start = [max((side - target * pixel) / 2, 0.0) for side, target in zip(image.size, full, strict=True)]
        stop = [min(first + target * pixel, side) for first, target, side in zip(start, full, image.size, strict=True)]
        image = image.resize(full, self.resample, box=(*start, *stop))
        left, top = ((target - side) // 2 for target, side in zip(full, kept, strict=True))
        return np.asarray(image.crop((left, top, left + kept[0], top + kept[1])))
