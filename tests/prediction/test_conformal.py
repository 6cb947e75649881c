"""Prediction sets hold the right class as often as promised, and p-values are uniform; by hand
and on planted ones."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import betabinom, kstest

from tests.evaluation.conftest import MakePredictions
from vit.bundle import Bundle
from vit.prediction.conformal import (
    compute_p_values,
    find_threshold,
    predict_sets,
)
from vit.prediction.neighbours import compute_distances
from vit.prediction.predictor import Predictor
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
    # 95 % need 19 images
    assert find_threshold(np.full(18, 0.5)) is None
    assert find_threshold(np.full(19, 0.5)) == 0.5


def predict(bundle: Bundle, logits: np.ndarray, threshold: float) -> list[list[int]]:
    """Return the sets of a model that holds this threshold."""
    metadata = {"conformal": {"thresholds": {"0.95": threshold}}}
    names = tuple(map(str, range(logits.shape[1])))
    sets = predict_sets(replace(bundle, class_names=names, metadata=metadata), logits)
    return [[int(name) for name in chosen] for chosen in sets]


def test_sets_by_hand(bundle: Bundle) -> None:
    logits = np.log([[0.1, 0.6, 0.3], [0.34, 0.33, 0.33], [0.2, 0.4, 0.4]]).astype(np.float32)
    assert predict(bundle, logits, 0.29) == [[1, 2], [0, 1, 2], [1, 2]]
    assert predict(bundle, logits, 0.5) == [[1], [], []]


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
        # the coverage of a threshold of 100 images is Beta(rank, 101 - rank) (Vovk 2012)
        rank = math.ceil(round(101 * level, 9))
        low, high = betabinom(500, rank, 101 - rank).interval(0.999)
        assert low <= num_covered <= high
        shares.append(num_covered / 500)
    # on average no less than promised, and at most 1 / (n + 1) more
    error = np.std(shares) / math.sqrt(len(shares))
    assert level - 3 * error <= np.mean(shares) <= level + 1 / 101 + 3 * error


def test_p_values_of_like_images_are_uniform_and_of_unlike_ones_small() -> None:
    rng = np.random.default_rng(0)
    training = rng.normal(size=(500, 8)) + 3
    held_aside = compute_distances(rng.normal(size=(400, 8)) + 3, training)
    like = compute_p_values(compute_distances(rng.normal(size=(400, 8)) + 3, training), held_aside)
    assert kstest(like, "uniform").pvalue > 0.001
    unlike = rng.normal(size=(100, 8)) - 3
    assert (compute_p_values(compute_distances(unlike, training), held_aside) <= 0.05).mean() > 0.95


def test_sets_of_a_model_and_none_without_a_threshold(bundle: Bundle) -> None:
    metadata = {name: value for name, value in bundle.metadata.items() if name != "conformal"}
    num_classes = len(bundle.class_names)
    logits = np.zeros((2, num_classes), dtype=np.float32)
    logits[0, 1] = 20
    assert predict_sets(replace(bundle, metadata=metadata), logits) == [None, None]

    conformal = {"num_images": 10, "thresholds": {"0.95": 0.5}, "no_likeness": "it is too hot"}
    # a temperature doesn't change the sets
    some = replace(bundle, metadata={**metadata, "conformal": conformal, "temperature": 50.0})
    assert predict_sets(some, logits) == [[bundle.class_names[1]], []]


def test_a_model_without_features_in_its_file_has_no_p_value(bundle: Bundle) -> None:
    photo = np.zeros((8, 8, 3), np.uint8)
    for each, expected in ((bundle, False), (replace(bundle, likeness=None), True)):
        (prediction,) = Predictor(each).predict_items([("photo", photo)])
        assert (prediction.p_value is None) == expected
