"""The section of a report that shows the learning curve of the run that trained the model."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from vit.analysis.learning_curve.curve import (
    LearningCurve,
    load_learning_curve,
)
from vit.evaluation.report.charts import draw_chart
from vit.evaluation.report.report import Section, find_run
from vit.evaluation.result import EvaluationResult
from vit.explanation.render.page import render_page

_TEMPLATE = Path(__file__).with_name("learning_curve.html.jinja")
# measure → the name of its axis
_AXES = {"top1": "accuracy", "map": "mean average precision"}


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


def build_chart(curve: LearningCurve) -> str:
    """Draw accuracy against the number of training images, with intervals and the forecast."""
    series: list[tuple[Sequence[Any], str, str]] = [
        (curve.points, "o-", "measured, with 95 % interval")
    ]
    if curve.forecast:
        series.append(
            ([curve.points[-1], curve.forecast], "o--", "forecast of an inverse power law")
        )

    def draw(axes: Axes) -> None:
        for points, style, label in series:
            values = np.array([point.top1 for point in points])
            low, high = np.array([point.interval for point in points]).T
            errors = np.maximum([values - low, high - values], 0)
            axes.errorbar(
                [point.num_images for point in points], values, errors, fmt=style, label=label
            )
        axes.set_ylim(0, 1.02)

    label = _AXES[curve.measure]
    return draw_chart("Learning curve", "training images", label, draw, is_unit=False)
