"""The operating point in a model file decides what is predicted; without one nothing changes."""

from dataclasses import replace

import numpy as np
import pytest

from vit.bundle import Bundle
from vit.evaluation.metrics import score_logits
from vit.prediction.decision import (
    compute_probabilities,
    decide_classes,
    decide_labels,
    read_thresholds,
)
from vit.prediction.predictor import Predictor
from vit.prediction.records import Prediction

NAMES = ("cat", "dog", "fox")


def set_point(bundle: Bundle, **thresholds: float) -> Bundle:
    point = {"rule": "f1", "thresholds": thresholds, "num_images": 9}
    return replace(bundle, metadata={**bundle.metadata, "operating_point": point})


@pytest.fixture
def classes(bundle: Bundle) -> Bundle:
    return replace(bundle, class_names=NAMES)


@pytest.fixture
def labels(classes: Bundle) -> Bundle:
    return replace(classes, data={**classes.data, "task": "multilabel"})


def test_a_class_is_predicted_from_its_threshold_on(classes: Bundle) -> None:
    probabilities = np.array([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.2, 0.1, 0.7], [0.2, 0.5, 0.3]])
    assert decide_classes(read_thresholds(classes), probabilities).tolist() == [0, 0, 2, 1]
    low = set_point(classes, dog=0.25)
    assert decide_classes(read_thresholds(low), probabilities).tolist() == [1, 0, 2, 1]
    # the most probable class needn't be the predicted one
    high = set_point(classes, cat=0.65)
    assert decide_classes(read_thresholds(high), probabilities).tolist() == [1, 0, 2, 1]


def test_labels_without_a_threshold_need_a_half(labels: Bundle) -> None:
    probabilities = np.array([[0.3, 0.5, 0.9], [0.2, 0.49, 0.51]])
    assert decide_labels(labels, probabilities).tolist() == [
        [False, True, True],
        [False, False, True],
    ]
    point = set_point(labels, cat=0.3, fox=0.95)
    assert decide_labels(point, probabilities).tolist() == [[True, True, False], [False] * 3]


def test_scores_are_those_of_the_decision(classes: Bundle) -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((200, 3)).astype(np.float32)
    truth = rng.integers(0, 3, 200)
    point = set_point(classes, dog=0.2)
    point_of = {"temperature": point.temperature, "thresholds": read_thresholds(point)}
    scores = score_logits(logits, truth, **point_of)
    probabilities = compute_probabilities(point, logits)
    expected = decide_classes(read_thresholds(point), probabilities)
    np.testing.assert_array_equal(scores.predicted, expected)
    np.testing.assert_array_equal(scores.correct, expected == truth)
    # the rank counts the predicted class first, then the others by their probability
    for row in range(200):
        order = sorted(range(3), key=lambda c: (c != expected[row], -probabilities[row, c]))
        assert scores.rank[row] == order.index(truth[row])
    assert (score_logits(logits, truth).predicted != scores.predicted).sum() > 20


def test_predictions_are_what_the_operating_point_decides(bundle: Bundle) -> None:
    classes = replace(bundle, class_names=tuple(f"class {place}" for place in range(10)))
    labels = replace(classes, data={**classes.data, "task": "multilabel"})
    photo = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)

    def run(bundle: Bundle) -> Prediction:
        (prediction,) = Predictor(bundle, top_k=10, precision="float32").predict_items(
            [("photo", photo)]
        )
        return prediction

    plain = run(classes)
    last = plain.classes[-1]
    # every class reaches 0, so that the least probable one is predicted
    decided = run(set_point(classes, **{last[1]: 0.0}))
    assert decided.classes == [last, *plain.classes[:-1]]
    assert decided.predicted == last[1]
    assert replace(decided, classes=plain.classes) == replace(plain, prediction_set=None)
    assert (decided.prediction_set, replace(decided, p_value=0.5).note) == (None, "")

    rest = dict.fromkeys(classes.class_names, 1.0)
    found = run(set_point(labels, **rest | {"class 3": 0.0, "class 7": 0.0}))
    # the most probable first
    assert found.labels == [name for _, name, _ in found.classes if name in ("class 3", "class 7")]
    assert run(set_point(labels, **rest)).labels == []


def test_all_labels_are_named_however_many_classes_are_listed(bundle: Bundle) -> None:
    names = tuple(f"class {place}" for place in range(10))
    labels = replace(bundle, class_names=names, data={**bundle.data, "task": "multilabel"})
    photo = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    predictor = Predictor(set_point(labels, **dict.fromkeys(names, 0.0)), top_k=1)
    (prediction,) = predictor.predict_items([("photo", photo)])
    assert len(prediction.classes) == 1
    assert sorted(prediction.labels or []) == sorted(names)
