"""The errors shown are the ones they are said to be."""

import numpy as np

from tests.evaluation.conftest import MakePredictions
from vit.evaluation.examples import choose_examples, find_label_errors
from vit.evaluation.metrics import score_logits


def test_errors_fall_and_correct_predictions_rise_in_confidence(
    make_predictions: MakePredictions,
) -> None:
    logits, labels = make_predictions()
    scores = score_logits(logits, labels)
    examples = choose_examples(
        logits, scores, ids=[""] * len(labels), class_names=tuple("abcdefghij"), count=len(labels)
    )
    errors = examples.most_confident_errors
    assert all(example.label != example.predicted for example in errors)
    confidence = [example.probability for example in errors]
    assert confidence == sorted(scores.confidence[~scores.correct], reverse=True)
    correct = examples.least_confident_correct
    assert all(example.label == example.predicted for example in correct)
    confidence = [example.probability for example in correct]
    assert confidence == sorted(scores.confidence[scores.correct])


def test_planted_label_errors_come_first(make_predictions: MakePredictions) -> None:
    logits, labels = make_predictions(3000, 10, sharpness=8)
    sure = np.flatnonzero(np.exp(-score_logits(logits, labels).loss) > 0.99)
    planted = np.random.default_rng(0).choice(sure, 30, replace=False)
    wrong = labels.copy()
    wrong[planted] = (wrong[planted] + 3) % 10
    flagged = find_label_errors(logits, score_logits(logits, wrong))
    assert len(set(flagged[:30]) & set(planted)) >= 25
    flagged_clean = find_label_errors(logits, score_logits(logits, labels))
    assert len(flagged_clean) <= len(flagged) - 28


def test_few_errors_are_no_trouble() -> None:
    logits = np.eye(3, dtype=np.float32) * 20
    scores = score_logits(logits, np.arange(3))
    examples = choose_examples(
        logits, scores, ids=("0", "1", "2"), class_names=("ant", "bee", "cow"), count=16
    )
    assert len(examples.most_confident_errors) == 0
    assert [example.label for example in examples.least_confident_correct] == ["ant", "bee", "cow"]
    assert (examples.label_errors, examples.num_label_errors) == ([], 0)


def test_as_many_examples_as_asked_for(make_predictions: MakePredictions) -> None:
    logits, labels = make_predictions()
    ids = [str(index) for index in range(len(labels))]
    names = tuple("abcdefghij")
    scores = score_logits(logits, labels)
    examples = choose_examples(logits, scores, ids=ids, class_names=names, count=7)
    wrong = np.flatnonzero(~scores.correct)
    worst = wrong[np.argsort(-scores.confidence[wrong], kind="stable")][:7]
    assert [example.path for example in examples.most_confident_errors] == [ids[i] for i in worst]
    assert [example.label for example in examples.most_confident_errors] == [
        names[labels[i]] for i in worst
    ]
    assert len(examples.least_confident_correct) == len(examples.label_errors) == 7
    assert examples.num_label_errors == len(find_label_errors(logits, scores)) > 7
