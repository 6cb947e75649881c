"""Charts of the ROC and the precision-recall curve of one label, or one class against the rest."""

from vit.evaluation.curves import ThresholdRates, compute_curve
from vit.evaluation.report.charts import Chart, Line, Mark, Points, fit_axis
from vit.prediction.probabilities import Bools, Floats


def build_curve_charts(
    probabilities: Floats, is_positive: Bools, decided: ThresholdRates | None = None
) -> list[Chart]:
    """Draw both curves; nothing unless some images have the label and others don't.

    Args:
        probabilities: Probability of the label, [n].
        is_positive: Which images have it, [n].
        decided: Rates at the threshold that decides, which is marked.
    """
    curve = compute_curve(probabilities, is_positive)
    if curve is None:
        return []
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
        _draw(
            ("ROC curve", "false-positive rate", "sensitivity"),
            curve.roc,
            [(0.0, 0.0), (1.0, 1.0)],
            roc_point,
            text,
        ),
        _draw(
            ("Precision-recall curve", "recall", "precision"),
            curve.precision_recall,
            [(0.0, frequency), (1.0, frequency)],
            precision_point,
            text,
        ),
    ]


def _draw(
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
