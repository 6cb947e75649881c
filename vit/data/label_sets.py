"""Several labels an image: their sets, and how splits are stratified over them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vit.data.class_names import check_classes
from vit.runtime.arguments import shorten

# images below which a set of labels is put together with others that have its rarest label
_FEW = 10


def count_labels(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Count the images of each class, or with each label, int64 [C].

    Args:
        labels: Class of each image, int64 [n], or which labels it has, bool [n, C].
        num_classes: C.
    """
    if labels.ndim == 2:
        counts: np.ndarray = labels.sum(axis=0)
        return counts
    return np.bincount(labels, minlength=num_classes)


def mark_labels(label_sets: Iterable[Iterable[str]], class_names: Sequence[str]) -> np.ndarray:
    """Return which labels each image has, bool [n, C].

    Args:
        label_sets: Names of the labels of each image.
        class_names: All labels, in the order of the columns.
    """
    places = {name: place for place, name in enumerate(class_names)}
    rows = [[places[label] for label in labels] for labels in label_sets]
    marks = np.zeros((len(rows), len(class_names)), dtype=bool)
    for mark, row in zip(marks, rows, strict=True):
        mark[row] = True
    return marks


def number_label_sets(labels: np.ndarray) -> np.ndarray:
    """Number the sets of labels, so that splits are stratified over them.

    A set that few images have counts as its rarest label: otherwise no split but training would get
    any of the many rare combinations.

    Args:
        labels: Which labels each image has, bool [n, C].

    Returns:
        int64 [n], numbers from 0 without gaps.
    """
    _, numbers, counts = np.unique(labels, axis=0, return_inverse=True, return_counts=True)
    numbers = numbers.reshape(-1)
    # the rarest label of each image; an image without labels has C
    order = np.argsort(labels.sum(axis=0), kind="stable")
    rarest = np.where(labels.any(axis=1), order[labels[:, order].argmax(axis=1)], labels.shape[1])
    is_rare = counts[numbers] < _FEW
    numbers[is_rare] = len(counts) + rarest[is_rare]
    strata: np.ndarray = np.unique(numbers, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return strata


def describe_label_sets(labels: np.ndarray) -> str:
    """Describe how many labels the images have: "3 labels, 1.4 an image, 12 % with none"."""
    without = 1 - labels.any(axis=1).mean()
    return (
        f"several labels an image: {labels.shape[1]} labels, {labels.sum(axis=1).mean():.1f} an image,"
        f" {100 * without:.0f} % with none"
    )


def mark_splits(
    label_sets: Mapping[str, Sequence[Iterable[str]]], class_names: Sequence[str], *, origin: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Mark the labels of the images of each split.

    Args:
        label_sets: Split → names of the labels of each of its images.
        class_names: All labels, in the order of the columns.
        origin: Name of the data, at the start of messages.

    Returns:
        Split → bool [n, C]; and sentences about labels that no training image has, or all have.

    Raises:
        ValueError: There are fewer than two labels, or two look the same.
    """
    if len(class_names) == 1:
        raise ValueError(
            f"{origin} has the label {shorten(class_names[0])!r} alone; give the images without it a"
            " class of their own, and leave out data.task"
        )
    check_classes(class_names, origin=origin)
    marks = {split: mark_labels(sets, class_names) for split, sets in label_sets.items()}
    notes = []
    if "train" in marks:
        for places, text in (
            (~marks["train"].any(axis=0), "no training image has the label"),
            (marks["train"].all(axis=0), "every training image has the label"),
        ):
            names = [class_names[place] for place in np.flatnonzero(places).tolist()]
            if names:
                text = f"{text} {shorten(', '.join(names))}"
                notes.append(f"{text}; add others, or leave it out with data.classes")
    return marks, notes
