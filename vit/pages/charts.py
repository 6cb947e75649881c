"""Numbers to the coordinates of an SVG chart; `charts.html.jinja` draws them in the page's colours."""

from collections.abc import Mapping, Sequence
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

    @property
    def path(self) -> str:
        return " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in self.marks)


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
    width, height, left, right, top, bottom = 400, 250, 60, 388, 12, 208


def build_line_chart(
    title: str, series: Mapping[str, Points], *, x_label: str, y_label: str, y_range: tuple[float, float] | None = None
) -> Chart:
    """A chart of one or more series of (x, y)."""
    everything = [point for points in series.values() for point in points]
    whole = all(float(x).is_integer() for x, _ in everything)
    across = _Axis([x for x, _ in everything], Chart.left, Chart.right, tight=True, whole=whole)
    up = _Axis(y_range or [y for _, y in everything], Chart.bottom, Chart.top, tight=y_range is not None)
    lines: list[Line] = []
    for name, points in series.items():
        marks = [Mark(across.place(x), up.place(y), f"{name}, {x_label} {x:g}: {y:.4g}") for x, y in points]
        lines.append(Line(name, marks, style=len(lines) % 4))
    return Chart(title, x_label, y_label, across.ticks, up.ticks, lines=lines)


def build_reliability_chart(bins: Sequence[Bin]) -> Chart:
    """Accuracy against confidence."""
    across, up = (_Axis((0, 1), *ends, tight=True) for ends in ((Chart.left, Chart.right), (Chart.bottom, Chart.top)))
    bars = [
        Mark(
            across.place(each.lower) + 1,
            up.place(each.accuracy),
            f"confidence {each.lower:.2f} to {each.upper:.2f}: {each.accuracy:.1%} of {each.count} images correct",
            width=across.place(each.upper) - across.place(each.lower) - 2,
            height=up.place(0) - up.place(each.accuracy),
        )
        for each in bins
        if each.count
    ]
    ideal = Line("perfectly calibrated", [Mark(across.place(value), up.place(value)) for value in (0, 1)], style=1)
    return Chart("Reliability", "confidence", "accuracy", across.ticks, up.ticks, lines=[ideal], bars=bars)


class _Axis:
    """From values to pixels between `start` and `stop`; `tight` ends at the values, `whole` counts things."""

    def __init__(self, values: Sequence[float], start: float, stop: float, *, tight: bool, whole: bool = False) -> None:
        low, high = min(values), max(values)
        if high == low:
            low, high = low - 0.5, high + 0.5
        numbers = [float(number) for number in MaxNLocator(nbins=5, integer=whole).tick_values(low, high)]
        if not tight:
            low, high = numbers[0], numbers[-1]
        self._low, self._high, self._start, self._stop = low, high, start, stop
        slack = (high - low) * 1e-9
        inside = [number for number in numbers if low - slack <= number <= high + slack]
        self.ticks = [(self.place(number), f"{number:.6g}") for number in inside]

    def place(self, value: float) -> float:
        return self._start + (value - self._low) / (self._high - self._low) * (self._stop - self._start)
