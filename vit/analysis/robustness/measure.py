"""Accuracy on damaged images: eight transforms of albumentations at three strengths each."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.bundle import ModelLike, keeps_mode, open_model
from vit.evaluation.images import load_images, open_data
from vit.prediction.batch_predictor import BatchPredictor, Pixels
from vit.prediction.decision import compute_probabilities, decide_classes, read_thresholds
from vit.runtime.arguments import check_minimum
from vit.runtime.files import FileContent, Result, format_json
from vit.runtime.progress import show_progress


@dataclass(frozen=True)
class RobustnessResult(Result):
    """Accuracy of a model on undamaged images, 0 to 1, and by transform at its three strengths."""

    model: str
    top1: float
    accuracies: dict[str, list[float]]
    num_images: int

    @property
    def sources(self) -> tuple[str]:
        return (self.model,)

    def build_files(self) -> dict[str, FileContent]:
        return {"robustness.json": format_json(vars(self))}


@keeps_mode
def measure_robustness(
    model: ModelLike,
    *,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    batch_size: int = 64,
    device: str = "auto",
) -> RobustnessResult:
    """Measure accuracy on damaged images, each transform at three strengths.

    The damage is seeded by the image, so that it is the same for every model.

    Args:
        model: See `vit.evaluate`.
        data: See `vit.evaluate`.
        root: See `vit.evaluate`.
        split: See `vit.evaluate`.
        batch_size: Images at a time.
        device: See `vit.evaluate`.

    Returns:
        The result: `.top1` without damage, and `.accuracies[transform]` at the
        three strengths.

    Raises:
        ValueError: The model predicts several labels an image.

    Example:
        >>> result = vit.measure_robustness("runs/digits")
        >>> result.top1, result.accuracies["noise"]
    """
    check_minimum(1, batch_size=batch_size)
    bundle = open_model(model, device=device)
    if bundle.is_multilabel:
        raise ValueError("robustness is measured by accuracy, which a model of labels doesn't have")
    images = load_images(bundle, open_data(bundle, data, root, None), split)
    predictor = BatchPredictor.from_bundle(bundle, batch_size=batch_size)
    count = len(images)
    transforms = build_transforms(min(bundle.preprocess.image_size))

    def read(transform: Any, start: int, stop: int) -> Pixels:
        # the hash of the pixels, which no order or name changes
        seeds = images.dataset.digests[start:stop].tolist()
        return damage(images.read(start, stop), transform, seeds)

    with show_progress("robustness", count * (1 + 3 * len(transforms))) as advance:

        def measure(read: Callable[[int, int], Pixels]) -> float:
            logits = predictor.predict(read, count=count, on_progress=advance)
            predicted = decide_classes(
                read_thresholds(bundle), compute_probabilities(bundle, logits)
            )
            return float((predicted == images.labels).mean())

        top1 = measure(images.read)
        accuracies = {
            name: [measure(partial(read, transform)) for transform in strengths]
            for name, strengths in transforms.items()
        }
    return RobustnessResult(bundle.name, top1, accuracies, count)


def build_transforms(side: int) -> dict[str, list[Any]]:
    """Return the transforms by name, each at three strengths. Blurs grow with the shorter side of the
    images, in pixels."""
    # on import it would ask over the network for a newer version of itself
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    # both take long to import
    import albumentations as library
    import cv2

    light = partial(library.RandomBrightnessContrast, p=1)
    scaling = {"downscale": cv2.INTER_AREA, "upscale": cv2.INTER_NEAREST}
    radii = [step + round(side * share) for step, share in ((1, 0.01), (2, 0.02), (3, 0.04))]
    return {
        "noise": [library.GaussNoise(std_range=(std, std), p=1) for std in (0.04, 0.1, 0.2)],
        "defocus": [library.Defocus((size, size), alias_blur=(0.1, 0.1), p=1) for size in radii],
        "motion": [library.MotionBlur((2 * size + 1,) * 2, p=1) for size in radii],
        "fog": [
            library.RandomFog(fog_coef_range=(fog, fog), alpha_coef=fog / 4, p=1)
            for fog in (0.3, 0.5, 0.8)
        ],
        "brightness": [light((step, step), (0, 0)) for step in (0.15, 0.3, 0.5)],
        "contrast": [light((0, 0), (-step, -step)) for step in (0.4, 0.6, 0.8)],
        "pixelate": [
            library.Downscale(scale_range=(scale, scale), interpolation_pair=scaling, p=1)
            for scale in (0.6, 0.4, 0.25)
        ],
        "jpeg": [library.ImageCompression(quality_range=(q, q), p=1) for q in (25, 15, 7)],
    }


def damage(batch: Pixels, transform: Any, seeds: list[int]) -> Pixels:
    """Return damaged images, uint8 [B, H, W, 3], that depend on the image and its seed alone."""
    damaged = np.empty_like(batch)
    for row, (pixels, seed) in enumerate(zip(batch, seeds, strict=True)):
        # albumentations takes seeds of 32 bits
        transform.set_random_seed(seed % 2**32)
        damaged[row] = transform(image=np.ascontiguousarray(pixels))["image"]
    return damaged
