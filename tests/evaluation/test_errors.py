"""The errors shown are the ones they are said to be."""

import numpy as np

from tests.evaluation.conftest import MakePredictions
from vit.evaluation.examples import choose_examples, find_known, find_label_errors
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


def test_labels_are_not_judged_by_a_model_that_does_not_know_them() -> None:
    """Two classes, 60 and 40 images, in groups of ten."""
    labels = np.repeat([0, 1], [60, 40])
    groups = [f"site{number // 10}" for number in range(100)]
    correct = np.ones(100, dtype=bool)
    assert find_known(correct, labels, groups).all()
    # the third site is unknown; a planted error elsewhere is still found
    correct[20:25] = False
    correct[71] = False
    is_known = find_known(correct, labels, groups)
    assert np.flatnonzero(~is_known).tolist() == list(range(20, 30))
    # two errors are no unknown site, however few its images are
    assert find_known(correct, labels, [*groups[:71], "a", "a", *groups[73:]])[71:73].all()
    assert find_known(correct, labels, None).all()
    # always the first class: right on 60 of 100
    assert not find_known(labels == 0, labels, groups).any()
    logits = np.tile(np.array([1.0, 0.9], np.float32), (100, 1))
    logits[:, 1] += np.where(np.arange(100) % 7 == 0, 0.05, 0).astype(np.float32)
    examples = choose_examples(
        logits, score_logits(logits, labels), ids=groups, class_names=("a", "b"), count=9
    )
    assert (examples.label_errors, examples.num_label_errors) == ([], 0)
