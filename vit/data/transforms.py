"""Per-image geometry in decoding workers, through albumentations.

The library looks for a newer version of itself over the network when it is imported; that is switched off
first.
"""

import os
from typing import Any

import numpy as np
from PIL import Image

from vit.data.augment import Augment
from vit.data.images import Preprocess


class ImageGeometry:
    """From a decoded image to uint8 [H, W, 3]: a random crop of the full-size file, or the plain centre crop.

    albumentations 2.0.8 repeats its draws each epoch in workers, so each image is seeded on its own.
    """

    def __init__(self, augment: Augment, preprocess: Preprocess) -> None:
        self.size = preprocess.image_size
        self._plain = preprocess
        self._pipeline: Any = None
        if augment.resized_crop_scale is not None:
            self._pipeline = _random_crop(self.size, augment)
        elif augment.crop_padding:
            # the device shifts: it gets the margin that crop_fraction leaves
            self.size = preprocess.resize_size
            self._plain = Preprocess(self.size, interpolation=preprocess.interpolation)

    def __call__(self, image: Image.Image, *, seed: int) -> np.ndarray:
        if self._pipeline is None:
            return self._plain.to_uint8(image)
        self._pipeline.set_random_seed(seed)
        pixels: np.ndarray = self._pipeline(image=np.asarray(image))["image"]
        return pixels


def _random_crop(size: tuple[int, int], augment: Augment) -> Any:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    import albumentations

    scale = augment.resized_crop_scale
    crop = albumentations.RandomResizedCrop(size, scale=scale, area_for_downscale="image")
    flip = albumentations.HorizontalFlip(p=0.5 if augment.flip == "random" else 0.0)
    return albumentations.Compose([crop, flip])


def use_one_thread() -> None:
    """OpenCV would start a thread for each core in every worker."""
    import cv2

    cv2.setNumThreads(0)
