"""Metric of the images by the values of a column, such as those of a site, a camera or a day."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from vit.data.dataset import ImageDataset, printable
from vit.evaluation.clusters import Interval
from vit.evaluation.metrics import Scores, find_known, measure
from vit.runtime.arguments import shorten
from vit.runtime.numbers import format_interval, format_percent

# more values make no table that anybody reads
_MAX_VALUES = 100


@dataclass(frozen=True)
class Subgroup:
    """The images with one value of a column.

    Attributes:
        name: The value.
        num_images: Number of images.
        num_groups: Number of groups of these images; null where each image is its own group.
        metric: The metric, 0 to 1; null if it isn't defined for these images.
        interval: Its 95 % interval, by group.
    """

    name: str
    num_images: int
    num_groups: int | None
    metric: float | None
    interval: Interval


@dataclass(frozen=True)
class SubgroupTable:
    """The images by the values of a column, the worst first.

    Attributes:
        column: The column.
        title: Name of the metric: top-1 accuracy, or mean average precision of several labels.
        rows: A subgroup for each value.
    """

    column: str
    title: str
    rows: list[Subgroup]

    @property
    def headings(self) -> list[str]:
        """Names of the columns of `list_rows`."""
        names = [self.column, "images", self.title, "95 % interval"]
        if self.rows[0].num_groups is not None:
            names.insert(2, "groups")
        return names

    def list_rows(self) -> list[list[str]]:
        """Return the cells of each row."""
        rows = []
        for row in self.rows:
            cells = [row.name, f"{row.num_images:,}"]
            if row.num_groups is not None:
                cells.append(f"{row.num_groups:,}")
            if row.metric is None:
                cells += ["–", ""]
            else:
                cells.append(format_percent(row.metric, row.num_images))
                cells.append(format_interval(row.interval, row.num_images))
            rows.append(cells)
        return rows


def read_values(dataset: ImageDataset, column: str) -> dict[str, str]:
    """Return the value of each image in a column: id → text, empty without a value.

    Args:
        dataset: The images.
        column: A column of the table that the images are from; "group" for their groups, or
            "folder" for the folder that an image is in, where there is no such column.

    Raises:
        ValueError: There is no such column, or it has more than 100 values.
    """
    values = _find_values(dataset, column)
    count = len(set(values.values()))
    if count > _MAX_VALUES:
        raise ValueError(
            f"--by {shorten(column)}: it has {count:,} values, and a table shows at most"
            f" {_MAX_VALUES}; add a column of fewer, such as ranges"
        )
    return values


def _find_values(dataset: ImageDataset, column: str) -> dict[str, str]:
    reason = "these images are from no table"
    if dataset.read_column is not None:
        try:
            found = dataset.read_column(column)
            return {name: _show(found.get(name)) for name in dataset.ids}
        except ValueError as error:
            reason = str(error)
    if column == "group" and dataset.groups is not None:
        return dict(zip(dataset.ids, map(printable, dataset.groups), strict=True))
    folders = {name: printable(PurePosixPath(name).parent.name) for name in dataset.ids}
    if column == "folder" and any(folders.values()):
        return folders
    raise ValueError(
        f"--by {shorten(column)}: {reason}; folder is the folder of an image, and group its group"
    )


def _show(value: Any) -> str:
    return "" if value is None or value != value else printable(str(value).strip())


def build_tables(
    values: Mapping[str, Sequence[str]], scores: Scores, groups: Sequence[str] | None
) -> list[SubgroupTable]:
    """Measure the images by the values of columns.

    Args:
        values: Column → value of each image.
        scores: Scores of the images.
        groups: Group of each image. None: each is its own group.
    """
    metric, title = "top1", "Top-1 accuracy"
    if scores.is_multilabel:
        metric, title = "map", "Mean average precision"
    has_groups = groups is not None and len(set(groups)) < len(groups)
    tables = []
    for column, texts in values.items():
        names = np.array([text or "no value" for text in texts], dtype=object)
        rows = []
        for name in dict.fromkeys(names.tolist()):
            # images of one value, and the groups among them
            chosen = names == name
            own = num_groups = None
            if groups is not None:
                own = np.array(groups, dtype=object)[chosen].tolist()
            if has_groups and own:
                num_groups = len(set(own))
            found = measure(scores.subset(chosen), own)
            value, interval = find_known(found.metrics[metric]), found.intervals[metric]
            rows.append(Subgroup(name, int(chosen.sum()), num_groups, value, interval))
        rows.sort(key=lambda row: (row.metric is None, row.metric or 0.0, -row.num_images))
        tables.append(SubgroupTable(column, title, rows))
    return tables
