"""Charts of reports, as SVG in the page's colours."""

import html
import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vit.evaluation.metrics import ClassMetrics, Scores, bin_confidence
from vit.prediction.probabilities import Bools, Floats

# drawn in this colour, which becomes that of the page's text
_TEXT = "#010203"
_STYLE: Any = {
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT
    ),
    "svg.fonttype": "none",
    "svg.hashsalt": "vit",
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# seen on light and on dark pages
_COLOUR, _OTHER = "#3987d6", "#c9761a"
# With more classes, the matrix has no numbers in its cells.
_MAX_NUMBERS = 20


def draw_chart(
    title: str,
    labels: tuple[str, str],
    draw: Callable[[Axes], object],
    *,
    size: tuple[float, float] = (4.2, 2.9),
) -> str:
    """Draw one chart for a page by a function that draws into its axes, which have these labels.
    The size is in inches, by default that of a column. Names are escaped."""
    file = io.StringIO()
    with mpl.rc_context(_STYLE):
        # outside of pyplot, whose figures stay in memory
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set(title=title, xlabel=labels[0], ylabel=labels[1])
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
        figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # a page needs no addresses of standards
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    label = html.escape(f"{title}: {labels[1]} against {labels[0]}")
    text = text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return text.replace(_TEXT, "currentColor")


def draw_reliability(scores: Scores) -> str:
    """Draw the accuracy, or the frequency of labels, against the confidence."""
    counts, _, accuracies = bin_confidence(scores)
    centres = (np.arange(len(counts)) + 0.5) / len(counts)

    def draw(axes: Axes) -> None:
        axes.bar(centres, accuracies, width=0.9 / len(counts), color=_COLOUR)
        axes.plot((0, 1), (0, 1), "--", color=_OTHER, label="perfectly calibrated")

    labels = ("probability", "frequency") if scores.is_multilabel else ("confidence", "accuracy")
    return draw_chart("Reliability", labels, draw)


def draw_curves(probabilities: Floats, is_positive: Bools, row: ClassMetrics) -> list[str]:
    """Draw the ROC and the precision-recall curve of one label that some images have and others
    don't, with the threshold that decides."""
    # scikit-learn takes a second to import
    from sklearn.metrics import PrecisionRecallDisplay, RocCurveDisplay

    def draw(display: Any, point: tuple[Any, Any], axes: Axes) -> None:
        display.from_predictions(
            is_positive,
            probabilities,
            drop_intermediate=True,
            ax=axes,
            plot_chance_level=True,
            chance_level_kw={"color": _OTHER},
        )
        axes.plot(*point, "o", color=_OTHER, label="threshold in use")

    roc = partial(draw, RocCurveDisplay, (1 - (row.specificity or 0), row.recall))
    trade = partial(draw, PrecisionRecallDisplay, (row.recall, row.precision))
    return [
        draw_chart("ROC curve", ("false-positive rate", "sensitivity"), roc),
        draw_chart("Precision-recall curve", ("recall", "precision"), trade),
    ]


def draw_confusion(scores: Scores, class_names: Sequence[str]) -> str:
    """Draw the confusion matrix: the colour is the number of images."""
    # see `draw_curves`
    from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

    counts = confusion_matrix(scores.labels, scores.predicted, labels=range(len(class_names)))
    # matplotlib reads formulas between dollars
    names = [name.replace("$", r"\$") for name in class_names]
    display = ConfusionMatrixDisplay(counts, display_labels=names)

    def draw(axes: Axes) -> None:
        has_numbers = len(names) <= _MAX_NUMBERS
        display.plot(
            include_values=has_numbers, cmap="Blues", xticks_rotation=60, ax=axes, colorbar=False
        )

    side = min(2.5 + 0.3 * len(names), 11)
    return draw_chart("Confusion matrix", ("predicted", "true"), draw, size=(side + 1, side))
