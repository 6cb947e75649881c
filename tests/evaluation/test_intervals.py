"""Bootstrap intervals have the width that theory gives them, and the same draw every time."""

import time

import numpy as np
import pytest

from tests.evaluation.conftest import MakePredictions
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.metrics import compute_metrics, score_logits


def test_interval_of_accuracy_has_the_binomial_width(make_predictions: MakePredictions) -> None:
    scores = score_logits(*make_predictions(4000))
    low, high = compute_intervals(scores)["top1"]
    share = compute_metrics(scores)["top1"]
    width = 2 * 1.96 * np.sqrt(share * (1 - share) / len(scores))
    assert high - low == pytest.approx(width, rel=0.1)
    assert low < share < high


def test_interval_of_the_loss_has_the_width_of_the_central_limit(
    make_predictions: MakePredictions,
) -> None:
    scores = score_logits(*make_predictions(4000))
    low, high = compute_intervals(scores)["loss"]
    assert high - low == pytest.approx(2 * 1.96 * scores.loss.std() / np.sqrt(len(scores)), rel=0.1)


def test_every_figure_has_an_interval_that_repeats(make_predictions: MakePredictions) -> None:
    scores = score_logits(*make_predictions(300))
    intervals = compute_intervals(scores, resamples=200)
    assert intervals.keys() == compute_metrics(scores).keys()
    assert intervals == compute_intervals(scores, resamples=200)
    assert intervals != compute_intervals(scores, resamples=200, seed=1)


def test_intervals_hold_what_they_promise(make_predictions: MakePredictions) -> None:
    """Of 100 draws of test images, about 95 intervals hold the accuracy on very many."""
    truth = compute_metrics(score_logits(*make_predictions(200_000)))["top1"]
    held = 0
    for seed in range(100):
        scores = score_logits(*make_predictions(300, seed=seed + 1))
        low, high = compute_intervals(scores, resamples=200, seed=seed)["top1"]
        held += low <= truth <= high
    assert 88 <= held <= 100


@pytest.mark.parametrize(("count", "classes"), [(12, 5), (200, 10), (1000, 10), (1000, 200)])
def test_every_metric_lies_in_its_interval(
    make_predictions: MakePredictions, count: int, classes: int
) -> None:
    """Resampling raises the calibration error of a calibrated model until every replicate lies
    above it."""
    for seed in range(5):
        scores = score_logits(*make_predictions(count, classes, seed=seed))
        metrics, intervals = compute_metrics(scores), compute_intervals(scores, resamples=200)
        assert {
            name for name, (low, high) in intervals.items() if not 0 <= low <= metrics[name] <= high
        } == set()


def test_the_interval_of_a_biased_metric_is_as_wide_as_it_varies(
    make_predictions: MakePredictions,
) -> None:
    draws = [score_logits(*make_predictions(1000, seed=seed + 1)) for seed in range(100)]
    values = [compute_metrics(scores) for scores in draws]
    intervals = [compute_intervals(scores, resamples=200) for scores in draws[:50]]
    for name in ("ece", "macro_f1"):
        mean = np.mean([each[name] for each in values])
        held = sum(low <= mean <= high for low, high in (each[name] for each in intervals))
        assert held >= 44, (name, held)


@pytest.mark.extended
def test_fifty_thousand_predictions_take_seconds(make_predictions: MakePredictions) -> None:
    scores = score_logits(*make_predictions(50_000, 100))
    start = time.perf_counter()
    compute_intervals(scores)
    assert time.perf_counter() - start < 20  # 1 s on a free core
