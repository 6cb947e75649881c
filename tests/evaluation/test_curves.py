"""Curves are scikit-learn's; rates at a threshold have intervals that cover."""

import numpy as np
import pytest
from sklearn.metrics import (
    average_precision_score,
    confusion_matrix,
    precision_recall_curve,
    roc_auc_score,
    roc_curve,
)

import vit
from vit.evaluation.curves import compute_curve, count_errors, measure_thresholds
from vit.evaluation.report.charts import Chart, build_curve_charts
from vit.evaluation.result import EvaluationResult
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.labels import compute_probabilities
from vit.prediction.probabilities import Bools, Floats, Ints


def draw(rng: np.random.Generator, count: int, *, digits: int = 16) -> tuple[Floats, Bools]:
    labels = rng.random(count) < 0.3
    scores = rng.normal(1.5 * labels, 1.0)
    return np.round(1 / (1 + np.exp(1 - scores)), digits), labels


@pytest.mark.parametrize("digits", [1, 16])
def test_curves_are_those_of_scikit_learn(digits: int) -> None:
    probabilities, labels = draw(np.random.default_rng(0), 150, digits=digits)
    curve = compute_curve(probabilities, labels)
    assert curve is not None
    rates, sensitivity, _ = roc_curve(labels, probabilities, drop_intermediate=False)
    np.testing.assert_allclose(curve.roc, np.stack([rates, sensitivity], axis=1), atol=1e-12)
    precision, recall, _ = precision_recall_curve(labels, probabilities)
    # scikit-learn adds a point without predictions
    expected = np.stack([recall, precision], axis=1)[::-1][1:]
    np.testing.assert_allclose(curve.precision_recall, expected, atol=1e-12)


def test_thinned_curves_stay_close() -> None:
    probabilities, labels = draw(np.random.default_rng(1), 20_000)
    curve = compute_curve(probabilities, labels)
    assert curve is not None
    rates, sensitivity, _ = roc_curve(labels, probabilities)
    x, y = np.array(curve.roc).T
    assert 150 <= len(x) <= 200
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert np.abs(np.interp(rates, x, y) - sensitivity).max() < 0.012
    assert len(curve.precision_recall) <= 200
    np.testing.assert_allclose(curve.precision_recall[-1], (1.0, labels.mean()))
    assert compute_curve(probabilities, np.zeros(20_000, dtype=bool)) is None


def test_rates_worked_by_hand() -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    labels = np.array([0, 0, 0, 0, 1, 0, 1, 1, 1, 1], dtype=bool)
    first, *others = measure_thresholds(probabilities, labels, np.arange(10), threshold=0.65)
    assert (first.sensitivity, first.specificity) == (0.8, 1.0)
    assert first.sensitivity_interval == pytest.approx((0.2836, 0.9949), abs=1e-4)
    rows = {row.rule: row for row in others}
    # of five, none may be on the wrong side of 90 %
    assert rows["specificity=0.9"].threshold == pytest.approx(0.65)
    assert rows["specificity=0.9"].sensitivity == 0.8
    assert rows["specificity=0.9"].specificity_interval is None
    assert rows["sensitivity=0.95"].threshold == pytest.approx(0.45)
    assert rows["sensitivity=0.95"].specificity == 0.8
    # five images can't tell where 95 % of their kind lie
    interval = rows["sensitivity=0.95"].specificity_interval
    assert interval is not None
    assert interval[0] == 0 < interval[1]
    # the threshold of an image of 100 % doesn't exist
    errors = count_errors(np.array([0.5, 1.0]), np.array([True, False]))
    assert errors.alarms.tolist() == [1, 1]
    rules = [
        row.rule for row in measure_thresholds(np.ones(4), labels[3:7], np.arange(4), threshold=1)
    ]
    assert rules == ["", "sensitivity=0.9", "sensitivity=0.95"]
    assert measure_thresholds(probabilities, labels | True, np.arange(10), threshold=0.5) == []


def draw_patients(rng: np.random.Generator, count: int) -> tuple[Floats, Bools, Ints]:
    """One in ten patients has the label, in all of up to five images, which are alike."""
    clusters = np.repeat(np.arange(count), rng.integers(1, 6, count))
    labels = (rng.random(count) < 0.1)[clusters]
    effects = rng.normal(0, 0.7, count)[clusters]
    scores = 2.5 * labels + effects + rng.normal(0, 1, len(labels))
    return 1 / (1 + np.exp(2 - scores)), labels, clusters


def test_intervals_of_images_in_groups_cover() -> None:
    rng = np.random.default_rng(2)
    probabilities, labels, _ = draw_patients(rng, 100_000)
    positives, negatives = probabilities[labels], probabilities[~labels]
    truth = {
        "specificity=0.95": (positives > np.quantile(negatives, 0.95)).mean(),
        "sensitivity=0.9": (negatives < np.quantile(positives, 0.1)).mean(),
    }
    covered = dict.fromkeys(truth, 0)
    for _ in range(200):
        draws = draw_patients(rng, 300)
        for row in measure_thresholds(*draws, threshold=0.5):
            if row.rule in truth:
                interval = row.sensitivity_interval or row.specificity_interval
                assert interval is not None
                covered[row.rule] += interval[0] <= truth[row.rule] <= interval[1]
    # 95 % of 200 is 190; 183 and fewer have a probability of 1 in 20
    assert all(count >= 184 for count in covered.values()), covered


def test_charts_mark_the_threshold_that_decides() -> None:
    probabilities, labels = draw(np.random.default_rng(3), 100)
    decided, *_ = measure_thresholds(probabilities, labels, np.arange(100), threshold=0.4)
    is_found = probabilities >= 0.4
    expected = [
        (is_found[~labels].mean(), is_found[labels].mean()),
        (is_found[labels].mean(), labels[is_found].mean()),
    ]
    charts = build_curve_charts(probabilities, labels, decided)
    for chart, (x, y) in zip(charts, expected, strict=True):
        (mark,) = chart.lines[-1].marks
        assert mark.x == pytest.approx(Chart.left + x * (Chart.right - Chart.left))
        assert mark.y == pytest.approx(Chart.bottom + y * (Chart.top - Chart.bottom))
        assert "from a probability of 0.4" in mark.text
    assert build_curve_charts(probabilities, labels & False) == []


def test_two_classes_are_measured_as_one_against_the_rest() -> None:
    rng = np.random.default_rng(4)
    pixels = rng.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(60) % 4 // 3
    model = VisionTransformer(
        img_size=8, patch_size=4, num_classes=2, embed_dim=16, depth=1, num_heads=2
    )
    bundle = vit.Bundle.from_model(
        model, class_names=("a", "<b>|"), preprocess=vit.Preprocess((8, 8))
    )
    result = vit.evaluate(bundle, dataset=(pixels, labels), device="cpu", precision="float32")
    assert isinstance(result, EvaluationResult)
    rest = result.evaluation.against_rest
    assert rest is not None
    assert rest.name == "<b>|"
    probabilities = compute_probabilities(bundle, result.logits)[:, 1]
    assert rest.roc_auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)
    assert rest.average_precision == pytest.approx(
        average_precision_score(labels, probabilities), abs=1e-12
    )
    matrix = confusion_matrix(labels, result.scores.predicted)
    decided = rest.thresholds[0]
    assert decided.threshold == 0.5
    assert decided.sensitivity == matrix[1, 1] / matrix[1].sum()
    assert decided.specificity == matrix[0, 0] / matrix[0].sum()
    files = result.build_files()
    page, table = files["report.html"], files["evaluation.md"]
    assert isinstance(page, str)
    assert isinstance(table, str)
    assert "| &lt;b&gt;\\| | the prediction | 0.5 |" in table
    assert "&lt;b&gt;| against the rest: curves and thresholds" in page
    assert "<b>|" not in page
