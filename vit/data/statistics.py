"""Statistics of a sample of images, to compare what a model is trained on with what it is evaluated on."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from vit.data.sets.source import ImageSource

_MOST_PIXELS = 2 * 10**8  # decoded for a sample: a few seconds
_SIDE = 512  # pixels of the middle of an image that sharpness is measured on
# by how much a mean may differ: images of one population stay within it, whatever their number
_TOLERANCES = {"size": 0.1, "sharpness": 0.04, "brightness": 0.05, "JPEG quality": 0.05, "fraction of JPEG": 0.3}
_STANDARD_ERRORS = 5.0


@dataclass(frozen=True)
class Statistics:
    """What was measured of each image of a sample, by name: size (the shorter side, pixels), sharpness, brightness
    (mean luminance, 0 to 255), JPEG quality and whether it is a JPEG file; what an image doesn't tell is NaN."""

    values: dict[str, np.ndarray]

    @property
    def median_side(self) -> float:
        return float(np.median(self.values["size"]))

    def compare(self, other: "Statistics") -> dict[str, tuple[float, float]]:
        """The means of both by name, where they differ by more than two samples of one population would."""
        found = {}
        for name, tolerance in _TOLERANCES.items():
            samples = [values[~np.isnan(values)] for values in (self.values[name], other.values[name])]
            if min(map(len, samples)) < 2:
                continue
            first, second = (float(sample.mean()) for sample in samples)
            error = math.sqrt(sum(sample.var() / len(sample) for sample in samples))
            least = tolerance * (1 if name == "fraction of JPEG" else max(first, second))
            if abs(first - second) > max(least, _STANDARD_ERRORS * error):
                found[name] = first, second
        return found


def sample_statistics(source: ImageSource, *, count: int) -> Statistics:
    """Of `count` images of a source, evenly spaced: of fewer where they are large, and without unreadable ones."""
    rows = list(_measure_images(source, count))
    if not rows:
        what = f"none of {count} images of {source.name} {source.split} can be read"
        raise ValueError(f"{what}; the first is {source.ids[0]}")
    return Statistics(dict(zip(_TOLERANCES, np.array(rows).T, strict=True)))


def _measure_images(source: ImageSource, count: int) -> Iterator[tuple[float, ...]]:
    pixels = 0
    sample = source.subset(np.random.default_rng(0).permutation(len(source))[:count])
    sample.reader.fetch(range(len(sample)))
    for index in range(len(sample)):
        with suppress(ValueError, OSError):
            image = sample.read(index)
            pixels += image.width * image.height
            kind, quality = image.info.get("encoding", (None, math.nan))
            grey = np.asarray(image.convert("L"), dtype=np.float32)
            is_jpeg = math.nan if kind is None else float(kind == "JPEG")
            yield min(image.size), measure_sharpness(grey), float(grey.mean()), quality, is_jpeg
        if pixels > _MOST_PIXELS:
            break


def measure_sharpness(grey: np.ndarray) -> float:
    """Mean absolute Laplacian of the middle of a picture [H, W], divided by that of the same at half the size: what
    is on it changes both, the filter that it was resized with the first. NaN where there is too little to measure."""
    height, width = (min(side, _SIDE) // 2 * 2 for side in grey.shape)
    top, left = (grey.shape[0] - height) // 2, (grey.shape[1] - width) // 2
    middle = grey[top : top + height, left : left + width]
    half = middle.reshape(height // 2, 2, width // 2, 2).mean(axis=(1, 3))
    if min(half.shape) < 3:
        return math.nan
    fine, coarse = _laplacian(middle), _laplacian(half)
    return fine / coarse if coarse > 0 else math.nan


def _laplacian(grey: np.ndarray) -> float:
    inner = 4 * grey[1:-1, 1:-1] - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:]
    return float(np.abs(inner).mean())
