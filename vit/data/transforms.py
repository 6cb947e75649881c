"""Per-image geometry in decoding workers, and corruptions of test images, through albumentations.

On import the library checks over the network for a newer version of itself; that is switched off first.
"""

import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from vit.data.augment import Augment
from vit.data.images import Preprocess
from vit.data.random import seed_generators

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


Transform = Callable[..., Any]


def apply_transform(transform: Transform, image: Image.Image, *, seed: int) -> Image.Image:
    """What a transform of the user's makes of an RGB image of any size. albumentations is seeded itself; before others,
    the generators of torch, numpy and random are. Transforms of torchvision take a PIL image, others uint8 [H, W, 3].
    Raises ValueError where the result is neither of these nor a uint8 tensor [3, H, W]."""
    if hasattr(transform, "set_random_seed"):
        transform.set_random_seed(seed)
        changed = transform(image=np.array(image))["image"]
    else:
        seed_generators(seed)
        changed = transform(image if type(transform).__module__.startswith("torchvision.") else np.array(image))
    pixels = np.asarray(changed.permute(1, 2, 0) if isinstance(changed, torch.Tensor) else changed)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        kind = f"{pixels.dtype} {list(pixels.shape)}"
        raise ValueError(
            f"the transform gives {kind}, not uint8 [H, W, 3]; leave conversion and normalisation out of it"
        )
    return Image.fromarray(pixels)


class ImageGeometry:
    """From a decoded image to uint8 [H, W, 3]: a random crop of the full-size file, or the plain centre crop; before
    that, the user's transform.

    albumentations 2.0.8 repeats its random numbers each epoch in workers, so each image is seeded on its own.
    """

    def __init__(self, augment: Augment, preprocess: Preprocess, transform: Transform | None) -> None:
        self.size, self._plain, self._transform = preprocess.image_size, preprocess, transform
        self._pipeline: Any = None
        if augment.resized_crop_scale is not None:
            import albumentations as A

            crop = A.RandomResizedCrop(self.size, scale=augment.resized_crop_scale, area_for_downscale="image")
            self._pipeline = A.Compose([crop, A.HorizontalFlip(p=0.5 if augment.flip == "random" else 0.0)])
        elif augment.crop_padding:
            # the device shifts: it gets the margin that crop_pct leaves
            self.size = preprocess.resize_size
            self._plain = Preprocess(self.size, interpolation=preprocess.interpolation)

    def __call__(self, image: Image.Image, *, seed: int) -> np.ndarray:
        if self._transform is not None:
            image = apply_transform(self._transform, image, seed=seed + 1)
        if self._pipeline is None:
            return self._plain.to_uint8(image)
        self._pipeline.set_random_seed(seed)
        pixels: np.ndarray = self._pipeline(image=np.asarray(image))["image"]
        return pixels


def use_one_thread(_worker: int) -> None:
    """OpenCV would start a thread for each core in every worker."""
    import cv2

    cv2.setNumThreads(0)


def corrupt_with_library(name: str, batch: np.ndarray, level: tuple[float, ...], seeds: Sequence[int]) -> np.ndarray:
    """uint8 test images [B, H, W, 3], corrupted at a level that `vit.evaluation.corruptions` lists."""
    # a transform keeps its random numbers: each thread has its own
    transform = _build_corruption(name, level, min(batch.shape[1:3]), threading.get_ident())
    corrupted = np.empty_like(batch)
    for row, (pixels, seed) in enumerate(zip(batch, seeds, strict=True)):
        transform.set_random_seed(seed)
        corrupted[row] = transform(image=np.ascontiguousarray(pixels))["image"]
    return corrupted


@lru_cache(maxsize=32)  # to build one takes longer than to corrupt a small image
def _build_corruption(name: str, level: tuple[float, ...], side: int, _thread: int) -> Any:
    import albumentations as A
    import cv2

    first, edges = (level[0], level[0]), cv2.BORDER_REFLECT_101
    build: dict[str, Callable[[], Any]] = {
        "gaussian_noise": lambda: A.GaussNoise(std_range=first, p=1),
        "impulse_noise": lambda: A.SaltAndPepper(amount=first, salt_vs_pepper=(0.5, 0.5), p=1),
        "glass_blur": lambda: A.GlassBlur(level[0], max_delta=int(level[1]), iterations=int(level[2]), p=1),
        "zoom_blur": lambda: A.ZoomBlur(first, step_factor=(level[1], level[1]), p=1),
        "elastic_transform": lambda: A.ElasticTransform(
            level[0] * side, sigma=max(level[1] * side, 1), border_mode=edges, p=1
        ),
        "jpeg_compression": lambda: A.ImageCompression(quality_range=(int(level[0]), int(level[0])), p=1),
    }
    return build[name]()
