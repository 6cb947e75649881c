"""Transforms of single images in workers: the user's own, and albumentations' crops."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from vit.data.crop import Crop
from vit.data.preprocess import Preprocess
from vit.data.random import seed_generators

Transform = Callable[..., Any]


def apply_transform(transform: Transform, image: Image.Image, *, seed: int) -> Image.Image:
    """Apply a transform of the user's to an RGB image of any size.

    Args:
        transform: A transform of albumentations or torchvision, or a function of uint8 [H, W, 3].
        image: The image, in RGB.
        seed: Seed of albumentations' own generator; for others, of torch's, numpy's and random's.

    Raises:
        ValueError: The result is neither an RGB image nor uint8 [H, W, 3] nor a uint8 tensor
            [3, H, W].
    """
    # a transform of albumentations
    if hasattr(transform, "set_random_seed"):
        transform.set_random_seed(seed)
        result = transform(image=np.array(image))["image"]
    else:
        seed_generators(seed)
        takes_pil = type(transform).__module__.startswith("torchvision.")
        result = transform(image if takes_pil else np.array(image))

    # torchvision returns [3, H, W], all others [H, W, 3]
    if isinstance(result, torch.Tensor):
        result = result.permute(1, 2, 0)
    pixels = np.asarray(result)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"the transform gives {pixels.dtype} {list(pixels.shape)}, not uint8 [H, W, 3]; leave "
            "conversion and normalisation out of it"
        )
    return Image.fromarray(pixels)


class TrainTransform:
    """From a decoded image to uint8 [H, W, 3]: the user's transform, then a crop.

    Args:
        crop: A random crop of the full-size image if it has a `scale`; otherwise the centre crop.
        preprocess: Preprocessing of the model.
        transform: The user's transform; None for none.
    """

    def __init__(self, crop: Crop, preprocess: Preprocess, transform: Transform | None) -> None:
        self.size = preprocess.image_size
        self._preprocess = preprocess
        self._transform = transform
        self._random_crop: Any = None
        if crop.scale is not None:
            albumentations = import_albumentations()
            random_crop = albumentations.RandomResizedCrop(
                self.size, scale=crop.scale, area_for_downscale="image"
            )
            flip = albumentations.HorizontalFlip(p=0.5 if crop.flip == "random" else 0.0)
            self._random_crop = albumentations.Compose([random_crop, flip])
        elif crop.padding:
            # the device shifts: it gets the margin that crop_pct leaves
            self.size = preprocess.resize_size
            self._preprocess = Preprocess(self.size, interpolation=preprocess.interpolation)

    def __call__(self, image: Image.Image, *, seed: int) -> np.ndarray:
        # another seed than that of the crop, because both may be of albumentations
        if self._transform is not None:
            image = apply_transform(self._transform, image, seed=seed + 1)
        if self._random_crop is None:
            return self._preprocess.to_uint8(image)
        # seeded for each image: in workers, albumentations 2.0.8 repeats its numbers every epoch
        self._random_crop.set_random_seed(seed)
        pixels: np.ndarray = self._random_crop(image=np.asarray(image))["image"]
        return pixels


def use_one_thread(_worker: int) -> None:
    """Keep OpenCV from starting a thread for each core in every worker."""
    # takes long to import
    import cv2

    cv2.setNumThreads(0)


def import_albumentations() -> Any:
    """The library; on import it would ask over the network for a newer version of itself."""
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    # takes long to import
    import albumentations

    return albumentations
