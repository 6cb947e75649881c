"""Numbers to the coordinates of an SVG chart; `charts.html.jinja` draws them in the page's
colours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from vit.analysis.learning_curve.curve import LearningCurve
from vit.evaluation.metrics import Bin, Floats

Points = Sequence[tuple[float, float]]
_MIN_ANSWERED = 10
_MAX_POINTS = 200
# of the learning curve: pixels, and points of the power law, so few that its end has a circle
_INTERVAL_WIDTH = 4
_NUM_FITTED = 25


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
    """One series."""

    name: str
    marks: list[Mark]
    # 0 or 1: colour and dashes
    style: int


@dataclass(frozen=True)
class Chart:
    """Everything the template needs."""

    title: str
    x_label: str
    y_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]
    bars: Sequence[Mark] = ()
    # pixels: the whole chart, and the area between the axes
    width = 400
    height = 250
    left = 68
    right = 388
    top = 12
    bottom = 208


def build_history_chart(title: str, series: Mapping[str, Points], *, y_label: str) -> Chart:
    """A chart of one or more series of (epoch, value)."""
    epochs = [epoch for points in series.values() for epoch, _ in points]
    values = [value for points in series.values() for _, value in points]
    place_x, x_ticks = _fit_axis(epochs, Chart.left, Chart.right, is_count=True)
    place_y, y_ticks = _fit_axis(values, Chart.bottom, Chart.top)
    lines = []
    for style, (name, points) in enumerate(series.items()):
        marks = [
            Mark(place_x(epoch), place_y(value), f"{name}, epoch {epoch:g}: {value:.4g}")
            for epoch, value in points
        ]
        lines.append(Line(name, marks, style))
    return Chart(title, "epoch", y_label, x_ticks, y_ticks, lines)


def build_reliability_chart(bins: Sequence[Bin]) -> Chart:
    """Accuracy against confidence."""
    place_x, x_ticks = _fit_axis((0, 1), Chart.left, Chart.right)
    place_y, y_ticks = _fit_axis((0, 1), Chart.bottom, Chart.top)
    bars = []
    for bin in bins:
        if bin.count == 0:
            continue
        text = f"confidence {bin.lower:.2f} to {bin.upper:.2f}: "
        text += f"{bin.accuracy:.1%} of {bin.count} images correct"
        top = place_y(bin.accuracy)
        # a gap of two pixels between bars
        width = place_x(bin.upper) - place_x(bin.lower) - 2
        height = place_y(0) - top
        bars.append(Mark(place_x(bin.lower) + 1, top, text, width, height))
    diagonal = [Mark(place_x(value), place_y(value)) for value in (0, 1)]
    ideal = Line("perfectly calibrated", diagonal, style=1)
    return Chart("Reliability", "confidence", "accuracy", x_ticks, y_ticks, [ideal], bars)


def build_selective_chart(confidence: Floats, correct: NDArray[np.bool_]) -> Chart:
    """Accuracy of the most confident share of the images against that share (the risk-coverage
    curve of El-Yaniv & Wiener 2010, upside down)."""
    order = np.argsort(-confidence, kind="stable")
    counts = np.arange(1, len(order) + 1)
    accuracy = np.cumsum(correct[order]) / counts
    # equally confident images are answered together
    is_last = np.append(np.diff(confidence[order]) != 0, True)
    ends = np.flatnonzero(is_last)
    # the curve of a few images jumps
    ends = ends[counts[ends] >= min(_MIN_ANSWERED, len(order))]
    ends = ends[np.linspace(0, len(ends) - 1, min(len(ends), _MAX_POINTS)).astype(int)]
    place_x, x_ticks = _fit_axis((0, 1), Chart.left, Chart.right)
    place_y, y_ticks = _fit_axis([*accuracy[ends].tolist(), 1.0], Chart.bottom, Chart.top)
    marks = []
    for end in ends.tolist():
        share = counts[end] / len(order)
        least = confidence[order[end]]
        text = f"{share:.0%} answered, confidence {least:.3f} or more: {accuracy[end]:.1%} correct"
        marks.append(Mark(place_x(share), place_y(float(accuracy[end])), text))
    line = Line("the most confident images", marks, style=0)
    return Chart(
        "Accuracy of those answered", "share answered", "accuracy", x_ticks, y_ticks, [line]
    )


def build_learning_curve_chart(curve: LearningCurve) -> Chart:
    """Accuracy against the number of training images, with intervals, and the power law's forecast
    for twice as many."""
    measured = [(point.num_images, point.top1, point.interval) for point in curve.points]
    shown = [*measured]
    if forecast := curve.forecast:
        shown.append((forecast.num_images, forecast.top1, forecast.interval))
    place_x, x_ticks = _fit_axis([count for count, _, _ in shown], Chart.left, Chart.right)
    ends = [end for _, _, interval in shown for end in interval]
    place_y, y_ticks = _fit_axis(ends, Chart.bottom, Chart.top)

    intervals = []
    marks = []
    for place, (count, top1, (low, high)) in enumerate(shown):
        kind = "of the images left out are correct" if place < len(measured) else "expected"
        text = f"{count:,} images: {top1:.1%} {kind}, {low:.1%} to {high:.1%} with 95 % confidence"
        x = place_x(count)
        marks.append(Mark(x, place_y(top1), text))
        left = x - _INTERVAL_WIDTH / 2
        intervals.append(
            Mark(left, place_y(high), text, _INTERVAL_WIDTH, place_y(low) - place_y(high))
        )
    lines = [Line("measured, with 95 % interval", marks[: len(measured)], style=0)]
    if forecast:
        sizes = np.geomspace(measured[0][0], forecast.num_images, _NUM_FITTED).tolist()
        fitted = [Mark(place_x(size), place_y(forecast.compute_top1(size))) for size in sizes[:-1]]
        lines.append(Line("inverse power law, and its forecast", [*fitted, marks[-1]], style=1))
    return Chart(
        "Learning curve", "training images", "accuracy", x_ticks, y_ticks, lines, intervals
    )


def _fit_axis(
    values: Sequence[float], start: float, stop: float, *, is_count: bool = False
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """From values to pixels between `start` and `stop`, and the ticks; a count ends at its values
    and has whole ticks, others end at a tick."""
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
    # a tick at an end is not lost by rounding
    slack = (high - low) * 1e-9

    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (stop - start)

    shown = [tick for tick in ticks if low - slack <= tick <= high + slack]
    return place, [(place(tick), f"{tick:.6g}") for tick in shown]
