"""The confusion matrix and its picture."""

import numpy as np
from matplotlib.figure import Figure

from vit.evaluation.metrics import Scores
from vit.prediction.probabilities import Ints

# With more classes, counts don't fit into the cells, and names don't fit at the axes.
_MAX_NUMBERS = 20
_MAX_NAMES = 40
# With more classes, several share a row: the picture has about 1,400 pixels.
_MAX_ROWS = 1000


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
