"""Charts of reports, as SVG in the page's colours."""

import html
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vit.evaluation.metrics import Bin, Scores
from vit.evaluation.thresholds import ThresholdRates
from vit.prediction.probabilities import Bools, Floats

# drawn in this colour, which becomes that of the page's text
_TEXT = "#010203"
_TEXT_COLOURS: Any = dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT
)
# seen on light and on dark pages
_COLOUR, _OTHER = "#3987d6", "#c9761a"
# With more classes, the matrix has those with the most errors, and no numbers in its cells.
_MAX_CLASSES = 40
_MAX_NUMBERS = 20


def render_figure(figure: Figure, title: str) -> str:
    """Return a figure as SVG for a page, whose text has the page's colour. Names are escaped.

    Args:
        figure: A figure that was made with `_TEXT_COLOURS`.
        title: Text for screen readers.
    """
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vit"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # a page needs no addresses of standards, and gives the picture its width
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    label = html.escape(title)
    text = text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return text.replace(_TEXT, "currentColor")


def draw_chart(
    title: str,
    x_label: str,
    y_label: str,
    draw: Callable[[Axes], object],
    *,
    is_unit: bool = True,
) -> str:
    """Draw one chart.

    Args:
        title, x_label, y_label: Its texts.
        draw: Function that draws into the axes.
        is_unit: Both axes are from 0 to 1.
    """
    with mpl.rc_context(_TEXT_COLOURS):
        # as wide as a column of the page
        figure = Figure(figsize=(4.2, 2.9), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.spines[["top", "right"]].set_visible(False)
        if is_unit:
            axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
        return render_figure(figure, f"{title}: {y_label} against {x_label}")


def build_reliability_chart(
    bins: Sequence[Bin], *, x_label: str = "confidence", y_label: str = "accuracy"
) -> str:
    """Draw the accuracy, or the frequency of labels, against the confidence."""

    def draw(axes: Axes) -> None:
        shown = [bin for bin in bins if bin.count]
        centres = [(bin.lower + bin.upper) / 2 for bin in shown]
        heights = [bin.accuracy for bin in shown]
        axes.bar(centres, heights, width=0.9 / len(bins), color=_COLOUR)
        axes.plot((0, 1), (0, 1), "--", color=_OTHER, label="perfectly calibrated")

    return draw_chart("Reliability", x_label, y_label, draw)


def build_curve_charts(
    probabilities: Floats, is_positive: Bools, decided: ThresholdRates
) -> list[str]:
    """Draw the ROC and the precision-recall curve of one label that some images have and others
    don't.

    Args:
        probabilities: Probability of the label, [n].
        is_positive: Which images have it, [n].
        decided: Rates at the threshold that decides, which is marked.
    """
    # scikit-learn takes a second to import
    from sklearn.metrics import precision_recall_curve, roc_curve

    alarms, found, _ = roc_curve(is_positive, probabilities)
    precision, recall, _ = precision_recall_curve(
        is_positive, probabilities, drop_intermediate=True
    )
    frequency = float(is_positive.mean())
    sensitivity, false = decided.sensitivity, 1 - decided.specificity
    hits = frequency * sensitivity
    predicted = hits + (1 - frequency) * false

    def draw(axes: Axes, curve: Any, guess: Any, point: Any) -> None:
        axes.plot(*curve, color=_COLOUR, label="model")
        axes.plot(*guess, "--", color=_OTHER, label="guessing")
        axes.plot(*point, "o", color=_OTHER, label="threshold in use")

    roc = ((alarms, found), ((0, 1), (0, 1)), (false, sensitivity))
    # without the point of no predictions
    curve = (recall[:-1], precision[:-1])
    point = (sensitivity, hits / predicted if predicted else np.nan)
    trade = (curve, ((0, 1), (frequency, frequency)), point)
    return [
        draw_chart(
            "ROC curve", "false-positive rate", "sensitivity", lambda axes: draw(axes, *roc)
        ),
        draw_chart(
            "Precision-recall curve", "recall", "precision", lambda axes: draw(axes, *trade)
        ),
    ]


def plot_confusion(scores: Scores, *, class_names: Sequence[str]) -> Figure:
    """Draw the confusion matrix: the colour is the fraction of the true class (row). If there are
    many classes, it has those with the most errors as label or as prediction."""
    # see `build_curve_charts`
    from sklearn.metrics import confusion_matrix

    chosen = np.arange(scores.num_classes)
    if scores.num_classes > _MAX_CLASSES:
        is_wrong = scores.labels != scores.predicted
        confused = np.concatenate([scores.labels[is_wrong], scores.predicted[is_wrong]])
        num_errors = np.bincount(confused, minlength=scores.num_classes)
        chosen = np.sort(np.argsort(-num_errors, kind="stable")[:_MAX_CLASSES])
    # scikit-learn refuses labels that aren't among the classes that are shown
    is_shown = np.isin(scores.labels, chosen) & np.isin(scores.predicted, chosen)
    counts = np.zeros((len(chosen), len(chosen)), int)
    if is_shown.any():
        counts = confusion_matrix(
            scores.labels[is_shown], scores.predicted[is_shown], labels=chosen
        )
    support = np.bincount(scores.labels, minlength=scores.num_classes)[chosen]
    # a class without images stays white
    fractions = counts / np.maximum(support, 1)[:, None]
    side = min(2.5 + 0.3 * len(chosen), 11)
    # outside of pyplot, whose figures stay in memory
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(fractions, vmin=0, vmax=1, cmap="Blues")
    # matplotlib reads formulas between dollars
    names = [class_names[place].replace("$", r"\$") for place in chosen.tolist()]
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_xticks(range(len(chosen)), names, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(chosen)), names)
    if len(chosen) <= _MAX_NUMBERS:
        for row, column in np.argwhere(counts).tolist():
            colour = "white" if fractions[row, column] > 0.5 else "black"
            text = str(counts[row, column])
            axes.text(column, row, text, ha="center", va="center", fontsize="small", color=colour)
    return figure


def draw_confusion(scores: Scores, class_names: Sequence[str]) -> str:
    """Draw the confusion matrix for a page."""
    with mpl.rc_context(_TEXT_COLOURS):
        return render_figure(plot_confusion(scores, class_names=class_names), "Confusion matrix")
