"""Charts of reports, as SVG in the page's colours."""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vit.evaluation.metrics import Bin, Scores
from vit.evaluation.thresholds import ThresholdRates
from vit.prediction.probabilities import Bools, Floats, Ints

Points = Sequence[tuple[float, float]]
# drawn in this colour, which becomes that of the page's text
_TEXT = "#010203"
# seen on light and on dark pages; the second one is dashed
_COLOURS = ("#3987d6", "#c9761a")
_MIN_ANSWERED = 10
_MAX_POINTS = 200
# With more classes, the matrix has those with the most errors, and no numbers in its cells.
_MAX_CLASSES = 40
_MAX_NUMBERS = 20


def render_figure(figure: Figure, title: str) -> str:
    """Return a figure as SVG for a page, whose text has the page's colour. Names are escaped.

    Args:
        figure: A figure that was made within `mpl.rc_context`, see `draw_chart`.
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
    size: tuple[float, float] = (4.2, 2.9),
) -> str:
    """Draw one chart.

    Args:
        title, x_label, y_label: Its texts.
        draw: Function that draws into the axes.
        is_unit: Both axes are from 0 to 1.
        size: Inches.
    """
    colours: Any = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with mpl.rc_context(dict.fromkeys(colours, _TEXT)):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.spines[["top", "right"]].set_visible(False)
        if is_unit:
            axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
        return render_figure(figure, f"{title}: {y_label} against {x_label}")


def draw_lines(axes: Axes, series: Mapping[str, Points]) -> None:
    """Draw series of points, the second one dashed."""
    for (name, points), colour, style in zip(series.items(), _COLOURS, ("-", "--"), strict=False):
        marker = "o" if len(points) <= 30 else ""
        x, y = np.array(points).T
        axes.plot(x, y, style, color=colour, label=name, marker=marker, markersize=3)


def build_history_chart(
    title: str, series: Mapping[str, Points], *, y_label: str, y_range: Sequence[float] = (0,)
) -> str:
    """Draw one or two series of (epoch, value). The vertical axis includes the values of
    `y_range`."""

    def draw(axes: Axes) -> None:
        draw_lines(axes, series)
        values = [value for points in series.values() for _, value in points]
        axes.set_ylim(min(*y_range, *values, 0), 1.02 * max(*y_range, *values))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return draw_chart(title, "epoch", y_label, draw, is_unit=False)


def build_reliability_chart(
    bins: Sequence[Bin], *, x_label: str = "confidence", y_label: str = "accuracy"
) -> str:
    """Draw the accuracy, or the frequency of labels, against the confidence."""

    def draw(axes: Axes) -> None:
        shown = [bin for bin in bins if bin.count]
        axes.bar(
            [(bin.lower + bin.upper) / 2 for bin in shown],
            [bin.accuracy for bin in shown],
            width=0.9 / len(bins),
            color=_COLOURS[0],
        )
        axes.plot((0, 1), (0, 1), "--", color=_COLOURS[1], label="perfectly calibrated")

    return draw_chart("Reliability", x_label, y_label, draw)


def build_selective_chart(confidence: Floats, correct: Bools) -> str:
    """Draw the accuracy of the most confident images against their share of all images: the
    risk-coverage curve of El-Yaniv & Wiener 2010, upside down."""
    order = np.argsort(-confidence, kind="stable")
    counts = np.arange(1, len(order) + 1)
    accuracy = np.cumsum(correct[order]) / counts
    # equally confident images count together
    is_last = np.append(np.diff(confidence[order]) != 0, True)
    ends = np.flatnonzero(is_last)
    # the accuracy of the first few images jumps
    ends = ends[counts[ends] >= min(_MIN_ANSWERED, len(order))]
    points = _thin(counts[ends] / len(order), accuracy[ends])
    return draw_chart(
        "Accuracy of answered images",
        "share answered, the most confident first",
        "accuracy",
        lambda axes: draw_lines(axes, {"": points}),
    )


def build_curve_charts(
    probabilities: Floats, is_positive: Bools, decided: ThresholdRates | None = None
) -> list[str]:
    """Draw the ROC and the precision-recall curve of one label; nothing unless some images have it
    and others don't.

    Args:
        probabilities: Probability of the label, [n].
        is_positive: Which images have it, [n].
        decided: Rates at the threshold that decides, which is marked.
    """
    # scikit-learn takes a second to import
    from sklearn.metrics import precision_recall_curve, roc_curve

    if is_positive.all() or not is_positive.any():
        return []
    rates, sensitivity, _ = roc_curve(is_positive, probabilities)
    precision, recall, _ = precision_recall_curve(
        is_positive, probabilities, drop_intermediate=True
    )
    frequency = float(is_positive.mean())
    marks: list[Points] = [[], []]
    if decided is not None:
        alarms = 1 - decided.specificity
        hits = frequency * decided.sensitivity
        predicted = hits + (1 - frequency) * alarms
        marks[0] = [(alarms, decided.sensitivity)]
        if predicted:
            marks[1] = [(decided.sensitivity, hits / predicted)]
    curves: list[tuple[tuple[str, str, str], Points, Points]] = [
        (
            ("ROC curve", "false-positive rate", "sensitivity"),
            _thin(rates, sensitivity),
            [(0.0, 0.0), (1.0, 1.0)],
        ),
        (
            ("Precision-recall curve", "recall", "precision"),
            # without the point of no predictions
            _thin(recall[:-1], precision[:-1]),
            [(0.0, frequency), (1.0, frequency)],
        ),
    ]
    charts = []
    for (titles, points, guess), mark in zip(curves, marks, strict=True):

        def draw(
            axes: Axes, points: Points = points, guess: Points = guess, mark: Points = mark
        ) -> None:
            axes.plot(*np.array(points).T, color=_COLOURS[0], label="model")
            axes.plot(*np.array(guess).T, "--", color=_COLOURS[1], label="guessing")
            if mark:
                axes.plot(*mark[0], "o", color=_COLOURS[1], label="threshold in use")

        charts.append(draw_chart(*titles, draw))
    return charts


def _thin(x: Floats, y: Floats) -> Points:
    """Return at most 200 points of a curve, with both ends."""
    chosen = np.linspace(0, len(x) - 1, min(len(x), _MAX_POINTS)).astype(int)
    return list(zip(x[chosen].tolist(), y[chosen].tolist(), strict=True))


def choose_classes(scores: Scores) -> Ints:
    """Return all classes, or if there are many, those with the most errors as label or as
    prediction."""
    if scores.num_classes <= _MAX_CLASSES:
        return np.arange(scores.num_classes)
    is_wrong = scores.labels != scores.predicted
    confused = np.concatenate([scores.labels[is_wrong], scores.predicted[is_wrong]])
    num_errors = np.bincount(confused, minlength=scores.num_classes)
    return np.sort(np.argsort(-num_errors, kind="stable")[:_MAX_CLASSES])


def count_confusion(scores: Scores, chosen: Ints) -> Ints:
    """Count the images of each chosen class (row) that are predicted as each, [S, S]."""
    position = np.full(scores.num_classes, -1)
    position[chosen] = np.arange(len(chosen))
    rows, columns = position[scores.labels], position[scores.predicted]
    is_shown = (rows >= 0) & (columns >= 0)
    size = len(chosen)
    cells = rows[is_shown] * size + columns[is_shown]
    return np.bincount(cells, minlength=size**2).reshape(size, size)


def plot_confusion(scores: Scores, *, class_names: Sequence[str]) -> Figure:
    """Draw the confusion matrix: the colour is the fraction of the true class (row)."""
    chosen = choose_classes(scores)
    counts = count_confusion(scores, chosen)
    support = np.bincount(scores.labels, minlength=scores.num_classes)[chosen]
    fractions = counts / np.maximum(support, 1)[:, None]
    side = min(2.5 + 0.3 * len(chosen), 11)
    # outside of pyplot, whose figures stay in memory
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(fractions, vmin=0, vmax=1, cmap="Blues")
    # matplotlib reads formulas between dollars
    names = [class_names[place].replace("$", r"\$") for place in chosen]
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_xticks(range(len(chosen)), names, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(chosen)), names)
    if len(chosen) <= _MAX_NUMBERS:
        for row, column in np.argwhere(counts).tolist():
            axes.text(
                column,
                row,
                str(counts[row, column]),
                ha="center",
                va="center",
                fontsize="small",
                color="white" if fractions[row, column] > 0.5 else "black",
            )
    return figure


def draw_confusion(scores: Scores, class_names: Sequence[str]) -> str:
    """Draw the confusion matrix for a page."""
    colours: Any = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with mpl.rc_context(dict.fromkeys(colours, _TEXT)):
        return render_figure(plot_confusion(scores, class_names=class_names), "Confusion matrix")
