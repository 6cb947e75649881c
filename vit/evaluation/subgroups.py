"""Accuracy of parts of the images, such as those of a site, a camera or a day, and a test whether it
differs between them."""

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from vit.data.dataset import ImageDataset, printable
from vit.evaluation.clusters import (
    Interval,
    compute_clustered_interval,
    number_clusters,
    select_groups,
)
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.label_metrics import (
    LabelScores,
    compute_label_intervals,
    compute_label_metrics,
)
from vit.evaluation.metrics import Scores, compute_metrics
from vit.evaluation.significance import SIGNIFICANCE, correct_p_values
from vit.prediction.probabilities import Bools, Ints
from vit.runtime.arguments import shorten
from vit.runtime.numbers import format_interval, format_percent

# Parts with fewer images are joined.
_MIN_IMAGES = 10
# More small parts than this are refused if there is no other.
_MAX_SMALL = 100
# From so many different numbers or times on, they are cut into quartiles.
_MAX_NUMBERS = 12
_NUM_DRAWS = 1999


@dataclass(frozen=True)
class Subgroup:
    """The images with one value of a column. Fractions are 0 to 1.

    Attributes:
        name: The value.
        num_images: Number of images.
        num_groups: Number of groups of these images; null where each image is its own group.
        accuracy: Fraction of images that are right; of several labels, of which all labels are.
        interval: Its 95 % interval, by group.
        mean: Mean recall of the classes (balanced accuracy); of several labels, mean average
            precision. Null without an image of a class.
        mean_interval: Its 95 % interval.
    """

    name: str
    num_images: int
    num_groups: int | None
    accuracy: float
    interval: Interval
    mean: float | None
    mean_interval: Interval


@dataclass(frozen=True)
class SubgroupTable:
    """The images by the values of a column, the worst accuracy first.

    Attributes:
        column: The column.
        titles: Names of `accuracy` and `mean`.
        rows: A subgroup for each value.
        p_value: Permutation test that the accuracy is the same everywhere.
        corrected_p_value: The same, corrected for the number of tables (Holm 1979).
        notes: How the values were joined and what was tested, in sentences.
    """

    column: str
    titles: tuple[str, str]
    rows: list[Subgroup]
    p_value: float
    corrected_p_value: float
    notes: list[str]

    def describe(self) -> str:
        """Return the outcome in a sentence."""
        worst, best = self.rows[0], self.rows[-1]
        if len(self.rows) == 1:
            return f"All images have the same {self.column}, {worst.name}."
        low, high = (
            f"{format_percent(row.accuracy, row.num_images)} for {row.name}"
            for row in (worst, best)
        )
        p_value = self.corrected_p_value
        outcome = "larger" if p_value < SIGNIFICANCE else "no larger"
        return (
            f"{self.titles[0]} by {self.column}: {low}, {high}; the differences are {outcome} than"
            f" chance gives (p = {p_value:.2g})."
        )

    @property
    def headings(self) -> list[str]:
        """Names of the columns of `list_rows`."""
        accuracy, mean = self.titles
        names = [self.column, "images", accuracy, "95 % interval", mean, "95 % interval"]
        if self.rows[0].num_groups is not None:
            names.insert(2, "groups")
        return names

    def list_rows(self) -> list[list[str]]:
        """Return the subgroups as tables for people show them."""
        rows = []
        for row in self.rows:
            cells = [row.name, f"{row.num_images:,}"]
            if row.num_groups is not None:
                cells.append(f"{row.num_groups:,}")
            for value, interval in (
                (row.accuracy, row.interval),
                (row.mean, row.mean_interval),
            ):
                if value is None:
                    cells += ["–", ""]
                else:
                    cells.append(format_percent(value, row.num_images))
                    cells.append(format_interval(interval, row.num_images))
            rows.append(cells)
        return rows


def read_values(dataset: ImageDataset, column: str) -> dict[str, str]:
    """Return the value of each image in a column: id → text, empty without a value.

    Args:
        dataset: The images.
        column: A column of the table that the images are from; "group" for their groups, or
            "folder" for the folder that an image is in, where there is no such column.

    Raises:
        ValueError: There is no such column, or hardly two images have the same value.
    """
    values = _find_values(dataset, column)
    counts = Counter(values.values())
    if len(counts) > _MAX_SMALL and max(counts.values()) < _MIN_IMAGES and not _order(set(counts)):
        raise ValueError(
            f"--by {shorten(column)}: each of its {len(counts):,} values has fewer than"
            f" {_MIN_IMAGES} images; name another column"
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
    values: Mapping[str, Sequence[str]], scores: Scores | LabelScores, groups: Sequence[str] | None
) -> list[SubgroupTable]:
    """Measure the images by the values of columns.

    Args:
        values: Column → value of each image.
        scores: Scores of the images.
        groups: Group of each image. None: each is its own group.
    """
    correct = scores.correct
    titles = ("Top-1 accuracy", "Balanced accuracy")
    if isinstance(scores, LabelScores):
        titles = ("Exact match", "Mean average precision")
    tables = []
    for column, texts in values.items():
        names, notes = _name_parts(column, texts)
        own_groups = groups
        clusters = number_clusters(groups, len(correct))
        parts, numbers = np.unique(np.array(names, dtype=object), return_inverse=True)
        # number of groups in each part
        num_groups = np.bincount(np.unique(np.stack([numbers, clusters]), axis=1)[0])
        has_groups = len(np.unique(clusters)) < len(correct)
        if has_groups and (num_groups == 1).all():
            # only the images of a group can tell about it
            own_groups, clusters = None, np.arange(len(correct))
            notes.append("Each part is one group, so intervals and test are by image.")
            has_groups = False
        rows = []
        for number, name in enumerate(parts.tolist()):
            mask = numbers == number
            mean, mean_interval = _measure_mean(scores, mask, own_groups)
            rows.append(
                Subgroup(
                    name=name,
                    num_images=int(mask.sum()),
                    num_groups=int(num_groups[number]) if has_groups else None,
                    accuracy=float(correct[mask].mean()),
                    interval=compute_clustered_interval(correct[mask], clusters[mask]),
                    mean=mean,
                    mean_interval=mean_interval,
                )
            )
        p_value = compute_permutation_p_value(correct, numbers, clusters)
        unit = "whole groups" if has_groups else "images"
        notes.append(f"Permutation test: {unit} change places {_NUM_DRAWS:,} times.")
        rows.sort(key=lambda row: (row.accuracy, -row.num_images))
        tables.append(SubgroupTable(column, titles, rows, p_value, p_value, notes))
    corrected = correct_p_values([table.p_value for table in tables])
    return [
        replace(table, corrected_p_value=value)
        for table, value in zip(tables, corrected, strict=True)
    ]


def _measure_mean(
    scores: Scores | LabelScores, chosen: Bools, groups: Sequence[str] | None
) -> tuple[float | None, Interval]:
    """Compute the metric of chosen images that counts classes or labels alike, and its interval."""
    groups = select_groups(groups, chosen)
    part = scores.subset(chosen)
    if isinstance(part, Scores):
        recall = compute_metrics(part)["macro_recall"]
        return recall, compute_intervals(part, groups)["macro_recall"]
    value = compute_label_metrics(part)["map"]
    interval = compute_label_intervals(part, groups)["map"]
    if np.isnan(value):
        return None, interval
    return value, interval


def _name_parts(column: str, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the part that each image is in, and how values were joined, in sentences."""
    notes = []
    names = list(texts)
    known = {text for text in texts if text}
    places = _order(known)
    if places:
        ordered = sorted((text for text in texts if text), key=places.__getitem__)
        positions = np.array([places[text] for text in ordered])
        edges = np.quantile(positions, (0.25, 0.5, 0.75))
        quartile_of = {text: int(np.searchsorted(edges, places[text])) for text in known}
        shown = {}
        for quartile in set(quartile_of.values()):
            members = [text for text in ordered if quartile_of[text] == quartile]
            low, high = members[0], members[-1]
            shown[quartile] = low if low == high else f"{low} to {high}"
        names = [shown[quartile_of[text]] if text else "" for text in texts]
        notes.append(f"{len(known):,} values of {column} are cut into quartiles.")
    counts = Counter(names)
    few = {name for name, count in counts.items() if count < _MIN_IMAGES}
    # if all are small, each stays
    if 1 < len(few) < len(counts):
        joined = f"{len(few):,} others"
        names = [joined if name in few else name for name in names]
        notes.append(f"Values of fewer than {_MIN_IMAGES} images are joined.")
    return [name or "no value" for name in names], notes


def _order(texts: set[str]) -> dict[str, float]:
    """Return the place of each text if these are many numbers or many dates; otherwise nothing."""
    texts = texts - {""}
    if len(texts) <= _MAX_NUMBERS:
        return {}
    for read in (float, _read_time):
        try:
            places = {text: read(text) for text in texts}
        except (ValueError, OverflowError):
            continue
        if np.isfinite(list(places.values())).all():
            return places
    return {}


def _read_time(text: str) -> float:
    """Return seconds since a fixed time. Raises ValueError for a text that is no date of ISO 8601."""
    moment = datetime.datetime.fromisoformat(text)
    return (moment.replace(tzinfo=None) - datetime.datetime(2000, 1, 1)).total_seconds()


def compute_permutation_p_value(correct: Bools, parts: Ints, clusters: Ints) -> float:
    """Compute the p-value that the accuracy is the same in all parts, by a permutation test.

    The statistic is Pearson's chi-square. Groups that are in one part change places as a whole, and
    the images of another group among themselves: what is left as it was can't be told from the
    correlation within groups. Without groups this is an exact test of the table of counts, up to
    the number of draws.

    Args:
        correct: True for each image that is right, [n].
        parts: Number of each image's part, [n].
        clusters: Number of each image's group, [n].
    """
    rng = np.random.default_rng(0)
    num_parts = int(parts.max()) + 1
    if num_parts == 1 or correct.all() or not correct.any():
        return 1.0
    clusters = np.unique(clusters, return_inverse=True)[1].reshape(-1)
    num_clusters = int(clusters.max()) + 1
    first = np.full(num_clusters, -1)
    first[clusters[::-1]] = parts[::-1]
    is_split = np.bincount(clusters, parts != first[clusters], minlength=num_clusters) > 0
    # images of groups that are in several parts, sorted by group
    inside = np.argsort(clusters, kind="stable")
    inside = inside[is_split[clusters[inside]]]
    owner = clusters[inside]
    # whole groups, then these images, change places, with their numbers of images and hits
    sizes = np.append(np.bincount(clusters)[~is_split], np.ones(len(inside)))
    hits = np.append(np.bincount(clusters, correct)[~is_split], correct[inside])
    mean = correct.mean()

    def compute_statistic(whole: Ints, own: Ints) -> float:
        numbers = np.append(whole, own)
        counts = np.bincount(numbers, sizes, minlength=num_parts)
        sums = np.bincount(numbers, hits, minlength=num_parts)
        return float(((sums - mean * counts) ** 2 / np.maximum(counts, 1)).sum())

    whole, own = first[~is_split], parts[inside]
    measured = compute_statistic(whole, own)
    num_extreme = 0
    for _ in range(_NUM_DRAWS):
        shuffled = own[np.argsort(owner + rng.random(len(own)))]
        drawn = compute_statistic(rng.permutation(whole), shuffled)
        # equal tables differ by rounding alone
        num_extreme += drawn >= measured * (1 - 1e-9)
    return (num_extreme + 1) / (_NUM_DRAWS + 1)
