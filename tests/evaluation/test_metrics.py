"""The metrics are scikit-learn's, to 1e-9."""

import numpy as np
import pytest
from scipy.special import softmax
from sklearn import metrics as sklearn_metrics

from tests.evaluation.conftest import MakePredictions
from vit.evaluation.metrics import compute_metrics, measure, score_logits


@pytest.mark.parametrize(("count", "classes"), [(37, 3), (5000, 10), (300, 200)])
def test_metrics_equal_scikit_learn(
    make_predictions: MakePredictions, count: int, classes: int
) -> None:
    logits, labels = make_predictions(
        count, classes
    )  # 300 of 200: many classes have no image at all
    metrics = compute_metrics(score_logits(logits, labels))
    probabilities = softmax(logits.astype(np.float64), axis=1)
    predicted = logits.argmax(axis=1)
    # of the classes that have images
    macro = {"average": "macro", "zero_division": 0, "labels": np.unique(labels)}
    every = list(range(classes))
    expected = {
        "top1": sklearn_metrics.accuracy_score(labels, predicted),
        "loss": sklearn_metrics.log_loss(labels, probabilities, labels=every),
        "macro_f1": sklearn_metrics.f1_score(labels, predicted, **macro),
        "macro_recall": sklearn_metrics.recall_score(labels, predicted, **macro),
        "brier": sklearn_metrics.brier_score_loss(
            labels, probabilities, labels=every, scale_by_half=False
        ),
    }
    if classes > 5:
        expected["top5"] = sklearn_metrics.top_k_accuracy_score(labels, logits, k=5, labels=every)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-9, rel=0), name


def test_per_class_metrics_are_those_of_scikit_learn(
    make_predictions: MakePredictions,
) -> None:
    logits, labels = make_predictions(400, 12)
    labels[labels == 7] = 3  # a class without images
    names = tuple(f"class {index}" for index in range(12))
    scores = score_logits(logits, labels)
    counts = sklearn_metrics.confusion_matrix(labels, logits.argmax(axis=1), labels=range(12))
    rows = measure(scores, None, names).per_class
    assert [row.name for row in rows] == list(names)
    assert [row.predicted for row in rows] == counts.sum(axis=0).tolist()
    found = np.array([(row.precision, row.recall, row.f1, row.support) for row in rows], float)
    expected = sklearn_metrics.precision_recall_fscore_support(
        labels, scores.predicted, labels=range(12), zero_division=0
    )
    known = np.arange(12) != 7
    assert found[known] == pytest.approx(np.stack(expected, axis=1)[known], abs=1e-12)
    assert rows[7].predicted > 0
    assert (rows[7].precision, rows[7].recall, rows[7].f1) == (None, None, None)
    assert rows[7].recall_interval == (0, 1)


def test_calibration_error_is_guos_equation_3(make_predictions: MakePredictions) -> None:
    logits, labels = make_predictions(3000, 10, sharpness=4)
    probabilities = softmax(logits.astype(np.float64), axis=1)
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    expected = 0.0
    for lower in np.arange(15) / 15:
        inside = (confidence > lower) & (confidence <= lower + 1 / 15)
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert compute_metrics(score_logits(logits, labels))["ece"] == pytest.approx(expected, abs=1e-9)


def test_of_equal_logits_the_first_class_is_ahead() -> None:
    scores = score_logits(np.zeros((3, 4), dtype=np.float32), np.array([0, 1, 3]))
    assert scores.predicted.tolist() == [0, 0, 0]
    assert scores.rank.tolist() == [0, 1, 3]
    assert scores.correct.tolist() == [True, False, False]


def test_logits_that_are_not_numbers_are_no_hits() -> None:
    logits = np.array(
        [[np.nan, np.nan, np.nan], [np.nan, 5.0, 0.0], [3.0, 1.0, 2.0]], dtype=np.float32
    )
    scores = score_logits(logits, np.array([0, 1, 0]))
    assert scores.correct.tolist() == [False, False, True]
    message = "2 of 3 images have NaN or infinity among their logits"
    with pytest.raises(ValueError, match=message):
        compute_metrics(scores)


@pytest.mark.parametrize("noise", [0.5, 2, 50])
def test_grades_have_the_quadratic_weighted_kappa(noise: float) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=200)
    predicted = (labels + noise * rng.normal(size=200)).round().clip(0, 4).astype(int)
    if noise == 50:
        predicted = 4 - labels
    scores = score_logits(np.eye(5, dtype=np.float32)[predicted], labels)
    expected = sklearn_metrics.cohen_kappa_score(labels, predicted, weights="quadratic")
    measured = measure(scores, is_ordered=True)
    assert measured.metrics["quadratic_kappa"] == pytest.approx(expected, abs=1e-9)
    low, high = measured.intervals["quadratic_kappa"]
    assert -1 <= low <= expected < high < 1
    # whole numbers are grades, names are not, and ten numbers are digits
    digits = score_logits(np.eye(10, dtype=np.float32)[predicted], labels)
    for each, names in ((scores, "01234"), (scores, "abcde"), (digits, "0123456789")):
        has_kappa = "quadratic_kappa" in measure(each, class_names=names).metrics
        assert has_kappa == (names == "01234")


def test_one_class_everywhere_has_no_kappa() -> None:
    scores = score_logits(np.eye(3, dtype=np.float32)[[1, 1]], np.array([1, 1]))
    assert np.isnan(measure(scores, is_ordered=True).metrics["quadratic_kappa"])
