"""The errors shown are the ones they are said to be."""

import numpy as np

from tests.evaluation.conftest import MakePredictions
from vit.evaluation.errors import find_confident_mistakes, find_label_errors, find_uncertain_hits
from vit.evaluation.metrics import score_logits


def test_mistakes_fall_and_hits_rise_in_confidence(make_predictions: MakePredictions) -> None:
    scores = score_logits(*make_predictions())
    mistakes = find_confident_mistakes(scores, count=20)
    assert not scores.correct[mistakes].any()
    assert (np.diff(scores.confidence[mistakes]) <= 0).all()
    assert scores.confidence[mistakes[0]] == scores.confidence[~scores.correct].max()
    hits = find_uncertain_hits(scores, count=20)
    assert scores.correct[hits].all()
    assert scores.confidence[hits[0]] == scores.confidence[scores.correct].min()


def test_planted_label_errors_come_first(make_predictions: MakePredictions) -> None:
    logits, labels = make_predictions(3000, 10, sharpness=8)
    sure = np.flatnonzero(np.exp(-score_logits(logits, labels).loss) > 0.99)
    planted = np.random.default_rng(0).choice(sure, 30, replace=False)
    wrong = labels.copy()
    wrong[planted] = (wrong[planted] + 3) % 10
    found, total = find_label_errors(logits, score_logits(logits, wrong), count=30)
    assert len(set(found) & set(planted)) >= 25
    assert total >= 30
    clean, clean_total = find_label_errors(logits, score_logits(logits, labels), count=3000)
    assert clean_total <= total - 28
    assert len(clean) == clean_total


def test_few_errors_are_no_trouble() -> None:
    logits = np.eye(3, dtype=np.float32) * 20
    scores = score_logits(logits, np.arange(3))
    assert len(find_confident_mistakes(scores, count=16)) == 0
    assert len(find_uncertain_hits(scores, count=16)) == 3
    assert find_label_errors(logits, score_logits(logits, np.arange(3)), count=16)[1] == 0
