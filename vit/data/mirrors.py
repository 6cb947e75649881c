"""Classes whose mirror images look like another class, such as arrows to the left and the right."""

from contextlib import suppress
from itertools import product

import numpy as np

from vit.data.dataset import ImageDataset
from vit.data.frames import MIN_SIDE, shrink

# images that are compared, cells of a side, and those by which images may be shifted
_SAMPLE = 400
_SIDE = MIN_SIDE // 2
_SHIFTS = range(-6, 7, 2)
# So many more mirror images resemble the other class than their own: a share of it, and a number.
_MIN_SHARE = 0.3
_MIN_COUNT = 5


def find_mirrored_classes(dataset: ImageDataset) -> tuple[str, str] | None:
    """Find the two classes that mirror images of each other resemble most, by the most similar
    image of a sample; None without such classes, or where an image may have several labels."""
    # takes long to import
    from sklearn.metrics import confusion_matrix

    thumbnails, labels = [], []
    for index in np.random.default_rng(0).permutation(len(dataset))[:_SAMPLE].tolist():
        with suppress(ValueError, OSError):
            thumbnails.append(shrink(dataset.reader.image(index, draft_side=2 * MIN_SIDE)))
            labels.append(dataset.labels[index])
    if dataset.is_multilabel or not labels:
        return None
    # edges: a shape is the same whether it is darker or lighter than its ground
    slopes = np.gradient(np.array(thumbnails, dtype=np.float32), axis=(1, 2))
    edges = np.sqrt(np.hypot(*slopes)).reshape(-1, _SIDE, 2, _SIDE, 2).mean(axis=(2, 4))
    edges -= edges.mean(axis=(1, 2), keepdims=True)
    edges /= np.linalg.norm(edges, axis=(1, 2), keepdims=True) + 1e-6
    shifted = (np.roll(edges, shift, axis=(1, 2)) for shift in product(_SHIFTS, repeat=2))
    similarity = np.max(
        [np.tensordot(edges[..., ::-1], each, axes=([1, 2], [1, 2])) for each in shifted], axis=0
    )
    np.fill_diagonal(similarity, -1)
    nearest = np.array(labels)[similarity.argmax(axis=1)]
    counts = confusion_matrix(labels, nearest, labels=range(len(dataset.class_names)))
    least = np.maximum(_MIN_SHARE * counts.sum(axis=1), _MIN_COUNT)
    excess = counts - (counts.diagonal() + least)[:, None]
    # in both directions: other mirror images only resemble no class
    both = np.minimum(excess, excess.T)
    if both.max() < 0:
        return None
    first, second = np.unravel_index(both.argmax(), both.shape)
    return dataset.class_names[first], dataset.class_names[second]
