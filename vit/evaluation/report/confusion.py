"""The confusion matrix: its picture, and in the report its classes, their orders, and the images of
each cell."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import Scores, count_confusions
from vit.explanation.render.page import encode_picture
from vit.prediction.probabilities import Ints

# With more classes, counts don't fit into the cells, and names don't fit at the axes.
_MAX_NUMBERS = 20
_MAX_NAMES = 40
# With more classes, several share a row: the picture has about 1,400 pixels.
_MAX_ROWS = 1000

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


def compute_confusion(scores: Scores, *, group: int = 1) -> Ints:
    """Compute the confusion matrix.

    Args:
        scores: Scores of n images of C classes.
        group: Number of neighbouring classes that share a row and a column. For 20,000 classes the
            whole matrix would take 3 GB.

    Returns:
        Counts [C, C]: rows are the true classes, columns the predicted ones.
    """
    size = -(-scores.num_classes // group)
    pairs = scores.labels // group * size + scores.predicted // group
    return np.bincount(pairs, minlength=size**2).reshape(size, size)


def plot_confusion(scores: Scores, *, class_names: tuple[str, ...]) -> Figure:
    """Draw the fraction of each true class (row) that was predicted as each class (column)."""
    num_classes = len(class_names)
    group = -(-num_classes // _MAX_ROWS)
    confusion = compute_confusion(scores, group=group)
    fractions = confusion / confusion.sum(axis=1, keepdims=True).clip(min=1)

    side = min(3 + 0.45 * num_classes, 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(fractions, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(image, ax=axes, fraction=0.04, label="fraction of the true class")
    axes.set(xlabel="predicted", ylabel="true")
    if group > 1:
        axes.set_ylabel(f"true ({group} classes a row)")
    if num_classes <= _MAX_NAMES:
        places = range(num_classes)
        axes.set_xticks(places, class_names, rotation=60, ha="right", rotation_mode="anchor")
        axes.set_yticks(places, class_names)
    if num_classes <= _MAX_NUMBERS:
        for row, column in np.argwhere(confusion).tolist():
            axes.text(
                column,
                row,
                str(confusion[row, column]),
                ha="center",
                va="center",
                color="white" if fractions[row, column] > 0.5 else "black",
                fontsize=8,
            )
    return figure


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
