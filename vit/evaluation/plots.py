"""The confusion matrix as a figure and as an image file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vit.evaluation.metrics import Scores, compute_confusion
from vit.runtime.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NAMES = 40  # classes whose names are still legible at the axes
_MOST_ROWS = 1000  # of more classes each is several: the picture has 1,400 pixels for them


def draw_confusion(scores: Scores, *, class_names: tuple[str, ...], path: Path) -> None:
    """Write the figure of `plot_confusion` as PNG."""
    figure = plot_confusion(scores, class_names=class_names)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))


def plot_confusion(scores: Scores, *, class_names: tuple[str, ...]) -> Figure:
    """Draw the fraction of each true class (row) that was predicted as each class (column)."""
    from matplotlib.figure import Figure  # takes half a second, which training doesn't need

    count, group = len(class_names), -(-len(class_names) // _MOST_ROWS)
    confusion, of_each = compute_confusion(scores, group=group), f" ({group} classes a row)" if group > 1 else ""
    fractions = confusion / confusion.sum(axis=1, keepdims=True).clip(min=1)
    side = min(3 + 0.45 * count, 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(fractions, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(image, ax=axes, fraction=0.04, label="fraction of the true class")
    axes.set(xlabel="predicted", ylabel=f"true{of_each}")
    if count <= _MOST_NAMES:
        axes.set_xticks(range(count), class_names, rotation=60, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(count), class_names)
    if count <= 20:
        for row, column in np.argwhere(confusion).tolist():
            color = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, str(confusion[row, column]), ha="center", va="center", color=color, fontsize=8)
    return figure
