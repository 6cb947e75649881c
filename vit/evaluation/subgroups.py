"""Metric of the images by the values of a column, such as those of a site, a camera or a day."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit.data.dataset import ImageDataset, printable
from vit.evaluation.images import EvaluationSet
from vit.evaluation.intervals import Interval, number_clusters
from vit.evaluation.metrics import Scores, find_known, measure
from vit.runtime.arguments import shorten
from vit.runtime.numbers import format_percent

# more values make no table that anybody reads
_MAX_VALUES = 100
# fewer are of one class by chance
_MIN_GROUPS = 10


@dataclass(frozen=True)
class Subgroup:
    """The images with one value of a column, its name. The metric is the accuracy, or the mean
    average precision, 0 to 1, null if no image has a label; the 95 % interval is that of groups."""

    name: str
    num_images: int
    num_groups: int
    metric: float | None
    interval: Interval


def read_values(dataset: ImageDataset, column: str) -> dict[str, str]:
    """Return the value of each image in a column of a table: id → text, empty without a value.
    Raises ValueError if there is no such column, or it has more than 100 values."""
    if dataset.rows is None:
        raise ValueError(f"--by {shorten(column)} needs a table with that column")
    found = dataset.read_column(column)
    values = {name: printable(found.get(name, "")) for name in dataset.ids}
    count = len(set(values.values()))
    if count > _MAX_VALUES:
        raise ValueError(
            f"--by {shorten(column)}: it has {count:,} values, and a table shows at most"
            f" {_MAX_VALUES}; add a column of fewer"
        )
    return values


def describe_confounding(
    column: str, values: Sequence[str], images: EvaluationSet, class_names: Sequence[str]
) -> list[str]:
    """Return a sentence if the value of a column tells the class of an image, as a scanner that is
    used for one class does. It does if 95 % of the groups of images have the class that most others
    with their value have, and fewer than a fifth as many don't as don't have the most frequent
    class of all. So values of a single image or patient tell nothing."""
    if images.labels.ndim == 2 or len(class_names) < 2:
        return []
    names, places = np.unique(values, return_inverse=True)
    clusters = number_clusters(images.dataset.groups, len(images))
    # a group counts once for each value and class
    rows = np.unique(np.stack([clusters, places, images.labels]), axis=1)
    counts = np.zeros((len(names), len(class_names)), int)
    np.add.at(counts, (rows[1], rows[2]), 1)
    second, first = np.sort(counts, axis=1)[:, -2:].T
    # without itself, a group must still see more of its class than of another
    total, right = counts.sum(), first[first - 1 > second].sum()
    others = total - counts.sum(axis=0).max()
    if total < _MIN_GROUPS or right < 0.95 * total or total - right >= others / 5:
        return []
    told = [
        f"{name or 'no value'}: {format_percent(row.max() / row.sum(), row.sum())}"
        f" {class_names[row.argmax()]}"
        for name, row in zip(names.tolist(), counts, strict=True)
    ]
    return [
        f"{column} tells the class ({shorten(', '.join(told))}): accuracy by {column} can't show"
        f" whether the model looks at the {column}"
    ]


def measure_subgroups(
    values: Sequence[str], scores: Scores, groups: Sequence[str] | None
) -> list[Subgroup]:
    """Measure the images by the values of a column, the worst first."""
    metric = "map" if scores.is_multilabel else "top1"
    names = np.array([text or "no value" for text in values], dtype=object)
    rows = []
    for name in dict.fromkeys(names.tolist()):
        indices = np.flatnonzero(names == name)
        own = None
        if groups is not None:
            own = [groups[index] for index in indices.tolist()]
        found = measure(scores.subset(indices), own)
        value, interval = find_known(found.metrics[metric]), found.intervals[metric]
        num_groups = len(set(own or indices.tolist()))
        rows.append(Subgroup(name, len(indices), num_groups, value, interval))
    rows.sort(key=lambda row: (row.metric is None, row.metric or 0.0, -row.num_images))
    return rows
