"""Top-1 accuracy under the fifteen corruptions of CIFAR-10-C and ImageNet-C.

Hendrycks & Dietterich (2019), "Benchmarking neural network robustness to common corruptions and
perturbations": four families, each corruption at five severities, on the pixels that the model
sees. Severities are those of CIFAR-10-C up to 64 pixels and of ImageNet-C above; blur lengths scale
with the image. Two textures are synthesised: fog by its spectrum instead of midpoint displacement,
and frost, for which the paper has photographs. So metrics compare with each other, and come close
to those on the published sets.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from vit.data.transforms import corrupt_with_library
from vit.evaluation.images import EvaluationSet
from vit.prediction.predictor import Pixels, Predictor
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress

# [B, H, W, 3], 0…1
Pictures = NDArray[np.float64]
# [odd, odd], sums to one
Kernel = NDArray[np.float64]
# of each picture
Generators = Sequence[Generator]
Level = tuple[float, ...]
# severities 1…5
Levels = tuple[float | Level, ...]

SEVERITIES = (1, 2, 3, 4, 5)
# pixels: up to here the severities of CIFAR-10-C
_MAX_SMALL_SIDE = 64
# of the pictures that are corrupted together: about what a cache holds
_PIXELS_AT_ONCE = 2**13


@dataclass(frozen=True)
class Corruption:
    """One corruption with its levels."""

    # of CIFAR-10-C, lengths for 32 pixels
    small: Levels
    # of ImageNet-C, lengths for 224 pixels
    large: Levels
    # None: albumentations' of the same name
    apply: Callable[[Pictures, Level, Generators], Pictures] | None = None


def corrupt_batch(batch: Pixels, *, name: str, severity: int, digests: Sequence[int]) -> Pixels:
    """Corrupt images.

    All severities use the same random numbers, so that they differ in strength alone. Nothing
    depends on an image's place, the batch or the number of processes.

    Args:
        batch: [B, H, W, 3].
        name: in `CORRUPTIONS`.
        severity: 1 to 5.
        digests: of each image 64 bits that identify it and seed its random numbers.
    """
    corruption = CORRUPTIONS[name]
    is_small = min(batch.shape[1:3]) <= _MAX_SMALL_SIDE
    level = (corruption.small if is_small else corruption.large)[severity - 1]
    if not isinstance(level, tuple):
        level = (level,)
    # each corruption has random numbers of its own
    code = zlib.crc32(name.encode())
    seeds = [int(np.random.SeedSequence((digest, code)).generate_state(1)[0]) for digest in digests]
    if corruption.apply is None:
        return corrupt_with_library(name, batch, level, seeds)
    corrupted = np.empty_like(batch)
    count = max(_PIXELS_AT_ONCE // (batch.shape[1] * batch.shape[2]), 1)
    for start in range(0, len(batch), count):
        part = slice(start, start + count)
        generators = [np.random.default_rng(seed) for seed in seeds[part]]
        pictures = corruption.apply(batch[part] / 255.0, level, generators)
        corrupted[part] = np.round(np.clip(pictures, 0, 1) * 255)
    return corrupted


def _shot_noise(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """Poisson noise of so many photons at full brightness."""
    photons = [
        random.poisson(rate) for random, rate in zip(generators, pictures * level[0], strict=True)
    ]
    return np.stack(photons) / level[0]


def _defocus_blur(pictures: Pictures, level: Level, _: Generators) -> Pictures:
    """A disc of a radius in pixels, its edge softened by a Gaussian (sigma)."""
    from scipy.ndimage import gaussian_filter

    radius = _scale(level[0], pictures)
    softness = level[1]
    reach = int(np.ceil(radius + 3 * softness))
    across = np.arange(-reach, reach + 1)
    disc = gaussian_filter(
        (across[:, None] ** 2 + across**2 <= radius**2).astype(float), softness, mode="constant"
    )
    return _filter(pictures, [disc / disc.sum()])


def _motion_blur(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """A trail of a length in pixels that fades as half a Gaussian (sigma), within 45 degrees of
    level."""
    length, sigma = (_scale(pixels, pictures) for pixels in level)
    return _filter(
        pictures,
        [_trail(length, sigma, random.uniform(-np.pi / 4, np.pi / 4)) for random in generators],
    )


def _snow(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """Flakes: noise (mean, deviation) enlarged, cut at a threshold and driven; below them all is
    paler."""
    from scipy.ndimage import zoom

    mean, deviation, enlargement, threshold, length, sigma, keep = level
    height, width = pictures.shape[1:3]
    size = (int(np.ceil(height / enlargement)) + 1, int(np.ceil(width / enlargement)) + 1)
    noise = [
        zoom(random.normal(mean, deviation, size), enlargement, order=1) for random in generators
    ]
    flakes = np.stack(noise)[:, :height, :width]
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1))[..., None]
    angles = [random.uniform(-3 / 4, -1 / 4) * np.pi for random in generators]
    flakes = _filter(
        flakes,
        [_trail(_scale(length, pictures), _scale(sigma, pictures), angle) for angle in angles],
    )
    # the last bits of the Fourier transform, which differ by processor, would decide where a pale
    # pixel without a flake lies halfway between two grey levels
    flakes = np.round(flakes, 9)
    pale = keep * pictures + (1 - keep) * np.maximum(
        pictures, 1.5 * pictures.mean(axis=3, keepdims=True) + 0.5
    )
    return np.asarray(pale + flakes + flakes[:, ::-1, ::-1])


def _frost(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """The picture and bluish ice (ridged noise, thicker in some places), each weighted."""
    keep, amount = level
    ridges = 1 - np.abs(2 * _texture(pictures, 1.6, generators) - 1)
    cover = 0.35 + 0.65 * _texture(pictures, 2.5, generators)
    ice = (ridges**3 * cover) * np.array([0.85, 0.95, 1.0])
    return np.asarray(keep * pictures + amount * ice)


def _fog(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """A cloud of some density whose details fade by `decay` an octave; contrast is kept within
    range."""
    density, decay = level
    brightest = pictures.max(axis=(1, 2, 3), keepdims=True)
    cloud = _texture(pictures, np.log2(decay) + 1, generators)
    return np.asarray((pictures + density * cloud) * brightest / (brightest + density))


def _brightness(pictures: Pictures, level: Level, _: Generators) -> Pictures:
    """The value of HSV raised; hue and saturation stay."""
    value = pictures.max(axis=3, keepdims=True)
    raised = np.minimum(value + level[0], 1)
    return np.asarray(np.where(value > 0, pictures * raised / np.maximum(value, 1e-9), raised))


def _contrast(pictures: Pictures, level: Level, _: Generators) -> Pictures:
    """The distance from each channel's mean, scaled."""
    mean = np.stack([picture.mean(axis=(0, 1), keepdims=True) for picture in pictures])
    return np.asarray((pictures - mean) * level[0] + mean)


def _pixelate(pictures: Pictures, level: Level, _: Generators) -> Pictures:
    """Pillow's box filter, as in the paper: at a severity of 1 it keeps 30 of 32 pixels as they
    are, which albumentations' Downscale blurs by fractions (a mean difference of 7.9 grey levels
    instead of 2.0)."""
    height, width = pictures.shape[1:3]
    size = (width, height)
    small = (max(int(size[0] * level[0]), 1), max(int(size[1] * level[0]), 1))
    images = map(Image.fromarray, np.round(pictures * 255).astype(np.uint8))
    resized = [
        image.resize(small, Image.Resampling.BOX).resize(size, Image.Resampling.BOX)
        for image in images
    ]
    return np.stack([np.asarray(image) for image in resized]) / 255


def _scale(pixels: float, pictures: Pictures) -> float:
    """A length given for 32 or 224 pixels, for these pictures."""
    side: int = min(pictures.shape[1:3])
    return pixels * side / (32 if side <= _MAX_SMALL_SIDE else 224)


def _filter(pictures: Pictures, kernels: Sequence[Kernel]) -> Pictures:
    """Convolution of all pictures with one kernel, or of each with its own; edges are mirrored."""
    # takes half a second, which other commands don't need
    from scipy.signal import fftconvolve

    down = kernels[0].shape[0] // 2
    across = kernels[0].shape[1] // 2
    padded = np.pad(pictures, ((0, 0), (down, down), (across, across), (0, 0)), mode="symmetric")
    return np.asarray(fftconvolve(padded, np.stack(kernels)[..., None], mode="valid", axes=(1, 2)))


def _trail(length: float, sigma: float, angle: float) -> Kernel:
    """A line from the centre, fading as half a Gaussian."""
    reach = int(np.ceil(length))
    steps = np.linspace(0, length, 4 * reach + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    rows = reach - steps * np.sin(angle)
    columns = reach + steps * np.cos(angle)
    np.add.at(kernel, (np.round(rows).astype(int), np.round(columns).astype(int)), weights)
    return np.asarray(kernel / kernel.sum())


def _texture(pictures: Pictures, slope: float, generators: Generators) -> Pictures:
    """A random field [B, H, W, 1] of 0…1 for each picture, whose amplitude falls as frequency **
    -slope."""
    height, width = pictures.shape[1:3]
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    # no mean
    frequency[0, 0] = np.inf
    noise = np.stack([random.standard_normal((height, width)) for random in generators])
    field = np.fft.irfft2(np.fft.rfft2(noise) * frequency**-slope, s=(height, width))[..., None]
    low = field.min(axis=(1, 2, 3), keepdims=True)
    high = field.max(axis=(1, 2, 3), keepdims=True)
    return np.asarray((field - low) / (high - low))


CORRUPTIONS = {
    # noise: standard deviation
    "gaussian_noise": Corruption((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    # photons
    "shot_noise": Corruption((500, 250, 100, 75, 50), (60, 25, 12, 5, 3), _shot_noise),
    # fraction of the pixels
    "impulse_noise": Corruption((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)),
    # blur: radius, softness
    "defocus_blur": Corruption(
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        _defocus_blur,
    ),
    # sigma, reach, iterations
    "glass_blur": Corruption(
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    ),
    # length, sigma
    "motion_blur": Corruption(
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        _motion_blur,
    ),
    # largest zoom, step
    "zoom_blur": Corruption(
        ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    ),
    # weather: mean, deviation, enlargement, threshold, length, sigma, fraction kept
    "snow": Corruption(
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        _snow,
    ),
    # fraction kept, amount of ice
    "frost": Corruption(
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        _frost,
    ),
    # density, decay an octave
    "fog": Corruption(
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        _fog,
    ),
    # added to the value
    "brightness": Corruption((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5), _brightness),
    # digital: factor
    "contrast": Corruption((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05), _contrast),
    # alpha and sigma as fractions of the side, without the paper's affine part
    "elastic_transform": Corruption(
        ((0.04, 0.04), (0.06, 0.04), (0.08, 0.04), (0.11, 0.04), (0.15, 0.04)),
        ((0.03, 0.01), (0.05, 0.01), (0.07, 0.01), (0.09, 0.01), (0.12, 0.01)),
    ),
    # size of the small picture
    "pixelate": Corruption((0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25), _pixelate),
    # quality
    "jpeg_compression": Corruption((80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
}


def measure_corruptions(predictor: Predictor, images: EvaluationSet) -> dict[str, list[float]]:
    """Top-1 under each corruption at severities 1 to 5: 75 passes over the images."""
    total = len(CORRUPTIONS) * len(SEVERITIES) * len(images)
    top1: dict[str, list[float]] = {name: [] for name in CORRUPTIONS}

    def read_corrupted(name: str, severity: int, start: int, stop: int) -> Pixels:
        digests = images.dataset.digests[start:stop].tolist()
        batch = images.read(start, stop)
        return corrupt_batch(batch, name=name, severity=severity, digests=digests)

    with show_progress("corruptions", total, shown=current_process().is_main) as advance:
        for name in CORRUPTIONS:
            for severity in SEVERITIES:
                read = partial(read_corrupted, name, severity)
                logits = predictor.predict(read, count=len(images), on_progress=advance)
                top1[name].append(float((logits.argmax(axis=1) == images.labels).mean()))
    return top1
