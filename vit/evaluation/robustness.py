"""Top-1 on corrupted, shifted and rotated images."""

from collections.abc import Callable
from functools import partial

import numpy as np

from vit.evaluation.corruptions import CORRUPTIONS, ROTATIONS, SEVERITIES, SHIFTS, corrupt, rotate, shift
from vit.evaluation.images import Images
from vit.evaluation.predictor import Pixels, Predictor

Sweep = list[tuple[float, float]]  # (amount, top-1)
OnProgress = Callable[[int], object]


def measure_corruptions(
    predictor: Predictor, images: Images, *, on_progress: OnProgress
) -> dict[str, list[float]]:
    """Top-1 at severities 1 to 5 of each of the fifteen kinds: 75 passes over the images."""

    def corrupt_batch(start: int, stop: int, *, name: str, severity: int) -> Pixels:
        digests = images.dataset.digests[start:stop].tolist()
        batch = zip(images.read(start, stop), digests, strict=True)
        return np.stack([corrupt(image, name=name, severity=severity, digest=key) for image, key in batch])

    return {
        name: [
            _measure_top1(
                predictor, images, partial(corrupt_batch, name=name, severity=severity), on_progress
            )
            for severity in SEVERITIES
        ]
        for name in CORRUPTIONS
    }


def measure_shifts(predictor: Predictor, images: Images, *, on_progress: OnProgress) -> dict[str, Sweep]:
    """Top-1 of images moved right and down by shares of their side."""

    def shift_batch(start: int, stop: int, *, fraction: float, axis: int) -> Pixels:
        return shift(images.read(start, stop), fraction=fraction, axis=axis)

    def sweep(axis: int) -> Sweep:
        read = [partial(shift_batch, fraction=fraction, axis=axis) for fraction in SHIFTS]
        return [
            (fraction, _measure_top1(predictor, images, read_batch, on_progress))
            for fraction, read_batch in zip(SHIFTS, read, strict=True)
        ]

    return {"shift_right": sweep(1), "shift_down": sweep(0)}


def measure_rotations(predictor: Predictor, images: Images, *, on_progress: OnProgress) -> dict[str, Sweep]:
    """Top-1 of images turned anticlockwise by degrees."""

    def rotate_batch(start: int, stop: int, *, degrees: float) -> Pixels:
        return rotate(images.read(start, stop), degrees=degrees)

    return {
        "rotate": [
            (degrees, _measure_top1(predictor, images, partial(rotate_batch, degrees=degrees), on_progress))
            for degrees in ROTATIONS
        ]
    }


def _measure_top1(
    predictor: Predictor,
    images: Images,
    read_batch: Callable[[int, int], Pixels],
    on_progress: OnProgress,
) -> float:
    logits = predictor.predict(read_batch, count=len(images), on_progress=on_progress)
    return float((logits.argmax(axis=1) == images.labels).mean())
