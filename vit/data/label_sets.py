"""Several labels an image: their sets, and how splits are stratified over them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit.data.class_names import check_classes
from vit.runtime.arguments import shorten

# Images with several labels, or none, from which a set isn't one of classes with a few mistakes: a
# fraction of all, and a number.
_MIN_SEVERAL = 0.1
_MIN_IMAGES = 3
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


def are_several(num_others: int, count: int) -> bool:
    """Decide whether images have several labels, or one class with a few mistakes.

    Args:
        num_others: Images that have several labels, or none where a class would be marked.
        count: All images.
    """
    return num_others >= max(_MIN_SEVERAL * count, _MIN_IMAGES)


def read_label_sets(
    values: Sequence[Any], *, class_names: Sequence[str] | None, task: str | None
) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """Read labels from Python where an image may have several.

    Args:
        values: For each image a row of 0 and 1 with a number for each label, or a list of names or
            of whole numbers from 0.
        class_names: Names of the labels; None for "class 0" and so on, or the names in the lists.
        task: See `vit.data.dataset.LabelRule`.

    Returns:
        Which labels each image has, bool [n, C], and their names; None if each image has one class.

    Raises:
        ValueError: `task` is "multilabel", and the labels are neither; or a label has no name.
    """
    if task == "classes":
        return None
    lists = [list(value) for value in values if isinstance(value, Collection | np.ndarray)]
    are_names = all(isinstance(value, str) for each in lists for value in each)
    if len(lists) < len(values) or any(isinstance(value, str | bytes) for value in values):
        lists = []
    lengths = {len(each) for each in lists}
    is_row = lists and len(lengths) == 1 and not are_names
    is_row = is_row and all(value in (0, 1) for each in lists for value in each)
    if is_row and lengths != {1}:
        num_others = sum(sum(each) != 1 for each in lists)
        names = tuple(class_names or (f"class {place}" for place in range(*lengths)))
        if len(names) != lengths.pop():
            return None
        if task is None and not are_several(num_others, len(lists)):
            return None
        return np.array(lists, dtype=bool), names
    are_indices = all(_are_indices(each) for each in lists)
    is_list = lists and (are_names or are_indices)
    if not is_list or (task is None and lengths == {1}):
        if task == "multilabel":
            raise ValueError(
                "the labels of dataset are not several an image: pass rows of 0 and 1, or lists of"
                f" names, instead of {shorten(repr(values[0]))}"
            )
        return None
    if not are_names:
        num_classes = 1 + max((int(value) for each in lists for value in each), default=0)
        known = tuple(class_names or (f"class {place}" for place in range(num_classes)))
        if num_classes > len(known):
            text = f"the label {num_classes - 1} of dataset is not one of {len(known)} names"
            raise ValueError(f"{text}; name each label")
        lists = [[known[int(value)] for value in each] for each in lists]
        return mark_labels(lists, known), known
    used = {name for each in lists for name in each}
    # the model's order, if it knows all labels
    names = tuple(class_names or sorted(used))
    if unknown := used - set(names):
        text = f"the label {min(unknown)!r} of dataset is not one of {shorten(', '.join(names))}"
        raise ValueError(f"{text}; name each label")
    return mark_labels(lists, names), names


def _are_indices(values: Sequence[Any]) -> bool:
    """Return true for whole numbers from 0, each once."""
    is_right = all(
        isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 0
        for value in values
    )
    return is_right and len(set(values)) == len(values)
