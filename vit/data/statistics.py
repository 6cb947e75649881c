"""Statistics of the images before a run: their size and depth, the mean and standard deviation of
their pixels, and the sizes of their classes."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from vit.data.dataset import ImageDataset, choose_evenly
from vit.data.images import DeepImage, find_extremes
from vit.data.label_sets import count_labels
from vit.data.preprocess import Preprocess

# pixels that are decoded for a sample, in a few seconds
_MAX_PIXELS = 2 * 10**8

# names of files that never have more than 8 bits a channel
_SHALLOW_SUFFIXES = (".avif", ".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".webp")
# images that are read to see if there are deep ones, fewer if they are large
_FIRST_SAMPLE = 64
_MAX_FIRST_PIXELS = 5 * 10**7
# images whose values are measured, fewer if they are large
_RANGE_SAMPLE = 256
_MIN_RANGE_SAMPLE = 16
_MAX_DEEP_PIXELS = 4 * 10**8
# a range that rounds up to whole bits must leave this fraction of the grey levels in use: 32 of 256
_MIN_USED = 1 / 8
# Fraction of the typical image that a crop may leave out. A square leaves out a quarter of 4:3.
MAX_CUT = 0.25
# grey levels below which images have lost their contrast
MIN_LEVELS = 32

# value for red, green and blue
Triple = tuple[float, float, float]
# values of a deep image: the smallest, the largest, bits in use, limits that the file states
_Values = tuple[float, float, int | None, tuple[float, float] | None]
ClassBalance = Literal["none", "weights"]

# Above this ratio of the largest class to the smallest, "auto" balances classes. At 20:1, macro F1
# on CIFAR-10 is 51.7 % without balance and 63.9 % with weights (one seed).
MAX_RATIO = 5


@dataclass(frozen=True)
class Survey:
    """Sizes and grey levels of a sample of the images.

    Attributes:
        sizes: Width and height of each image, int64 [n, 2].
        num_levels: Grey levels in use, of 256; counted up to `MIN_LEVELS`.
    """

    sizes: np.ndarray
    num_levels: int

    @property
    def shorter_side(self) -> float:
        """Median of the shorter sides, in pixels."""
        return float(np.median(self.sizes.min(axis=1)))

    @property
    def aspect(self) -> float:
        """Median of width / height."""
        return float(np.median(self.sizes[:, 0] / self.sizes[:, 1]))

    def describe_aspect(self) -> str:
        """Describe the typical shape, such as "5:1"."""
        longer = max(self.aspect, 1 / self.aspect)
        return f"{longer:.2g}:1" if self.aspect >= 1 else f"1:{longer:.2g}"

    def measure_cuts(self, preprocess: Preprocess) -> np.ndarray:
        """Return the fraction of each image that the model doesn't see, [n]."""
        fractions = []
        for width, height in self.sizes.tolist():
            left, top, right, bottom = preprocess.geometry((width, height)).box
            across = min(right, width) - max(left, 0.0)
            down = min(bottom, height) - max(top, 0.0)
            fractions.append(1 - across * down / (width * height))
        # so that a square leaves out just a quarter of 4:3, whatever is rounded
        return np.round(fractions, 6)


def survey_images(
    dataset: ImageDataset, *, count: int, preprocess: Preprocess | None = None
) -> Survey:
    """Look at the sizes and grey levels of a sample.

    Args:
        dataset: The images; unreadable ones are left out.
        count: Number of random images, fewer if they are large.
        preprocess: Its range scales the values of deep images. None counts no grey levels.

    Raises:
        ValueError: None of them can be read.
    """
    sizes = []
    # number of pixels at each level, of deep images and of others
    counts = np.zeros((2, 256), dtype=np.int64)
    num_levels: dict[int, int] = {}
    num_pixels = 0
    for image in _read_random(dataset, count):
        sizes.append(image.size)
        is_deep = int(isinstance(image, DeepImage))
        if preprocess is not None and num_levels.get(is_deep, 0) < MIN_LEVELS:
            # a rare one of floats may be without a range, and is left out of training
            with suppress(ValueError):
                pixels = np.asarray(preprocess.to_rgb(image))
                counts[is_deep] += np.bincount(pixels.ravel(), minlength=256)
                used = np.flatnonzero(counts[is_deep])
                # drawings of 8 bits may have few levels, but these are far apart
                num_levels[is_deep] = len(used) if is_deep else int(used[-1] - used[0]) + 1
        num_pixels += image.width * image.height
        if num_pixels > _MAX_PIXELS:
            break
    return Survey(np.array(sizes), min([*num_levels.values(), MIN_LEVELS]))


def describe_few_levels(num_levels: int, value_range: tuple[float, float] | None) -> str:
    """Describe images of fewer grey levels than `MIN_LEVELS` in a sentence with its remedy."""
    text = f"the images use {num_levels} of 256 grey levels"
    if value_range is None:
        return f"{text}; save them from the originals with 16 bits, or with more contrast"
    low, high = value_range
    return (
        f"{text}, since {low:g} to {high:g} become black to white; "
        "set data.value_range=[low, high] to the values that matter"
    )


def measure_value_range(dataset: ImageDataset) -> tuple[float, float] | None:
    """Measure the values that become black and white in images of more than 8 bits a channel.

    Returns:
        One range for all images, see `choose_value_range`; None if a sample has no such image.
    """
    if dataset.pixels is not None:
        return None
    candidates = [
        index
        for index, name in enumerate(dataset.ids)
        if not name.lower().endswith(_SHALLOW_SUFFIXES)
    ]
    num_pixels = _measure_deep(dataset, candidates)
    if num_pixels is None:
        return None
    count = min(max(_MAX_DEEP_PIXELS // num_pixels, _MIN_RANGE_SAMPLE), _RANGE_SAMPLE)
    lows, highs, bits, limits = zip(*_describe_values(dataset, candidates, count), strict=True)
    known = [each for each in limits if each is not None]
    return choose_value_range(
        min(lows),
        max(highs),
        bits=None if None in bits else int(np.bitwise_or.reduce(bits)),
        limits=(min(known)[0], max(high for _, high in known)) if known else None,
    )


def choose_value_range(
    low: float, high: float, *, bits: int | None, limits: tuple[float, float] | None
) -> tuple[float, float]:
    """Choose the values that become black and white.

    Args:
        low, high: Smallest and largest value of the images.
        bits: Bits that are set in any value; None if values are no whole numbers.
        limits: Smallest and largest value that the files say they may hold.

    Returns:
        The limits, if the values are within them. Otherwise 0 to 1 for floats in it; 0 to the
        largest value with as many bits, for whole numbers; and low to high where some are negative
        or where that would leave too few grey levels.
    """
    if limits is not None and limits[0] <= low and high <= limits[1] and limits[0] < limits[1]:
        return limits
    measured = (low, high if high > low else low + 1)
    if bits is None:
        return (0.0, 1.0) if low >= 0 and high <= 1 else measured
    if low < 0:
        return measured
    # 12 bits may be stored as the upper ones of 16: then the last four are never set
    shift = (bits & -bits).bit_length() - 1 if bits else 0
    top = max(((1 << (int(high) >> shift).bit_length()) - 1) << shift, 255)
    return (0.0, float(top)) if high - low >= _MIN_USED * top else measured


def _measure_deep(dataset: ImageDataset, candidates: list[int]) -> int | None:
    """Return the number of pixels of the first deep image of a sample; None without one."""
    chosen = [candidates[place] for place in choose_evenly(len(candidates), _FIRST_SAMPLE)]
    # in an order that has all classes at its beginning
    order = np.random.default_rng(0).permutation(len(chosen))
    num_read = 0
    # where no image can be read
    with suppress(ValueError):
        for image in dataset.read_sample([chosen[place] for place in order]):
            if isinstance(image, DeepImage):
                return image.width * image.height
            num_read += image.width * image.height
            if num_read > _MAX_FIRST_PIXELS:
                break
    return None


def _describe_values(dataset: ImageDataset, candidates: list[int], count: int) -> list[_Values]:
    """Describe the values of each deep image of a sample."""
    chosen = [candidates[place] for place in choose_evenly(len(candidates), count)]
    sample = dataset.subset(chosen)

    def describe(index: int) -> _Values | None:
        with suppress(ValueError, OSError):
            image = sample.image(index)
            if isinstance(image, DeepImage):
                bits = None
                if image.has_integers:
                    bits = int(np.bitwise_or.reduce(image.values, axis=None))
                return *find_extremes(image.values), bits, image.limits
        return None

    with ThreadPoolExecutor() as pool:
        return [found for found in pool.map(describe, range(len(sample))) if found is not None]


def are_grey(dataset: ImageDataset, *, count: int) -> bool:
    """Return true if `count` random images have no colours. Raises ValueError if none of them can
    be read."""
    for image in _read_random(dataset, count):
        pixels = np.asarray(image)
        if (pixels != pixels[..., :1]).any():
            return False
    return True


def _read_random(dataset: ImageDataset, count: int) -> Iterator[Image.Image]:
    return dataset.read_sample(np.random.default_rng(0).permutation(len(dataset))[:count])


def measure_mean_and_std(images: Iterable[np.ndarray]) -> tuple[Triple, Triple]:
    """Measure mean and standard deviation of each channel, of pixels in [0, 1], with 4 digits.

    Args:
        images: Images, uint8 [H, W, 3] each.
    """
    # sums of integers are exact and don't depend on how numpy adds; image by image, because numpy
    # takes 8 bytes a pixel for bincount
    histogram = np.zeros((3, 256), dtype=np.int64)
    for image in images:
        for channel in range(3):
            histogram[channel] += np.bincount(image[..., channel].ravel(), minlength=256)

    values = np.arange(256)
    num_pixels = int(histogram[0].sum())
    means = []
    stds = []
    for counts in histogram:
        mean = float(counts @ values) / num_pixels / 255
        mean_square = float(counts @ values**2) / num_pixels / 255**2
        # rounding can make the variance of one colour negative
        variance = max(mean_square - mean**2, 0.0)
        std = max(variance**0.5, 1 / 255)
        means.append(round(mean, 4))
        stds.append(round(std, 4))
    return (means[0], means[1], means[2]), (stds[0], stds[1], stds[2])


def compute_class_ratio(labels: np.ndarray) -> float:
    """Compute the ratio of the largest class to the smallest that has images.

    Args:
        labels: Class of each image, int64 [n], or which labels it has, bool [n, C].
    """
    counts = count_labels(labels, 0)
    counts = counts[counts > 0]
    return float(counts.max() / counts.min())


def choose_class_balance(
    labels: np.ndarray, *, wanted: ClassBalance | Literal["auto"]
) -> tuple[ClassBalance, str]:
    """Choose how classes of different sizes are balanced; return it with the reason in words."""
    ratio = compute_class_ratio(labels)
    what = "label" if labels.ndim == 2 else "class"
    sizes = f"{ratio:.1f} images of the largest {what} for one of the smallest"
    if wanted != "auto":
        return wanted, f"train.class_balance says so; {sizes}"
    return ("weights" if ratio > MAX_RATIO else "none"), sizes


def compute_class_weights(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Compute the weights that balance the classes, float32 [C].

    Weights of classes are inversely proportional to the number of images, as scikit-learn's
    "balanced"; their mean over the images is 1, and a class without images has 0. Weights of labels
    are the number of images without the label for one that has it, which is the weight of the
    latter in the binary cross-entropy; a label that no image has, or all have, has 1.

    Args:
        labels: Class of each image, int64 [n], or which labels it has, bool [n, C].
        num_classes: C.
    """
    counts = count_labels(labels, num_classes)
    weights: np.ndarray
    if labels.ndim == 2:
        others = len(labels) - counts
        weights = np.where((counts > 0) & (others > 0), others / np.maximum(counts, 1), 1.0)
    else:
        weights = len(labels) / np.maximum(counts, 1) / (counts > 0).sum() * (counts > 0)
    return weights.astype(np.float32)
