"""Top-1 accuracy under the fifteen corruptions of CIFAR-10-C and ImageNet-C.

Hendrycks & Dietterich (2019), "Benchmarking neural network robustness to common corruptions and
perturbations": four families, each corruption at five severities, applied to the pixels that the
model sees. Images of up to 64 pixels get the severities of CIFAR-10-C, larger ones those of
ImageNet-C; blur lengths scale with the image. Two textures are synthesised: fog by its spectrum
instead of midpoint displacement, and frost, for which the paper has photographs. So the accuracies
are close to those on the published sets, but not the same.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from vit.evaluation.images import EvaluationSet
from vit.prediction.predictor import BatchPredictor, Pixels
from vit.prediction.probabilities import Float32s, Ints
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress

# [B, H, W, 3], 0…1
Pictures = NDArray[np.float64]
# [odd, odd], sums to one
Kernel = NDArray[np.float64]
# one for each picture
Generators = Sequence[Generator]
Level = tuple[float, ...]
# severities 1…5
Levels = tuple[float | Level, ...]

SEVERITIES = (1, 2, 3, 4, 5)
# largest side, in pixels, that gets the severities of CIFAR-10-C
_MAX_SMALL_SIDE = 64
# pixels that are corrupted at once: about what fits into the processor's cache
_PIXELS_AT_ONCE = 2**13


@dataclass(frozen=True)
class Corruption:
    """One corruption with its levels.

    Attributes:
        small: Levels of CIFAR-10-C, with lengths for 32 pixels.
        large: Levels of ImageNet-C, with lengths for 224 pixels.
        apply: Function that corrupts pictures; None: albumentations does it.
    """

    small: Levels
    large: Levels
    apply: Callable[[Pictures, Level, Generators], Pictures] | None = None


def measure_corruptions(
    predictor: BatchPredictor,
    images: EvaluationSet,
    decide: Callable[[Float32s], Ints] = lambda logits: logits.argmax(axis=1),
) -> dict[str, list[float]]:
    """Measure top-1 under each corruption at severities 1 to 5: 75 passes over the images.

    Args:
        predictor: The model, with the conditions under which it runs.
        images: The images.
        decide: From logits [n, C] to the predicted classes, [n].
    """
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
                top1[name].append(float((decide(logits) == images.labels).mean()))
    return top1


def corrupt_batch(batch: Pixels, *, name: str, severity: int, digests: Sequence[int]) -> Pixels:
    """Corrupt images.

    All severities use the same random numbers, so that only the strength differs. The result
    doesn't depend on an image's place, the batch or the number of processes.

    Args:
        batch: Images, uint8 [B, H, W, 3].
        name: A key of `CORRUPTIONS`.
        severity: 1 to 5.
        digests: 64 bits for each image, which identify it and seed its random numbers.
    """
    corruption = CORRUPTIONS[name]
    is_small = min(batch.shape[1:3]) <= _MAX_SMALL_SIDE
    level = (corruption.small if is_small else corruption.large)[severity - 1]
    if not isinstance(level, tuple):
        level = (level,)
    # Each corruption has its own random numbers.
    code = zlib.crc32(name.encode())
    seeds = [int(np.random.SeedSequence((digest, code)).generate_state(1)[0]) for digest in digests]
    corrupted = np.empty_like(batch)
    if corruption.apply is None:
        transform = _build_transform(name, level, side=min(batch.shape[1:3]))
        for row, (pixels, seed) in enumerate(zip(batch, seeds, strict=True)):
            transform.set_random_seed(seed)
            corrupted[row] = transform(image=np.ascontiguousarray(pixels))["image"]
        return corrupted
    count = max(_PIXELS_AT_ONCE // (batch.shape[1] * batch.shape[2]), 1)
    for start in range(0, len(batch), count):
        part = slice(start, start + count)
        generators = [np.random.default_rng(seed) for seed in seeds[part]]
        pictures = corruption.apply(batch[part] / 255.0, level, generators)
        corrupted[part] = np.round(np.clip(pictures, 0, 1) * 255)
    return corrupted


def _build_transform(name: str, level: Level, *, side: int) -> Any:
    """Build the transform of albumentations for a corruption."""
    # on import it would ask over the network for a newer version of itself
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    # both take long to import
    import albumentations as library
    import cv2

    strength = level[0]
    fixed = (strength, strength)
    if name == "gaussian_noise":
        return library.GaussNoise(std_range=fixed, p=1)
    if name == "impulse_noise":
        return library.SaltAndPepper(amount=fixed, salt_vs_pepper=(0.5, 0.5), p=1)
    if name == "glass_blur":
        _, reach, iterations = map(int, level)
        return library.GlassBlur(strength, max_delta=reach, iterations=iterations, p=1)
    if name == "zoom_blur":
        return library.ZoomBlur(fixed, step_factor=(level[1], level[1]), p=1)
    if name == "elastic_transform":
        sigma = max(level[1] * side, 1)
        border = cv2.BORDER_REFLECT_101
        return library.ElasticTransform(strength * side, sigma=sigma, border_mode=border, p=1)
    assert name == "jpeg_compression"
    return library.ImageCompression(quality_range=(int(strength), int(strength)), p=1)


def _shot_noise(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """Add Poisson noise, by the number of photons at full brightness."""
    photons = [
        random.poisson(rate) for random, rate in zip(generators, pictures * level[0], strict=True)
    ]
    return np.stack(photons) / level[0]


def _defocus_blur(pictures: Pictures, level: Level, _: Generators) -> Pictures:
    """Blur with a disc (radius in pixels) whose edge is softened by a Gaussian (sigma)."""
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
    """Blur along a trail (length in pixels) that fades as half a Gaussian (sigma).

    Its angle is at most 45 degrees from the horizontal.
    """
    length, sigma = (_scale(pixels, pictures) for pixels in level)
    return _filter(
        pictures,
        [_trail(length, sigma, random.uniform(-np.pi / 4, np.pi / 4)) for random in generators],
    )


def _snow(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """Add flakes: noise (mean, deviation), enlarged, cut at a threshold and blurred along the wind.

    The picture below them is made paler.
    """
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
    # Processors differ in the last bits of the Fourier transform, which would decide how a pale
    # pixel halfway between two grey levels is rounded.
    flakes = np.round(flakes, 9)
    pale = keep * pictures + (1 - keep) * np.maximum(
        pictures, 1.5 * pictures.mean(axis=3, keepdims=True) + 0.5
    )
    return np.asarray(pale + flakes + flakes[:, ::-1, ::-1])


def _frost(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """Add the weighted picture and bluish ice: ridged noise, thicker in some places."""
    keep, amount = level
    ridges = 1 - np.abs(2 * _texture(pictures, 1.6, generators) - 1)
    cover = 0.35 + 0.65 * _texture(pictures, 2.5, generators)
    ice = (ridges**3 * cover) * np.array([0.85, 0.95, 1.0])
    return np.asarray(keep * pictures + amount * ice)


def _fog(pictures: Pictures, level: Level, generators: Generators) -> Pictures:
    """Add a cloud with a density, whose details fade by `decay` an octave."""
    density, decay = level
    brightest = pictures.max(axis=(1, 2, 3), keepdims=True)
    cloud = _texture(pictures, np.log2(decay) + 1, generators)
    return np.asarray((pictures + density * cloud) * brightest / (brightest + density))


def _brightness(pictures: Pictures, level: Level, _: Generators) -> Pictures:
    """Raise the value of HSV; hue and saturation stay."""
    value = pictures.max(axis=3, keepdims=True)
    raised = np.minimum(value + level[0], 1)
    return np.asarray(np.where(value > 0, pictures * raised / np.maximum(value, 1e-9), raised))


def _contrast(pictures: Pictures, level: Level, _: Generators) -> Pictures:
    """Scale the distance from the mean of each channel."""
    mean = np.stack([picture.mean(axis=(0, 1), keepdims=True) for picture in pictures])
    return np.asarray((pictures - mean) * level[0] + mean)


def _pixelate(pictures: Pictures, level: Level, _: Generators) -> Pictures:
    """Shrink and enlarge with Pillow's box filter, as in the paper.

    At severity 1 it changes the image by 2.0 grey levels on average, albumentations' Downscale by
    7.9.
    """
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
    """Convert a length given for 32 or 224 pixels to these pictures."""
    side: int = min(pictures.shape[1:3])
    return pixels * side / (32 if side <= _MAX_SMALL_SIDE else 224)


def _filter(pictures: Pictures, kernels: Sequence[Kernel]) -> Pictures:
    """Convolve all pictures with one kernel, or each with its own; edges are mirrored."""
    # takes half a second to import
    from scipy.signal import fftconvolve

    down = kernels[0].shape[0] // 2
    across = kernels[0].shape[1] // 2
    padded = np.pad(pictures, ((0, 0), (down, down), (across, across), (0, 0)), mode="symmetric")
    return np.asarray(fftconvolve(padded, np.stack(kernels)[..., None], mode="valid", axes=(1, 2)))


def _trail(length: float, sigma: float, angle: float) -> Kernel:
    """Build a line from the centre that fades as half a Gaussian."""
    reach = int(np.ceil(length))
    steps = np.linspace(0, length, 4 * reach + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    rows = reach - steps * np.sin(angle)
    columns = reach + steps * np.cos(angle)
    np.add.at(kernel, (np.round(rows).astype(int), np.round(columns).astype(int)), weights)
    return np.asarray(kernel / kernel.sum())


def _texture(pictures: Pictures, slope: float, generators: Generators) -> Pictures:
    """Draw a random field in 0…1 for each picture, [B, H, W, 1].

    Its amplitude falls as frequency ** -slope.
    """
    height, width = pictures.shape[1:3]
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    # removes the mean
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
