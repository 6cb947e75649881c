"""Numbers to the coordinates of an SVG chart; `charts.html.jinja` draws them in the page's colours."""

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
    style: int  # 0…3: colour and dashes


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
    # pixels: the whole, and the area between the axes
    width, height, left, right, top, bottom = 400, 250, 68, 388, 12, 208


def build_line_chart(
    title: str, series: Mapping[str, Points], *, x_label: str, y_label: str, y_range: tuple[float, float] | None = None
) -> Chart:
    """A chart of one or more series of (x, y)."""
    everything = [point for points in series.values() for point in points]
    whole = all(float(x).is_integer() for x, _ in everything)
    place_x, x_ticks = _fit_axis([x for x, _ in everything], Chart.left, Chart.right, whole=whole)
    place_y, y_ticks = _fit_axis(y_range or [y for _, y in everything], Chart.bottom, Chart.top, tight=bool(y_range))
    lines: list[Line] = []
    for name, points in series.items():
        marks = [Mark(place_x(x), place_y(y), f"{name}, {x_label} {x:g}: {y:.4g}") for x, y in points]
        lines.append(Line(name, marks, style=len(lines) % 4))
    return Chart(title, x_label, y_label, x_ticks, y_ticks, lines=lines)


def build_reliability_chart(bins: Sequence[Bin]) -> Chart:
    """Accuracy against confidence."""
    place_x, x_ticks = _fit_axis((0, 1), Chart.left, Chart.right)
    place_y, y_ticks = _fit_axis((0, 1), Chart.bottom, Chart.top)
    bars = [
        Mark(
            place_x(each.lower) + 1,
            place_y(each.accuracy),
            f"confidence {each.lower:.2f} to {each.upper:.2f}: {each.accuracy:.1%} of {each.count} images correct",
            width=place_x(each.upper) - place_x(each.lower) - 2,
            height=place_y(0) - place_y(each.accuracy),
        )
        for each in bins
        if each.count
    ]
    ideal = Line("perfectly calibrated", [Mark(place_x(value), place_y(value)) for value in (0, 1)], style=1)
    return Chart("Reliability", "confidence", "accuracy", x_ticks, y_ticks, lines=[ideal], bars=bars)


def _fit_axis(
    values: Sequence[float], start: float, stop: float, *, tight: bool = True, whole: bool = False
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """From values to pixels between `start` and `stop`, and the ticks; `tight` ends at the values, `whole` counts."""
    low, high = min(values), max(values)
    if high == low:
        low, high = low - 0.5, high + 0.5
    numbers = [float(number) for number in MaxNLocator(nbins=5, integer=whole).tick_values(low, high)]
    if not tight:
        low, high = numbers[0], numbers[-1]
    slack = (high - low) * 1e-9

    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (stop - start)

    return place, [(place(each), f"{each:.6g}") for each in numbers if low - slack <= each <= high + slack]
