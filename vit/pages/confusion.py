"""The confusion matrix of a report: which classes are shown, in which orders, and the images behind each number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from vit.evaluation.evaluated_images import Images
from vit.evaluation.metrics import Ints, Scores, count_errors
from vit.pages.page import encode_picture

_MOST_CLASSES = 40  # of more, those with the most errors are shown
_LISTED = 100  # images of a cell
_PICTURED = 24  # of these, at most so many with a thumbnail
_THUMBNAIL_SIDE = 64  # pixels
_THUMBNAIL_BYTES = 3_000_000  # of all cells, encoded: keeps the page below 10 MB


def describe_confusion(scores: Scores, names: Sequence[str], images: Images) -> dict[str, Any]:
    """What the template needs: names, counts, support and orders of the classes shown, cells, most frequent errors."""
    pairs, errors = count_errors(scores)
    support = np.bincount(scores.labels, minlength=len(names))
    shown = np.arange(len(names))
    if len(shown) > _MOST_CLASSES:
        of_class = np.bincount(pairs.flatten(), errors.repeat(2), minlength=len(names))  # as label and as prediction
        shown = np.sort(np.argsort(-of_class, kind="stable")[:_MOST_CLASSES])
    counts, cells = _group_cells(scores, shown)
    shown_names = [names[index] for index in shown.tolist()]
    return {
        "names": shown_names,
        "counts": counts.tolist(),
        "support": support[shown].tolist(),
        "num_classes": len(names),
        "orders": _order_classes(counts, shown_names),
        "cells": _describe_cells(cells, scores, images),
        "pairs": [
            {"label": names[row], "predicted": names[column], "count": count}
            for (row, column), count in zip(pairs[:10].tolist(), errors[:10].tolist(), strict=True)
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


def _group_cells(scores: Scores, shown: Ints) -> tuple[Ints, dict[tuple[int, int], list[int]]]:
    """Of the classes shown the counts [S, S], and by (row, column) the first images, the most confident first."""
    position = np.full(scores.num_classes, -1)
    position[shown] = np.arange(len(shown))
    rows, columns = position[scores.labels], position[scores.predicted]
    found = np.flatnonzero((rows >= 0) & (columns >= 0))
    cell = rows[found] * len(shown) + columns[found]
    ordered = found[np.lexsort((-scores.confidence[found], cell))]
    counts = np.bincount(cell, minlength=len(shown) ** 2)
    starts = np.cumsum(counts) - counts
    cells = {
        divmod(number, len(shown)): ordered[starts[number] :][: min(counts[number], _LISTED)].tolist()
        for number in np.flatnonzero(counts).tolist()
    }
    return counts.reshape(len(shown), len(shown)), cells


def _describe_cells(
    cells: dict[tuple[int, int], list[int]], scores: Scores, images: Images
) -> dict[str, list[list[Any]]]:
    """ "row,column" → [path, confidence, thumbnail or null] of the images of each cell. The cells take turns, so that
    each has some thumbnails when not all images can have one."""
    thumbnails: dict[int, str] = {}
    room = _THUMBNAIL_BYTES
    for turn in range(_PICTURED):
        for _, members in sorted(cells.items(), key=lambda cell: cell[0][0] == cell[0][1]):  # errors first
            if turn < len(members) and room > 0:
                index = members[turn]
                picture = Image.fromarray(images.read(index, index + 1)[0])
                picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
                thumbnails[index] = encode_picture(picture, "WEBP")
                room -= len(thumbnails[index])
    return {
        f"{row},{column}": [
            [images.ids[index], round(float(scores.confidence[index]), 4), thumbnails.get(index)] for index in members
        ]
        for (row, column), members in cells.items()
    }
