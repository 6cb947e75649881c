"""Numbers to the coordinates of an SVG chart; `charts.html.jinja` draws them in the page's
colours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.ticker import MaxNLocator

from vit.evaluation.metrics import Bin

Points = Sequence[tuple[float, float]]


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
    # 0…3: colour and dashes
    style: int


@dataclass(frozen=True)
class Chart:
    """Everything the template needs."""

    title: str
    x_label: str
    y_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line] = field(default_factory=list)
    bars: list[Mark] = field(default_factory=list)
    # pixels: the whole chart, and the area between the axes
    width = 400
    height = 250
    left = 68
    right = 388
    top = 12
    bottom = 208


def build_line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
) -> Chart:
    """A chart of one or more series of (x, y), where x counts something, such as epochs."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    place_x, x_ticks = _fit_axis(xs, Chart.left, Chart.right, is_count=True)
    place_y, y_ticks = _fit_axis(ys, Chart.bottom, Chart.top)
    lines: list[Line] = []
    for name, points in series.items():
        marks = [
            Mark(place_x(x), place_y(y), f"{name}, {x_label} {x:g}: {y:.4g}") for x, y in points
        ]
        lines.append(Line(name, marks, style=len(lines) % 4))
    return Chart(title, x_label, y_label, x_ticks, y_ticks, lines=lines)


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
        bars.append(Mark(place_x(bin.lower) + 1, top, text, width=width, height=height))
    ideal = Line(
        "perfectly calibrated", [Mark(place_x(value), place_y(value)) for value in (0, 1)], style=1
    )
    return Chart(
        "Reliability", "confidence", "accuracy", x_ticks, y_ticks, lines=[ideal], bars=bars
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
