"""The confusion matrix of the report: its classes, their orders, and the images of each cell."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import Scores, count_confusions
from vit.explanation.render.page import encode_picture
from vit.prediction.probabilities import Ints

_MAX_CLASSES = 40
# most frequent errors, listed below the matrix
_MAX_PAIRS = 10
# images listed for a cell, and how many of them have a thumbnail
_MAX_LISTED = 100
_MAX_PICTURED = 24
# pixels
_THUMBNAIL_SIDE = 64
# Thumbnails of all cells, about: this keeps the page below 10 MB.
_THUMBNAILS = 1500

# (row, column) → images
Cells = dict[tuple[int, int], list[int]]


def describe_confusion(
    scores: Scores, names: Sequence[str], images: EvaluationSet
) -> dict[str, Any]:
    """Return what the template needs: names, counts, support and orders of the shown classes, the
    images of each cell, and the most frequent errors."""
    shown = _choose_classes(scores)
    shown_names = [names[index] for index in shown.tolist()]
    counts, cells = _group_cells(scores, shown)
    thumbnails = _draw_thumbnails(cells, images)

    places = {index: place for place, index in enumerate(shown.tolist())}
    pairs = count_confusions(scores.labels, scores.predicted, num_classes=len(names))
    shown_pairs = [pair for pair in pairs if pair.label in places and pair.predicted in places]
    return {
        "names": shown_names,
        # class → its row and column
        "places": places,
        "counts": counts.tolist(),
        "support": np.bincount(scores.labels, minlength=len(names))[shown].tolist(),
        "orders": _order_classes(counts, shown_names),
        # path, confidence, and thumbnail or null, for the images of each cell
        "cells": {
            f"{row},{column}": [
                (
                    images.ids[index],
                    round(float(scores.confidence[index]), 4),
                    thumbnails.get(index),
                )
                for index in members
            ]
            for (row, column), members in cells.items()
        },
        "pairs": shown_pairs[:_MAX_PAIRS],
    }


def _choose_classes(scores: Scores) -> Ints:
    """Return all classes, or with many, those with the most errors as label or prediction."""
    if scores.num_classes <= _MAX_CLASSES:
        return np.arange(scores.num_classes)
    is_wrong = scores.labels != scores.predicted
    confused = np.concatenate([scores.labels[is_wrong], scores.predicted[is_wrong]])
    num_errors = np.bincount(confused, minlength=scores.num_classes)
    return np.sort(np.argsort(-num_errors, kind="stable")[:_MAX_CLASSES])


def _order_classes(counts: Ints, names: Sequence[str]) -> dict[str, list[int]]:
    orders = {
        "the model's order": list(range(len(names))),
        "name": sorted(range(len(names)), key=lambda index: names[index]),
    }
    if len(counts) > 2:
        # classes that are often confused are neighbours
        fractions = counts / np.maximum(counts.sum(axis=1), 1)[:, None]
        distance = 1 - (fractions + fractions.T) / 2
        np.fill_diagonal(distance, 0)
        tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
        orders["confused classes together"] = leaves_list(tree).tolist()
    return orders


def _group_cells(scores: Scores, shown: Ints) -> tuple[Ints, Cells]:
    """Return counts of the shown classes, [S, S], and the most confident images of each cell."""
    position = np.full(scores.num_classes, -1)
    position[shown] = np.arange(len(shown))
    rows = position[scores.labels]
    columns = position[scores.predicted]
    surest_first = np.argsort(-scores.confidence, kind="stable")
    is_shown = (rows >= 0) & (columns >= 0)

    counts = np.zeros((len(shown), len(shown)), np.int64)
    cells: Cells = defaultdict(list)
    for index in surest_first[is_shown[surest_first]].tolist():
        cell = int(rows[index]), int(columns[index])
        counts[cell] += 1
        if len(cells[cell]) < _MAX_LISTED:
            cells[cell].append(index)
    return counts, dict(sorted(cells.items()))


def _draw_thumbnails(cells: Cells, images: EvaluationSet) -> dict[int, str]:
    """Draw the first images of each cell, fewer for each if there are many cells."""
    images_a_cell = min(_MAX_PICTURED, 1 + _THUMBNAILS // max(len(cells), 1))
    # the first thumbnails of every cell matter more than many of one cell
    thumbnails: dict[int, str] = {}
    for members in cells.values():
        for index in members[:images_a_cell]:
            picture = Image.fromarray(images.read(index, index + 1)[0])
            picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
            thumbnails[index] = encode_picture(picture, "WEBP")
    return thumbnails
