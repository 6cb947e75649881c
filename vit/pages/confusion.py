"""The confusion matrix of a report: which classes are shown, in which orders, and the images behind
each number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import Ints, Scores, count_errors
from vit.pages.page import encode_picture

# of more, those with the most errors are shown
_MAX_CLASSES = 40
# most frequent errors below the matrix
_MAX_PAIRS = 10
# images of a cell
_MAX_LISTED = 100
# of these, at most so many with a thumbnail
_MAX_PICTURED = 24
# pixels
_THUMBNAIL_SIDE = 64
# of all cells, encoded: keeps the page below 10 MB
_THUMBNAIL_BYTES = 3_000_000

# (row, column) → images
Cells = dict[tuple[int, int], list[int]]


def describe_confusion(
    scores: Scores, names: Sequence[str], images: EvaluationSet
) -> dict[str, Any]:
    """What the template needs: names, counts, support and orders of the classes shown, cells, most
    frequent errors."""
    pairs, errors = count_errors(scores)
    num_classes = len(names)
    shown = np.arange(num_classes)
    if num_classes > _MAX_CLASSES:
        # as label and as prediction
        errors_of_class = np.bincount(pairs.flatten(), errors.repeat(2), minlength=num_classes)
        shown = np.sort(np.argsort(-errors_of_class, kind="stable")[:_MAX_CLASSES])
    shown_names = [names[index] for index in shown.tolist()]
    counts, cells = _group_cells(scores, shown)
    most_frequent = zip(pairs[:_MAX_PAIRS].tolist(), errors[:_MAX_PAIRS].tolist(), strict=True)
    return {
        "names": shown_names,
        "counts": counts.tolist(),
        "support": np.bincount(scores.labels, minlength=num_classes)[shown].tolist(),
        "num_classes": num_classes,
        "orders": _order_classes(counts, shown_names),
        "cells": _describe_cells(cells, scores, images),
        "pairs": [
            {"label": names[row], "predicted": names[column], "count": count}
            for (row, column), count in most_frequent
        ],
    }


def _order_classes(counts: Ints, names: Sequence[str]) -> dict[str, list[int]]:
    fractions = counts / np.maximum(counts.sum(axis=1), 1)[:, None]
    orders = {
        "the model's order": np.arange(len(counts)),
        "name": np.array(sorted(range(len(names)), key=lambda index: names[index])),
        "worst recall first": np.argsort(fractions.diagonal(), kind="stable"),
        "most images first": np.argsort(-counts.sum(axis=1), kind="stable"),
    }
    if len(counts) > 2:
        # classes that are often confused lie side by side
        distance = 1 - (fractions + fractions.T) / 2
        np.fill_diagonal(distance, 0)
        tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
        orders["confused classes together"] = leaves_list(tree)
    return {name: order.tolist() for name, order in orders.items()}


def _group_cells(scores: Scores, shown: Ints) -> tuple[Ints, Cells]:
    """Of the classes shown the counts [S, S], and the first images of each cell, the most confident
    first."""
    size = len(shown)
    position = np.full(scores.num_classes, -1)
    position[shown] = np.arange(size)
    rows = position[scores.labels]
    columns = position[scores.predicted]
    images = np.flatnonzero((rows >= 0) & (columns >= 0))

    # sorted by cell, then by confidence: each cell is a slice
    cell_numbers = rows[images] * size + columns[images]
    images = images[np.lexsort((-scores.confidence[images], cell_numbers))]
    counts = np.bincount(cell_numbers, minlength=size**2)
    starts = np.cumsum(counts) - counts
    cells = {}
    for number in np.flatnonzero(counts).tolist():
        stop = starts[number] + min(counts[number], _MAX_LISTED)
        cells[divmod(number, size)] = images[starts[number] : stop].tolist()
    return counts.reshape(size, size), cells


def _describe_cells(
    cells: Cells, scores: Scores, images: EvaluationSet
) -> dict[str, list[list[Any]]]:
    """ "row,column" → [path, confidence, thumbnail or null] of the images of each cell."""
    thumbnails = _draw_thumbnails(cells, images)
    return {
        f"{row},{column}": [
            [images.ids[index], round(float(scores.confidence[index]), 4), thumbnails.get(index)]
            for index in members
        ]
        for (row, column), members in cells.items()
    }


def _draw_thumbnails(cells: Cells, images: EvaluationSet) -> dict[int, str]:
    """Thumbnails by image. The cells take turns, errors first, so that each has some when not all
    images can have one."""
    errors_first = sorted(cells.items(), key=lambda cell: cell[0][0] == cell[0][1])
    thumbnails: dict[int, str] = {}
    bytes_left = _THUMBNAIL_BYTES
    for turn in range(_MAX_PICTURED):
        for _, members in errors_first:
            if turn < len(members) and bytes_left > 0:
                index = members[turn]
                picture = Image.fromarray(images.read(index, index + 1)[0])
                picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
                thumbnails[index] = encode_picture(picture, "WEBP")
                bytes_left -= len(thumbnails[index])
    return thumbnails
