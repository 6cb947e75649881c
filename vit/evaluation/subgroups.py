"""Metric of the images by the values of a column, such as those of a site, a camera or a day."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit.data.dataset import ImageDataset, printable
from vit.evaluation.images import EvaluationSet
from vit.evaluation.intervals import Interval
from vit.evaluation.metrics import Scores, find_known, measure
from vit.runtime.arguments import shorten

# more values make no table that anybody reads
_MAX_VALUES = 100


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
            f" {_MAX_VALUES}; add a column of fewer, such as ranges"
        )
    return values


def tells_class(values: Sequence[str], images: EvaluationSet) -> bool:
    """Return true if all images with a value of a column have one class, as with a scanner for each
    class, and the mean value has more than two groups."""
    pairs = {pair for pair in zip(values, map(str, images.labels), strict=True) if pair[0]}
    is_one_each = len(pairs) == len(dict(pairs)) and 2 * len(pairs) < images.num_groups
    return is_one_each and len(set(dict(pairs).values())) > 1


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
