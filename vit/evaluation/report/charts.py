"""Coordinates of SVG charts, which `charts.html.jinja` draws in the page's colours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator

from vit.evaluation.metrics import Bin
from vit.evaluation.thresholds import ThresholdRates
from vit.prediction.probabilities import Bools, Floats
from vit.runtime.numbers import format_percent

Points = Sequence[tuple[float, float]]
_MIN_ANSWERED = 10
_MAX_POINTS = 200


@dataclass(frozen=True)
class Mark:
    """A point or bar in pixels of the chart, and its tooltip."""

    x: float
    y: float
    text: str = ""
    width: float = 0
    height: float = 0


@dataclass(frozen=True)
class Line:
    """One series; `style` is 0 or 1, for its colour and dashes."""

    name: str
    marks: list[Mark]
    style: int


@dataclass(frozen=True)
class Chart:
    """A chart as the template needs it."""

    title: str
    x_label: str
    y_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]
    bars: Sequence[Mark] = ()
    # in pixels: the whole chart, and the area between the axes
    width = 400
    height = 250
    left = 68
    right = 388
    top = 12
    bottom = 208


def build_history_chart(
    title: str, series: Mapping[str, Points], *, y_label: str, y_range: Sequence[float] = (0,)
) -> Chart:
    """Draw one or more series of (epoch, value). The vertical axis includes the values of
    `y_range`."""
    epochs = [epoch for points in series.values() for epoch, _ in points]
    values = [value for points in series.values() for _, value in points]
    place_x, x_ticks = fit_axis(epochs, Chart.left, Chart.right, is_count=True)
    place_y, y_ticks = fit_axis([*values, *y_range], Chart.bottom, Chart.top)
    lines = []
    for style, (name, points) in enumerate(series.items()):
        marks = [
            Mark(place_x(epoch), place_y(value), f"{name}, epoch {epoch:g}: {value:.3g}")
            for epoch, value in points
        ]
        lines.append(Line(name, marks, style))
    return Chart(title, "epoch", y_label, x_ticks, y_ticks, lines)


def build_reliability_chart(
    bins: Sequence[Bin], *, x_label: str = "confidence", y_label: str = "accuracy"
) -> Chart:
    """Draw the accuracy, or the frequency of labels, against the confidence."""
    counted = "images correct" if y_label == "accuracy" else "are there"
    place_x, x_ticks = fit_axis((0, 1), Chart.left, Chart.right)
    place_y, y_ticks = fit_axis((0, 1), Chart.bottom, Chart.top)
    bars = []
    for bin in bins:
        if bin.count == 0:
            continue
        text = f"{x_label} {bin.lower:.2f}–{bin.upper:.2f}: "
        text += f"{round(bin.accuracy * bin.count)} of {bin.count} {counted}"
        top = place_y(bin.accuracy)
        # leaves a gap of two pixels between bars
        width = place_x(bin.upper) - place_x(bin.lower) - 2
        height = place_y(0) - top
        bars.append(Mark(place_x(bin.lower) + 1, top, text, width, height))
    diagonal = [Mark(place_x(value), place_y(value)) for value in (0, 1)]
    ideal = Line("perfectly calibrated", diagonal, style=1)
    return Chart("Reliability", x_label, y_label, x_ticks, y_ticks, [ideal], bars)


def build_selective_chart(confidence: Floats, correct: Bools) -> Chart:
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
    # more points would only make the page larger
    ends = ends[np.linspace(0, len(ends) - 1, min(len(ends), _MAX_POINTS)).astype(int)]
    place_x, x_ticks = fit_axis((0, 1), Chart.left, Chart.right)
    place_y, y_ticks = fit_axis((0, 1), Chart.bottom, Chart.top)
    marks = []
    for end in ends.tolist():
        share = counts[end] / len(order)
        least = confidence[order[end]]
        correct_text = format_percent(accuracy[end], int(counts[end]))
        text = f"{100 * share:.0f} % answered, confidence from {least:.2f}: {correct_text} correct"
        marks.append(Mark(place_x(share), place_y(float(accuracy[end])), text))
    line = Line("the most confident images", marks, style=0)
    return Chart(
        "Accuracy of answered images", "share answered", "accuracy", x_ticks, y_ticks, [line]
    )


def build_curve_charts(
    probabilities: Floats, is_positive: Bools, decided: ThresholdRates | None = None
) -> list[Chart]:
    """Draw both curves; nothing unless some images have the label and others don't.

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
    roc_point = precision_point = None
    text = ""
    if decided is not None:
        text = f"from a probability of {decided.threshold:.4g}"
        alarms = 1 - decided.specificity
        roc_point = (alarms, decided.sensitivity)
        hits = frequency * decided.sensitivity
        predicted = hits + (1 - frequency) * alarms
        if predicted:
            precision_point = (decided.sensitivity, hits / predicted)
    return [
        _draw_curve(
            ("ROC curve", "false-positive rate", "sensitivity"),
            _thin(rates, sensitivity),
            [(0.0, 0.0), (1.0, 1.0)],
            roc_point,
            text,
        ),
        _draw_curve(
            ("Precision-recall curve", "recall", "precision"),
            # without the point of no predictions
            _thin(recall[:-1], precision[:-1]),
            [(0.0, frequency), (1.0, frequency)],
            precision_point,
            text,
        ),
    ]


def _thin(x: Floats, y: Floats) -> Points:
    """Return at most 200 points of a curve, with both ends."""
    chosen = np.linspace(0, len(x) - 1, min(len(x), _MAX_POINTS)).astype(int)
    return list(zip(x[chosen].tolist(), y[chosen].tolist(), strict=True))


def _draw_curve(
    titles: tuple[str, str, str],
    points: Points,
    guess: Points,
    decided: tuple[float, float] | None,
    text: str,
) -> Chart:
    """Draw one curve, that of guessing, and the point that is used, with its tooltip."""
    title, x_label, y_label = titles
    place_x, x_ticks = fit_axis((0, 1), Chart.left, Chart.right)
    place_y, y_ticks = fit_axis((0, 1), Chart.bottom, Chart.top)

    def place(name: str, values: Points, style: int, text: str = "") -> Line:
        return Line(name, [Mark(place_x(x), place_y(y), text) for x, y in values], style)

    lines = [place("model", points, 0), place("guessing", guess, 1)]
    if decided is not None:
        x, y = decided
        tip = f"{text}: {x_label} {x:.3g}, {y_label} {y:.3g}"
        lines.append(place("● threshold in use", [decided], 1, tip))
    return Chart(title, x_label, y_label, x_ticks, y_ticks, lines)


def fit_axis(
    values: Sequence[float], start: float, stop: float, *, is_count: bool = False
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Return a function from values to pixels between `start` and `stop`, and the ticks.

    An axis of counts ends at its values and has whole ticks; other axes end at a tick.
    """
    low = min(values)
    high = max(values)
    if high == low:
        low -= 0.5
        high += 0.5
    locator = MaxNLocator(nbins=5, integer=is_count)
    ticks = [float(tick) for tick in locator.tick_values(low, high)]
    if not is_count:
        low = ticks[0]
        high = ticks[-1]
    # so that rounding loses no tick at an end
    slack = (high - low) * 1e-9

    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (stop - start)

    shown = [tick for tick in ticks if low - slack <= tick <= high + slack]
    return place, [(place(tick), f"{tick:.6g}") for tick in shown]
