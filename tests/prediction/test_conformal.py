"""Prediction sets hold the right class as often as promised, and p-values are uniform; by hand,
beside MAPIE, and on the digits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import betabinom, kstest

from tests.evaluation.conftest import MakePredictions
from vit.bundle import Bundle
from vit.data.open import open_dataset
from vit.evaluation.images import load_images
from vit.model.model_file import Likeness
from vit.prediction.conformal import (
    build_sets,
    compute_p_values,
    count_needed,
    explain_missing,
    find_label_threshold,
    find_threshold,
    predict_p_values,
    predict_sets,
)
from vit.prediction.neighbours import compute_distances
from vit.prediction.predictor import BatchPredictor
from vit.prediction.probabilities import compute_log_probabilities


def test_a_threshold_by_hand() -> None:
    """Of nine images, 90 % of ten ranks are nine: the least of the probabilities. Of 19, 90 % of 20
    are 18: all but the least."""
    nine = np.array([0.9, 0.2, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.95])
    assert find_threshold(nine, coverage=0.9) == 0.2
    assert find_threshold(nine[:8], coverage=0.9) is None
    assert find_threshold(np.arange(1, 20) / 20, coverage=0.9) == 0.1
    assert find_threshold(np.arange(1, 20) / 20, coverage=0.95) == 0.05
    assert find_threshold(np.zeros(0), coverage=0.9) is None
    assert (count_needed(0.9), count_needed(0.95)) == (9, 19)


def test_sets_by_hand() -> None:
    probabilities = np.array([[0.1, 0.6, 0.3], [0.34, 0.33, 0.33], [0.2, 0.4, 0.4]])
    assert build_sets(probabilities, 0.3) == [[1, 2], [0, 1, 2], [1, 2]]
    assert build_sets(probabilities, 0.5) == [[1], [], []]


def test_p_values_by_hand() -> None:
    """One more than the number of images as far away, of one more than all."""
    calibration = np.array([0.1, 0.4, 0.2, 0.3])
    distances = np.array([0.05, 0.2, 0.25, 0.9])
    assert compute_p_values(distances, calibration).tolist() == [1.0, 0.8, 0.6, 0.2]


def test_distances_by_hand() -> None:
    """To the fifth nearest of unit vectors, whatever the lengths: at a right angle √2."""
    training = np.array([[1, 0]] * 4 + [[0, 3]] + [[-1, 0]] * 2)
    assert compute_distances(np.array([[5.0, 0.0]]), training) == pytest.approx([math.sqrt(2)])
    assert compute_distances(np.array([[0.0, 2.0]]), training[:3]) == pytest.approx([math.sqrt(2)])


@pytest.mark.parametrize("coverage", [0.9, 0.95])
def test_sets_are_those_of_mapie(make_predictions: MakePredictions, coverage: float) -> None:
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Fitted(ClassifierMixin, BaseEstimator):
        def __init__(self, num_classes: int = 0) -> None:
            self.classes_ = np.arange(num_classes)

        def fit(self, x: np.ndarray, y: np.ndarray) -> "Fitted":
            return self

        def __sklearn_is_fitted__(self) -> bool:
            return True

        def predict_proba(self, x: np.ndarray) -> np.ndarray:
            return x

        def predict(self, x: np.ndarray) -> np.ndarray:
            return x.argmax(axis=1)

    logits, labels = make_predictions(400)
    probabilities = np.exp(compute_log_probabilities(logits, 1.0))
    half = 173
    peer = SplitConformalClassifier(
        Fitted(logits.shape[1]), confidence_level=coverage, conformity_score="lac", prefit=True
    )
    peer.conformalize(probabilities[:half], labels[:half])
    _, peer_sets = peer.predict_set(probabilities[half:])

    right = probabilities[np.arange(half), labels[:half]]
    threshold = find_threshold(right, coverage=coverage)
    assert threshold is not None
    sets = build_sets(probabilities[half:], threshold)
    assert [sorted(chosen) for chosen in sets] == [
        np.flatnonzero(row).tolist() for row in peer_sets[:, :, 0]
    ]


def is_within_interval(num_covered: int, num_tested: int, num_images: int, level: float) -> bool:
    """Whether this many of the tested sets are covered in 99.9 % of all splits: the coverage of n
    images' threshold is Beta(rank, n + 1 - rank) (Vovk 2012)."""
    rank = math.ceil(round((num_images + 1) * level, 9))
    low, high = betabinom(num_tested, rank, num_images + 1 - rank).interval(0.999)
    return bool(low <= num_covered <= high)


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_coverage_on_planted_probabilities(make_predictions: MakePredictions, level: float) -> None:
    shares = []
    for seed in range(40):
        logits, labels = make_predictions(600, seed=seed)
        # of an overconfident model: nothing is presumed of the probabilities
        probabilities = np.exp(compute_log_probabilities(3 * logits, 1.0))
        right = probabilities[np.arange(600), labels]
        threshold = find_threshold(right[:100], coverage=level)
        num_covered = int((right[100:] >= threshold).sum())
        assert is_within_interval(num_covered, 500, 100, level)
        shares.append(num_covered / 500)
    # on average no less than promised, and at most 1 / (n + 1) more
    error = np.std(shares) / math.sqrt(len(shares))
    assert level - 3 * error <= np.mean(shares) <= level + 1 / 101 + 3 * error


def test_coverage_on_the_digits(tiny_bundle: Bundle) -> None:
    """The thresholds of the model file, whose images chose no epoch that their probability is of;
    and those of other images over ten splits."""
    images = load_images(tiny_bundle, open_dataset("digits", root=None), "test")
    logits = BatchPredictor.from_bundle(tiny_bundle).predict(images.read, count=len(images))
    probabilities = np.exp(compute_log_probabilities(logits, 1.0))
    right = probabilities[np.arange(len(images)), images.labels]
    recorded = tiny_bundle.metadata["conformal"]
    for level in (0.9, 0.95):
        num_covered = int((right >= recorded["thresholds"][str(level)]).sum())
        assert is_within_interval(num_covered, len(right), recorded["num_images"], level)
        for seed in range(10):
            shuffled = np.random.default_rng(seed).permutation(right)
            threshold = find_threshold(shuffled[:150], coverage=level)
            num_covered = int((shuffled[150:] >= threshold).sum())
            assert is_within_interval(num_covered, len(right) - 150, 150, level)


def test_p_values_of_like_images_are_uniform_and_of_unlike_ones_small() -> None:
    rng = np.random.default_rng(0)
    training = rng.normal(size=(500, 8)) + 3
    held_aside = compute_distances(rng.normal(size=(400, 8)) + 3, training)
    like = compute_p_values(compute_distances(rng.normal(size=(400, 8)) + 3, training), held_aside)
    assert kstest(like, "uniform").pvalue > 0.001
    unlike = rng.normal(size=(100, 8)) - 3
    assert (compute_p_values(compute_distances(unlike, training), held_aside) <= 0.05).mean() > 0.95


def test_answers_of_a_model_and_why_there_are_none(bundle: Bundle) -> None:
    metadata = {name: value for name, value in bundle.metadata.items() if name != "conformal"}
    bundle = replace(bundle, metadata=metadata, likeness=None)
    num_classes = len(bundle.class_names)
    logits = np.zeros((2, num_classes), dtype=np.float32)
    logits[0, 1] = 20
    assert predict_sets(bundle, logits, coverage=0.95) is None
    assert predict_p_values(bundle, np.ones((2, 4), dtype=np.float32)) is None
    assert "holds no thresholds" in str(explain_missing(bundle, 0.95))

    conformal = {"num_images": 10, "thresholds": {"0.9": 0.5}, "no_likeness": "it is too hot"}
    # a temperature doesn't change the sets
    metadata = {**bundle.metadata, "conformal": conformal, "temperature": 50.0}
    some = replace(bundle, metadata=metadata)
    assert predict_sets(some, logits, coverage=0.9) == [[1], []]
    assert predict_sets(some, logits, coverage=0.95) is None
    reason = "no prediction sets at 95 %: 10 validation images, 19 are needed"
    assert explain_missing(some, 0.95) == f"{reason}; no p-values: it is too hot"
    with pytest.raises(ValueError, match=r"coverage 0\.8 is not one of those .* 0\.9 and 0\.95"):
        predict_sets(some, logits, coverage=0.8)

    training = np.eye(4, dtype=np.float16)
    likeness = Likeness(training, np.array([0.1, 0.2, 0.3], dtype=np.float32))
    features = np.ones((2, 4), dtype=np.float32)
    like = replace(some, likeness=likeness)
    assert predict_p_values(like, features) == [0.25, 0.25]
    assert predict_p_values(like, None) is None


def draw_labels(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Four labels, of which an image may have none, and probabilities that know a little."""
    labels = rng.random((count, 4)) < (0.1, 0.3, 0.5, 0.2)
    return expit(rng.normal(1.5 * labels - 1, 1.0)), labels


def test_a_threshold_of_labels_by_hand() -> None:
    # of ten such images and a new one, one may miss half of its labels
    probabilities = np.tile([0.5, 0.9], (10, 1))
    probabilities[0] = (0.1, 0.2)
    labels = np.ones((10, 2), dtype=bool)
    # 0.1 × 11 − 1 = 0.1: no label of theirs may be missed; 0.14 × 11 − 1 = 0.54: half an image may
    assert find_label_threshold(probabilities, labels, coverage=0.9) == (0.1, 10)
    assert find_label_threshold(probabilities, labels, coverage=0.86) == (0.2, 10)
    assert find_label_threshold(probabilities[:8], labels[:8], coverage=0.9) == (None, 8)
    # images without labels can't miss any
    nothing = np.zeros((5, 2), dtype=bool)
    more = np.concatenate([probabilities, np.full((5, 2), 0.3)])
    assert find_label_threshold(more, np.concatenate([labels, nothing]), coverage=0.86) == (0.2, 10)
    # with one label an image they are the prediction sets of classes
    rng = np.random.default_rng(0)
    scores = rng.random((173, 3))
    marks = np.eye(3, dtype=bool)[rng.integers(0, 3, 173)]
    for coverage in (0.9, 0.95):
        expected = find_threshold(scores[marks], coverage=coverage)
        assert find_label_threshold(scores, marks, coverage=coverage) == (expected, 173)


def test_a_threshold_of_labels_is_that_of_mapie() -> None:
    from mapie.risk_control import MultiLabelClassificationController

    probabilities, labels = draw_labels(np.random.default_rng(1), 60)
    probabilities, labels = probabilities[labels.any(axis=1)], labels[labels.any(axis=1)]
    values = np.unique(probabilities[labels])
    # a threshold just below each label's probability
    grid = np.concatenate([[values[0] / 2], (values[:-1] + values[1:]) / 2])
    for coverage in (0.8, 0.9):
        peer = MultiLabelClassificationController(
            lambda x: x, risk="recall", method="crc", target_level=coverage, predict_params=grid
        )
        peer.calibrate(probabilities, labels)
        threshold, _ = find_label_threshold(probabilities, labels, coverage=coverage)
        assert threshold == values[np.searchsorted(values, peer.best_predict_param[0])]


def test_labels_are_missed_as_rarely_as_promised() -> None:
    rng = np.random.default_rng(2)
    others, other_labels = draw_labels(rng, 20_000)
    has_labels = other_labels.any(axis=1)
    counts = other_labels[has_labels].sum(axis=1)
    found = []
    for _ in range(200):
        threshold, _ = find_label_threshold(*draw_labels(rng, 100), coverage=0.9)
        hits = ((others >= threshold) & other_labels)[has_labels].sum(axis=1)
        found.append((hits / counts).mean())
    # the standard error of the mean of 200 is 0.002
    assert 0.9 - 0.006 <= np.mean(found) <= 0.92
