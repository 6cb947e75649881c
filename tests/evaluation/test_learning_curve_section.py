"""The section of a report that shows a learning curve."""

import json
from dataclasses import replace
from pathlib import Path

from tests.evaluation.test_report import NAMES, build, make_case
from vit.training.learning_curve import LearningCurve, Point

SENTENCE = "With twice as many photos (1,600) about 94 % (92–95 %) instead of 91 %"
POINTS = [Point(64, 0.71, (0.68, 0.74)), Point(640, 0.91, (0.89, 0.93))]
CURVE = LearningCurve(800, 5, POINTS, Point(1600, 0.94, (0.92, 0.95)), 0.914, SENTENCE)


def test_the_curve_of_the_models_run_has_a_chart_and_a_sentence(tmp_path: Path) -> None:
    case = make_case(300, NAMES)
    assert "More photos" not in build(case)

    def show(curve: LearningCurve) -> str:
        curve.save(tmp_path)
        evaluation = case.evaluation.model_copy(update={"model": str(file)})
        return build(replace(case, evaluation=evaluation))

    file = tmp_path / "model.safetensors"
    page = show(CURVE)
    assert "Learning curve: accuracy against training images" in page
    # among the plain sentences and beside the chart
    assert page.count(SENTENCE) == 2
    assert "forecast of an inverse power law" in page
    assert "inverse power law" not in show(replace(CURVE, forecast=None))
    without_points = show(replace(CURVE, forecast=None, points=[]))
    assert SENTENCE in without_points
    assert 'id="learning-curve"' not in without_points


def test_damaged_curves_and_those_of_earlier_versions_are_left_out(tmp_path: Path) -> None:
    case = make_case(30, NAMES)
    evaluation = case.evaluation.model_copy(update={"model": str(tmp_path / "model.safetensors")})
    for text in ("{", "[]", "{}", json.dumps({"schema_version": 2, "points": []})):
        (tmp_path / "learning_curve.json").write_text(text)
        assert "More photos" not in build(replace(case, evaluation=evaluation))
