"""The section of a report that shows the learning curve of the run that trained the model."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from vit.analysis.learning_curve.curve import LearningCurve, load_learning_curve
from vit.evaluation.report.charts import Chart, Line, Mark, fit_axis
from vit.evaluation.report.report import Section, find_run
from vit.evaluation.result import EvaluationResult
from vit.explanation.render.page import render_page

_TEMPLATE = Path(__file__).with_name("learning_curve.html.jinja")
# pixels
_INTERVAL_WIDTH = 4
# measure → the name of its axis
_AXES = {"top1": "accuracy", "map": "mean average precision"}
# points of the fitted curve; a line of more than 30 has no circles, and its end should have one
_NUM_FITTED = 25


def build_section(result: EvaluationResult) -> Section | None:
    """Show the curve that lies with the evaluated model; None if there is none or it is damaged."""
    curve = None
    run = find_run(result.evaluation.model)
    with suppress(OSError, ValueError):
        curve = load_learning_curve(run) if run else None
    if curve is None:
        return None
    html = ""
    if curve.points:
        html = render_page(_TEMPLATE, {"curve": curve, "chart": build_chart(curve)})
    return Section("learning-curve", "More photos", html, curve.describe())


def build_chart(curve: LearningCurve) -> Chart:
    """Draw accuracy against the number of training images, with intervals and the forecast."""
    shown = [(point.num_images, point.top1, point.interval) for point in curve.points]
    num_measured = len(shown)
    if forecast := curve.forecast:
        shown.append((forecast.num_images, forecast.top1, forecast.interval))
    place_x, x_ticks = fit_axis([count for count, _, _ in shown], Chart.left, Chart.right)
    place_y, y_ticks = fit_axis((0, 1), Chart.bottom, Chart.top)

    intervals = []
    marks = []
    for place, (count, top1, (low, high)) in enumerate(shown):
        kind = "of the images left out are correct" if place < num_measured else "expected"
        if curve.measure == "map":
            kind = "mean average precision" + ", expected" * (place >= num_measured)
        interval = f"{100 * low:.1f}–{100 * high:.1f} % with 95 % confidence"
        text = f"{count:,} images: {100 * top1:.1f} % {kind}, {interval}"
        x = place_x(count)
        marks.append(Mark(x, place_y(top1), text))
        left = x - _INTERVAL_WIDTH / 2
        height = place_y(low) - place_y(high)
        intervals.append(Mark(left, place_y(high), text, _INTERVAL_WIDTH, height))
    lines = [Line("measured, with 95 % interval", marks[:num_measured], style=0)]
    if forecast:
        sizes = np.geomspace(shown[0][0], forecast.num_images, _NUM_FITTED).tolist()
        # errors of more than 100 % are outside of the chart
        fitted = [
            Mark(place_x(size), place_y(max(forecast.compute_top1(size), 0))) for size in sizes[:-1]
        ]
        lines.append(Line("inverse power law, and its forecast", [*fitted, marks[-1]], style=1))
    return Chart(
        "Learning curve",
        "training images",
        _AXES[curve.measure],
        x_ticks,
        y_ticks,
        lines,
        intervals,
    )
