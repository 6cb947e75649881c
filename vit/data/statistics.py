"""Statistics of the images before a run: their size and depth, the mean and standard deviation of
their pixels, and the sizes of their classes."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

import numpy as np
from PIL import Image

from vit.data.dataset import ImageDataset, choose_evenly
from vit.data.depth import DeepImage, find_extremes
from vit.data.label_sets import count_labels

# pixels that are decoded for a sample, in a few seconds; for the range of deep images, and to see
# if there are any
_MAX_PIXELS = 2 * 10**8
_MAX_DEEP_PIXELS = 4 * 10**8
_MAX_FIRST_PIXELS = 5 * 10**7
# images whose values are measured, and those that are read to see if there are deep ones
_RANGE_SAMPLE = 256
_FIRST_SAMPLE = 64
# names of files that never have more than 8 bits a channel
_SHALLOW_SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".webp")
# a range that rounds up to whole bits must leave this fraction of the grey levels in use: 32 of 256
_MIN_USED = 1 / 8

# value for red, green and blue
Triple = tuple[float, float, float]
ClassBalance = Literal["none", "weights"]

# Above this ratio of the largest class to the smallest, "auto" balances classes. At 20:1, macro F1
# on CIFAR-10 is 51.7 % without balance and 63.9 % with weights (one seed).
_MAX_RATIO = 5


def measure_sample(dataset: ImageDataset, *, count: int) -> tuple[int, bool]:
    """Measure `count` random images, or fewer if they are large: return the median of the shorter
    sides, in pixels, and true if no image has colours. Raises ValueError if none can be read."""
    sides = []
    is_grey = True
    num_pixels = 0
    order = np.random.default_rng(0).permutation(len(dataset))[:count].tolist()
    for image in dataset.read_sample(order):
        sides.append(min(image.size))
        pixels = np.asarray(image)
        is_grey = is_grey and bool((pixels == pixels[..., :1]).all())
        num_pixels += image.width * image.height
        if num_pixels > _MAX_PIXELS:
            break
    return round(np.median(sides)), is_grey


def measure_value_range(dataset: ImageDataset) -> tuple[float, float] | None:
    """Measure the values that become black and white in images of more than 8 bits a channel: one
    range for all, see `choose_value_range`. None if a sample has no such image."""
    is_shallow = [name.lower().endswith(_SHALLOW_SUFFIXES) for name in dataset.ids]
    candidates = np.flatnonzero(~np.array(is_shallow, dtype=bool))
    if dataset.pixels is not None or not len(candidates):
        return None
    places = candidates[choose_evenly(len(candidates), _RANGE_SAMPLE)]
    # in an order that has all classes at its beginning
    order = np.random.default_rng(0).permutation(places).tolist()
    ranges: list[tuple[float, float]] = []
    bits: int | None = 0
    num_pixels = 0
    # where no image can be read
    with suppress(ValueError):
        for number, image in enumerate(dataset.read_sample(order), start=1):
            if isinstance(image, DeepImage):
                ranges.append(find_extremes(image.values))
                if image.values.dtype.kind == "f":
                    bits = None
                elif bits is not None:
                    bits |= int(np.bitwise_or.reduce(image.values, axis=None))
            num_pixels += image.width * image.height
            is_enough = number >= _FIRST_SAMPLE or num_pixels > _MAX_FIRST_PIXELS
            if num_pixels > _MAX_DEEP_PIXELS or (is_enough and not ranges):
                break
    if not ranges:
        return None
    lows, highs = zip(*ranges, strict=True)
    return choose_value_range(min(lows), max(highs), bits=bits)


def choose_value_range(low: float, high: float, *, bits: int | None) -> tuple[float, float]:
    """Choose the values that become black and white: 0 to 1 for floats in it; 0 to the largest
    value with as many bits, for whole numbers; and low to high where some are negative or where
    that would leave too few grey levels. `bits` are set in any value; None for floats."""
    measured = (low, high if high > low else low + 1)
    if bits is None:
        return (0.0, 1.0) if low >= 0 and high <= 1 else measured
    if low < 0:
        return measured
    # 12 bits may be stored as the upper ones of 16: then the last four are never set
    shift = (bits & -bits).bit_length() - 1 if bits else 0
    top = max(((1 << (int(high) >> shift).bit_length()) - 1) << shift, 255)
    return (0.0, float(top)) if high - low >= _MIN_USED * top else measured


def measure_mean_and_std(images: Iterable[np.ndarray]) -> tuple[Triple, Triple]:
    """Measure mean and standard deviation of each channel, of pixels in [0, 1], with 4 digits, of
    images uint8 [H, W, 3]."""
    # sums of integers are exact and don't depend on how numpy adds
    counts = np.zeros(3 * 256, dtype=np.int64)
    for image in images:
        counts += Image.fromarray(image).histogram()

    histogram = counts.reshape(3, 256)
    values = np.arange(256)
    num_pixels = histogram[0].sum()
    means = histogram @ values / num_pixels / 255
    mean_squares = histogram @ values**2 / num_pixels / 255**2
    # rounding can make the variance of one colour negative
    stds = np.maximum(np.maximum(mean_squares - means**2, 0) ** 0.5, 1 / 255)
    (red, green, blue), (red_std, green_std, blue_std) = np.round([means, stds], 4).tolist()
    return (red, green, blue), (red_std, green_std, blue_std)


def choose_class_balance(
    labels: np.ndarray, *, wanted: ClassBalance | Literal["auto"]
) -> ClassBalance:
    """Choose how classes of different sizes are balanced, from the class of each image, int64 [n],
    or which labels it has, bool [n, C]."""
    if wanted != "auto":
        return wanted
    counts = count_labels(labels, 0)
    return "weights" if counts.max() > _MAX_RATIO * counts[counts > 0].min() else "none"


def compute_class_weights(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Compute the weights that balance the classes, float32 [C], from labels as in
    `choose_class_balance`.

    Weights of classes are inversely proportional to the number of images, as scikit-learn's
    "balanced"; their mean over the images is 1, and a class without images has 0. Weights of labels
    are the number of images without the label for one that has it, its weight in the binary
    cross-entropy; a label that no image has, or all have, has 1.
    """
    counts = count_labels(labels, num_classes)
    weights: np.ndarray
    if labels.ndim == 2:
        others = len(labels) - counts
        weights = np.where((counts > 0) & (others > 0), others / np.maximum(counts, 1), 1.0)
    else:
        weights = len(labels) / np.maximum(counts, 1) / (counts > 0).sum() * (counts > 0)
    return weights.astype(np.float32)
