"""How images are divided into folds, of which each is left out once."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

NUM_FOLDS = 5


def assign_folds(
    labels: Int[np.ndarray, " n"],
    groups: Sequence[str] | None = None,
    *,
    num_folds: int = NUM_FOLDS,
) -> NDArray[np.int64]:
    """Return the number of the fold that leaves out each image, or −1 for an image that never is.

    Each class is spread over the folds as evenly as possible.

    Args:
        labels: [n].
        groups: Group of each image; the images of a group share a fold. None: each image is its
            own group.
        num_folds: Folds at most; there are fewer where a class has fewer images or groups. The only
            image of a class is never left out. If a class has one group, no image is left out.
    """
    folds = np.full(len(labels), -1, dtype=np.int64)
    if groups is not None:
        # scikit-learn takes a second to import
        from sklearn.model_selection import StratifiedGroupKFold

        clusters = number_groups(groups, len(labels))
        groups_a_class = [len(set(clusters[labels == label])) for label in np.unique(labels)]
        num_folds = min(num_folds, *groups_a_class)
        if num_folds > 1:
            splitter = StratifiedGroupKFold(num_folds, shuffle=True, random_state=0)
            for fold, (_, out) in enumerate(splitter.split(clusters, labels, clusters)):
                folds[out] = fold
        return folds

    counts = np.bincount(labels)
    several = counts[counts > 1]
    if not len(several):
        return folds
    num_folds = max(min(num_folds, int(several.min())), 2)
    rng = np.random.default_rng(0)
    start = 0
    for label in np.flatnonzero(counts > 1):
        indices = rng.permutation(np.flatnonzero(labels == label))
        # Each class begins where the one before ended, so that all folds have the same size.
        folds[indices] = (start + np.arange(len(indices))) % num_folds
        start += len(indices)
    return folds


def number_groups(groups: Sequence[str] | None, count: int) -> NDArray[np.int64]:
    """Number the groups of `count` images. None: each image is its own group."""
    if groups is None:
        return np.arange(count)
    return np.unique(np.array(groups, dtype=str), return_inverse=True)[1]
