"""The section of a report that shows the learning curve of the run that trained the model."""

import html
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from vit.evaluation.report.charts import draw_chart
from vit.runtime.documents import read_json

LEARNING_CURVE_FILE = "learning_curve.json"
# files of earlier runs are left out of reports
SCHEMA_VERSION = 3


class Section(NamedTuple):
    """A section of the report.

    Attributes:
        anchor: Its id in the page.
        title: Its name in the navigation.
        html: Its content, already escaped; empty: only the sentence is shown.
        sentence: One more sentence at the top of the report.
    """

    anchor: str
    title: str
    html: str
    sentence: str


def build_curve_section(run: Path | None) -> Section | None:
    """Show the curve in a run's directory; None if there is none or it is damaged."""
    if run is None:
        return None
    with suppress(OSError, ValueError, LookupError, TypeError):
        curve = read_json(run / LEARNING_CURVE_FILE)
        if curve["schema_version"] != SCHEMA_VERSION:
            return None
        sentence = str(curve["sentence"])
        text = _write(curve, sentence) if curve["points"] else ""
        return Section("learning-curve", "More photos", text, sentence)
    return None


def _write(curve: Mapping[str, Any], sentence: str) -> str:
    return f"""<h2>How many more photos would help</h2>
<div class="charts"><div>{_draw(curve)}</div><div>
<p>{html.escape(sentence)}</p>
<p class="muted">Linear probes were fitted on parts of the {int(curve["num_images"]):,} training
photos and measured on photos of the same set that they had not seen ({int(curve["num_folds"])} folds,
which no group is divided by). A forecast continues their errors as a + b·n<sup>−c</sup>. It holds for
more photos of the same kind and for the probe, not for a model that was fine-tuned after it.</p>
</div></div>"""


def _draw(curve: Mapping[str, Any]) -> str:
    """Draw accuracy against the number of training images, with intervals and the forecast."""
    series = [(curve["points"], "o-", "measured, with 95 % interval")]
    if curve["forecast"]:
        both = [curve["points"][-1], curve["forecast"]]
        series.append((both, "o--", "forecast of an inverse power law"))

    def draw(axes: Axes) -> None:
        for points, style, label in series:
            counts = [point["num_images"] for point in points]
            values = np.array([point["top1"] for point in points])
            low, high = np.array([point["interval"] for point in points]).T
            errors = np.maximum([values - low, high - values], 0)
            axes.errorbar(counts, values, errors, fmt=style, label=label)
        axes.set_ylim(0, 1.02)

    return draw_chart("Learning curve", "training images", "accuracy", draw, is_unit=False)
