"""The section of a report that shows a learning curve."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluation.test_report import NAMES, build, make_case
from vit.analysis.learning_curve.curve import CurvePoint, Forecast, LearningCurve
from vit.analysis.learning_curve.section import build_section
from vit.evaluation.report.report import Section
from vit.evaluation.result import EvaluationResult

CURVE = LearningCurve(
    num_images=800,
    num_folds=5,
    points=[
        CurvePoint(64, 0.71, (0.68, 0.74)),
        CurvePoint(320, 0.88, (0.86, 0.90)),
        CurvePoint(640, 0.91, (0.89, 0.93)),
    ],
    forecast=Forecast(1600, 0.94, (0.92, 0.95), top1_now=0.914),
)


@pytest.fixture(scope="module")
def case() -> EvaluationResult:
    return make_case(300, NAMES)


def show(case: EvaluationResult, run: Path, curve: LearningCurve) -> str:
    """The report of a model in a run's directory that holds this curve."""
    curve.save(run)
    evaluation = case.evaluation.model_copy(update={"model": str(run / "model.safetensors")})
    return build(replace(case, evaluation=evaluation))


def test_the_learning_curve_has_a_chart_and_a_sentence(
    case: EvaluationResult, tmp_path: Path
) -> None:
    page = show(case, tmp_path, CURVE)
    assert "Learning curve: accuracy against training images" in page
    sentence = "With twice as many photos (1,600) about 94 % (92–95 %) instead of 91 %"
    # among the plain sentences and beside the chart
    assert page.count(sentence) == 2
    assert "forecast of an inverse power law" in page

    unknown = CURVE.model_copy(update={"forecast": None, "reason": "too few photos"})
    page = show(case, tmp_path, unknown)
    assert "It is not known whether more photos would help: too few photos." in page
    assert "inverse power law" not in page
    without_points = unknown.model_copy(update={"points": []})
    assert 'id="learning-curve"' not in show(case, tmp_path, without_points)
    assert "More photos" not in build(case)


def test_a_model_without_a_curve_or_with_a_damaged_one_has_no_section(
    case: EvaluationResult, tmp_path: Path
) -> None:
    def find_section(model: str) -> Section | None:
        evaluation = case.evaluation.model_copy(update={"model": model})
        return build_section(replace(case, evaluation=evaluation))

    assert find_section(str(tmp_path)) is None
    assert find_section("timm:vit_tiny_patch16_224") is None
    CURVE.save(tmp_path)
    assert find_section(str(tmp_path / "model.safetensors")) is not None
    (tmp_path / "learning_curve.json").write_text("{")
    assert find_section(str(tmp_path)) is None
