"""How images are divided into folds, of which each is left out once."""

import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from vit.data.label_sets import number_label_sets
from vit.evaluation.intervals import number_clusters
from vit.runtime.arguments import shorten

Labels = Int[np.ndarray, " n"] | Bool[np.ndarray, "n C"]
Folds = Int[np.ndarray, " n"]


def assign_folds(
    labels: Labels, groups: Sequence[str] | None = None, *, num_folds: int = 5
) -> NDArray[np.int64]:
    """Return the number of the fold that leaves out each image, or −1 for an image that never is.

    Each class is spread over the folds as evenly as possible, and a group is left out as a whole.
    Images of a class that can't be left out in parts, because it has one group or one image, are
    always trained on. Where images have several labels, the sets of labels are spread, and every
    image is left out once. There are at most `num_folds`; fewer where all images together have
    fewer groups, or a class has fewer images if there are no groups.
    """
    folds = np.full(len(labels), -1, dtype=np.int64)
    several = labels.ndim == 2
    strata = number_label_sets(labels) if several else labels
    if groups is None:
        counts = np.bincount(strata)
        spread = np.flatnonzero(counts > int(not several))
        if len(spread) and len(labels) > 1:
            most = len(labels) if several else int(counts[spread].min())
            rng = np.random.default_rng(0)
            # Each class begins where the one before ended, so that all folds have the same size.
            order = np.concatenate([rng.permutation(np.flatnonzero(strata == s)) for s in spread])
            folds[order] = np.arange(len(order)) % max(min(num_folds, most), 2)
        return folds

    # scikit-learn takes a second to import
    from sklearn.model_selection import StratifiedGroupKFold

    clusters = number_clusters(groups, len(labels))
    # The number of a fold isn't needed here: this finds the classes of one group.
    inside = np.flatnonzero(train_on_whole_classes(clusters, labels) >= 0)
    largest = int(np.bincount(strata[inside], minlength=1).max())
    num_folds = min(num_folds, len(np.unique(clusters[inside])), largest)
    if num_folds < 2:
        return folds
    splitter = StratifiedGroupKFold(num_folds, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        # A class may have fewer images than there are folds.
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        splits = splitter.split(inside, strata[inside], clusters[inside])
        for fold, (_, out) in enumerate(splits):
            folds[inside[out]] = fold
    folds = train_on_whole_classes(folds, labels)
    # Folds without images don't count.
    is_out = folds >= 0
    folds[is_out] = np.unique(folds[is_out], return_inverse=True)[1]
    return folds


def train_on_whole_classes(folds: Folds, labels: Labels) -> NDArray[np.int64]:
    """Return folds with −1 for the images of each class that one fold would leave out as a whole:
    without an image to train on, the class could not be predicted."""
    kept = folds.copy()
    # labels don't need images of their own sets: others have them, too
    if labels.ndim == 1:
        pairs = np.unique(np.stack([labels, folds]), axis=1)
        classes, counts = np.unique(pairs[0], return_counts=True)
        kept[np.isin(labels, classes[counts == 1])] = -1
    return kept


def name_always_trained(folds: Folds, labels: Labels, class_names: Sequence[str]) -> str:
    """Return the end of a sentence with the classes of which no image is ever left out; "" without
    any."""
    names = np.array(class_names)
    if labels.ndim == 2:
        missing = names[labels.any(axis=0) & ~labels[folds >= 0].any(axis=0)]
    else:
        missing = names[np.setdiff1d(labels, labels[folds >= 0])]
    if not len(missing):
        return ""
    return f"; not measured, because of one group or image: {shorten(', '.join(missing))}"
