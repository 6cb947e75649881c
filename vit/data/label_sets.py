"""Several labels an image: their sets, and how splits are stratified over them."""

from collections.abc import Sequence

import numpy as np

from vit.runtime.arguments import shorten

# images below which a set of labels is put together with others that have its rarest label
_FEW = 10


def count_labels(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Count the images of each class, int64 [C], from the class of each image, int64 [n], or from
    which labels it has, bool [n, C]."""
    if labels.ndim == 2:
        return np.asarray(labels.sum(axis=0))
    return np.bincount(labels, minlength=num_classes)


def mark_labels(label_sets: Sequence[Sequence[str]], class_names: Sequence[str]) -> np.ndarray:
    """Return which labels each image has, bool [n, C], from their names. Raises ValueError if one
    is there twice: the list may be a row of 0 and 1."""
    places = {name: place for place, name in enumerate(class_names)}
    marks = np.zeros((len(label_sets), len(class_names)), dtype=bool)
    for mark, labels in zip(marks, label_sets, strict=True):
        mark[[places[label] for label in labels]] = True
        if mark.sum() < len(labels):
            raise ValueError(
                f"{shorten(', '.join(labels), 60)} has a label twice; list the names of the labels,"
                " not 0 and 1"
            )
    return marks


def number_label_sets(labels: np.ndarray) -> np.ndarray:
    """Number the sets of labels, bool [n, C], from 0 without gaps, so that splits are stratified
    over them. A set that few images have counts as its rarest label: otherwise no split but
    training would get any of the many rare combinations."""
    _, numbers, counts = np.unique(labels, axis=0, return_inverse=True, return_counts=True)
    numbers = numbers.reshape(-1)
    # the rarest label of each image; an image without labels has C
    order = np.argsort(labels.sum(axis=0), kind="stable")
    rarest = np.where(labels.any(axis=1), order[labels[:, order].argmax(axis=1)], labels.shape[1])
    is_rare = counts[numbers] < _FEW
    numbers[is_rare] = len(counts) + rarest[is_rare]
    return np.unique(numbers, return_inverse=True)[1]
