"""The section of a report that shows the learning curve of the run that trained the model."""

from contextlib import suppress
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from vit.analysis.learning_curve.curve import LearningCurve, load_learning_curve
from vit.evaluation.report.charts import draw_chart
from vit.evaluation.report.report import Section, find_run
from vit.evaluation.result import EvaluationResult
from vit.explanation.render.page import render_page

_TEMPLATE = Path(__file__).with_name("learning_curve.html.jinja")
# measure → the name of its axis
_AXES = {"top1": "accuracy", "map": "mean average precision"}
# points of the fitted curve
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


def build_chart(curve: LearningCurve) -> Markup:
    """Draw accuracy against the number of training images, with intervals and the forecast."""
    shown = [(point.num_images, point.top1, point.interval) for point in curve.points]
    forecast = curve.forecast

    def draw(axes: Axes) -> None:
        counts, values, intervals = zip(*shown, strict=True)
        low, high = np.array(intervals).T
        errors = np.maximum([np.array(values) - low, high - np.array(values)], 0)
        axes.errorbar(counts, values, errors, fmt="o-", label="measured, with 95 % interval")
        if forecast:
            sizes = np.geomspace(counts[0], forecast.num_images, _NUM_FITTED)
            # errors of more than 100 % are outside of the chart
            fitted = [max(forecast.compute_top1(size), 0) for size in sizes.tolist()]
            axes.plot(sizes, fitted, "--", label="inverse power law, and its forecast")
            end, (low_end, high_end) = forecast.top1, forecast.interval
            bars = [[max(end - low_end, 0)], [max(high_end - end, 0)]]
            axes.errorbar([forecast.num_images], [end], bars, fmt="o")
        axes.set_ylim(0, 1.02)

    label = _AXES[curve.measure]
    return draw_chart("Learning curve", "training images", label, draw, is_unit=False)
