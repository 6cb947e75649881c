"""How images are divided into folds, of which each is left out once."""

import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from vit.data.label_sets import number_label_sets
from vit.evaluation.clusters import number_clusters
from vit.runtime.arguments import shorten

NUM_FOLDS = 5


def assign_folds(
    labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n C"],
    groups: Sequence[str] | None = None,
    *,
    num_folds: int = NUM_FOLDS,
) -> NDArray[np.int64]:
    """Return the number of the fold that leaves out each image, or −1 for an image that never is.

    Each class is spread over the folds as evenly as possible. Images of a class that can't be left
    out in parts, because it has one group or one image, are always trained on. Where images have
    several labels, the sets of labels are spread, and every image is left out once.

    Args:
        labels: Class of each image, [n], or which labels it has, [n, C].
        groups: Group of each image; the images of a group that are left out share a fold. None:
            each image is its own group.
        num_folds: Folds at most; there are fewer where all images together have fewer groups, or
            where a class has fewer images if there are no groups.
    """
    folds = np.full(len(labels), -1, dtype=np.int64)
    several = labels.ndim == 2
    if several:
        labels = number_label_sets(labels)
    if groups is not None:
        # scikit-learn takes a second to import
        from sklearn.model_selection import StratifiedGroupKFold

        clusters = number_clusters(groups, len(labels))
        # The number of a fold isn't needed here: this finds the classes of one group.
        inside = np.flatnonzero(several | (train_on_whole_classes(clusters, labels) >= 0))
        class_sizes = np.bincount(labels[inside], minlength=1)
        num_folds = min(num_folds, len(np.unique(clusters[inside])), int(class_sizes.max()))
        if num_folds > 1:
            splitter = StratifiedGroupKFold(num_folds, shuffle=True, random_state=0)
            with warnings.catch_warnings():
                # A class may have fewer images than there are folds.
                warnings.filterwarnings("ignore", "The least populated class", UserWarning)
                splits = splitter.split(inside, labels[inside], clusters[inside])
                for fold, (_, out) in enumerate(splits):
                    folds[inside[out]] = fold
            if not several:
                folds = train_on_whole_classes(folds, labels)
            # Folds without images don't count.
            is_out = folds >= 0
            folds[is_out] = np.unique(folds[is_out], return_inverse=True)[1]
        return folds

    counts = np.bincount(labels)
    min_images = int(not several)
    sizes = counts[counts > min_images]
    if not len(sizes) or len(labels) < 2:
        return folds
    most = len(labels) if several else int(sizes.min())
    num_folds = max(min(num_folds, most), 2)
    rng = np.random.default_rng(0)
    start = 0
    for label in np.flatnonzero(counts > min_images):
        indices = rng.permutation(np.flatnonzero(labels == label))
        # Each class begins where the one before ended, so that all folds have the same size.
        folds[indices] = (start + np.arange(len(indices))) % num_folds
        start += len(indices)
    return folds


def train_on_whole_classes(
    folds: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n C"]
) -> NDArray[np.int64]:
    """Return folds with −1 for the images of each class that one fold would leave out as a whole:
    without an image to train on, the class could not be predicted."""
    kept = folds.copy()
    # labels don't need images of their own sets: others have them, too
    if labels.ndim == 2:
        return kept
    pairs = np.unique(np.stack([labels, folds]), axis=1)
    classes, counts = np.unique(pairs[0], return_counts=True)
    kept[np.isin(labels, classes[counts == 1])] = -1
    return kept


def list_always_trained(
    folds: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"] | Bool[np.ndarray, "n C"]
) -> list[int]:
    """Return the labels of the classes of which no image is ever left out."""
    if labels.ndim == 2:
        is_left_out = labels[folds >= 0].any(axis=0)
        return np.flatnonzero(labels.any(axis=0) & ~is_left_out).tolist()
    always_trained: list[int] = np.setdiff1d(labels, labels[folds >= 0]).tolist()
    return always_trained


def describe_always_trained(class_names: Sequence[str]) -> str:
    """Return the end of a sentence about an accuracy: the classes that it leaves out."""
    if not class_names:
        return ""
    names = shorten(", ".join(class_names))
    return f"; always trained on and not measured, because of one group or image: {names}"
