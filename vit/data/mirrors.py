"""Classes whose mirror images look like another class, such as arrows to the left and to the right."""

from contextlib import suppress
from itertools import product

import numpy as np
from PIL import Image

from vit.data.dataset import ImageDataset

_SIDE = 32
# images that are compared
_SAMPLE = 400
# cells of 32 by which images may be shifted against each other
_SHIFTS = range(-6, 7, 2)
# Mirror images resemble the other class more often than their own: by this share of the class, and
# by so many standard deviations of chance.
_MIN_SHARE = 0.3
_MIN_DEVIATIONS = 3


def find_mirrored_classes(dataset: ImageDataset) -> tuple[str, str] | None:
    """Find the two classes that mirror images of each other look most like, by the most similar one
    of a sample of images; None without such classes, or where an image may have several labels."""
    if dataset.is_multilabel:
        return None
    edges, labels = [], []
    for index in np.random.default_rng(0).permutation(len(dataset))[:_SAMPLE].tolist():
        with suppress(ValueError, OSError):
            edges.append(_find_edges(dataset.reader.image(index, draft_side=4 * _SIDE)))
            labels.append(dataset.labels[index])
    if not edges:
        return None
    cells = np.stack(edges)
    num_classes = len(dataset.class_names)
    # class of the images, and of the most similar ones, [C, C]
    plain, mirrored = (
        np.histogram2d(labels, np.array(labels)[nearest], bins=np.arange(num_classes + 1) - 0.5)[0]
        for nearest in (_find_nearest(cells, cells), _find_nearest(cells[..., ::-1], cells))
    )
    sums = mirrored + mirrored.diagonal()[:, None]
    least = np.maximum(_MIN_SHARE * mirrored.sum(axis=1)[:, None], _MIN_DEVIATIONS * np.sqrt(sums))
    excess = mirrored - mirrored.diagonal()[:, None] - least
    # without the mirror, images resemble their own class
    excess[plain >= plain.diagonal()[:, None]] = -np.inf
    # in both directions: other mirror images only resemble no class
    both = np.minimum(excess, excess.T)
    first, second = np.unravel_index(both.argmax(), both.shape)
    if both[first, second] < 0:
        return None
    return dataset.class_names[first], dataset.class_names[second]


def _find_edges(image: Image.Image) -> np.ndarray:
    """Find the edges between colours, float32 [32, 32]: a shape is the same whether it is darker or
    lighter than its ground."""
    # takes long to import
    from scipy.ndimage import gaussian_filter

    small = image.resize((_SIDE, _SIDE), Image.Resampling.BOX)
    down, across = np.gradient(np.asarray(small, np.float32), axis=(0, 1))
    strengths = gaussian_filter(np.sqrt(np.hypot(down, across).max(axis=-1)), 0.7)
    strengths -= strengths.mean()
    return np.asarray(strengths / max(np.linalg.norm(strengths), 1e-6), np.float32)


def _find_nearest(queries: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Find the image with the most similar edges at the best shift, but for the one at the same
    place, int64 [n]."""
    count = len(cells)
    similarity = np.full((count, count), -np.inf, dtype=np.float32)
    for shift in product(_SHIFTS, repeat=2):
        shifted = np.roll(cells, shift, axis=(1, 2)).reshape(count, -1)
        np.maximum(similarity, queries.reshape(count, -1) @ shifted.T, out=similarity)
    np.fill_diagonal(similarity, -np.inf)
    return np.asarray(similarity.argmax(axis=1))
