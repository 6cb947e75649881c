"""The confusion matrix of a report: which classes are shown, in which orders, and the images behind each number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from vit.evaluation.evaluated_images import Images
from vit.evaluation.metrics import Ints, Scores, compute_confusion
from vit.pages.page import encode_picture

_MOST_CLASSES = 40  # of more, those with the most errors are shown
_LISTED = 100  # images of a cell
_PICTURED = 24  # of these, at most so many with a thumbnail
_THUMBNAIL_SIDE = 64  # pixels
_THUMBNAIL_BYTES = 3_000_000  # of all cells, encoded: keeps the page below 10 MB


def describe_confusion(scores: Scores, names: Sequence[str], images: Images) -> dict[str, Any]:
    """What the template needs: names, counts, support and orders of the classes shown, cells, most frequent errors."""
    confusion = compute_confusion(scores)
    errors = confusion - np.diag(confusion.diagonal())
    shown = list(range(len(names)))
    if len(shown) > _MOST_CLASSES:
        frequent = np.argsort(-(errors.sum(axis=0) + errors.sum(axis=1)), kind="stable")
        shown = sorted(frequent[:_MOST_CLASSES].tolist())
    counts, shown_names = confusion[np.ix_(shown, shown)], [names[index] for index in shown]
    largest = [divmod(index, len(names)) for index in np.argsort(-errors, axis=None, kind="stable")[:10].tolist()]
    return {
        "names": shown_names,
        "counts": counts.tolist(),
        "support": confusion.sum(axis=1)[shown].tolist(),
        "num_classes": len(names),
        "orders": _order_classes(counts, shown_names),
        "cells": _describe_cells(scores, shown, images),
        "pairs": [
            {"label": names[row], "predicted": names[column], "count": int(errors[row, column])}
            for row, column in largest
            if errors[row, column]
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


def _describe_cells(scores: Scores, shown: Sequence[int], images: Images) -> dict[str, list[list[Any]]]:
    """ "row,column" → [path, confidence, thumbnail or null] of the first images of each cell, the most confident
    first. The cells take turns, so that each has some thumbnails when not all images can have one."""
    position = np.full(scores.num_classes, -1)
    position[list(shown)] = np.arange(len(shown))
    rows, columns = position[scores.labels], position[scores.predicted]
    cells: dict[tuple[int, int], list[int]] = {}
    for index in np.lexsort((-scores.confidence, columns, rows)).tolist():
        if rows[index] >= 0 <= columns[index]:
            cells.setdefault((int(rows[index]), int(columns[index])), []).append(index)
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
            [images.ids[index], round(float(scores.confidence[index]), 4), thumbnails.get(index)]
            for index in members[:_LISTED]
        ]
        for (row, column), members in cells.items()
    }
