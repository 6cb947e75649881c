"""An audit finds planted label errors and copies, and judges no image by its copy or its group."""

import numpy as np
import pytest
from cleanlab.filter import find_label_issues
from sklearn.datasets import load_digits
from sklearn.kernel_approximation import Nystroem

from vit.analysis.audit.suspects import find_label_errors, find_unusual, predict_out_of_fold
from vit.training.folds import assign_folds


def mark(labels: np.ndarray, num_classes: int) -> np.ndarray:
    return labels[:, None] == np.arange(num_classes)


def test_planted_errors_of_digits_are_found() -> None:
    """From features that are as good as a model's: the packaged one finds 69 to 71 of 90."""
    images, labels = load_digits(return_X_y=True)
    kernel = Nystroem(gamma=5e-4, n_components=200, random_state=0)
    features = kernel.fit_transform(images).astype(np.float32)
    counts = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        swapped = rng.choice(len(labels), 90, replace=False)
        noisy = labels.copy()
        noisy[swapped] = (labels[swapped] + rng.integers(1, 10, 90)) % 10
        given = mark(noisy, 10)
        folds = assign_folds(noisy)
        probabilities = predict_out_of_fold(features, given, folds, is_multilabel=False)
        errors = find_label_errors(probabilities, given, is_multilabel=False)
        suspects = np.array([row for row, _, _ in errors])
        is_right = np.isin(suspects, swapped)
        counts.append((len(suspects), is_right.sum()))
        # the first ones to look at are errors
        assert is_right[:40].mean() > 0.9
        suggested = np.array([marks.argmax() for _, marks, _ in errors])
        assert (suggested[is_right] == labels[suspects[is_right]]).mean() > 0.95
        scores = [score for _, _, score in errors]
        assert scores == sorted(scores, reverse=True)
    num_suspects, num_found = np.mean(counts, axis=0)
    assert num_suspects <= 100
    assert num_found >= 65


def test_flipped_labels_are_found_as_cleanlab_finds_them() -> None:
    rng = np.random.default_rng(0)
    marks = rng.random((800, 4)) < (0.5, 0.4, 0.3, 0.2)
    centres = rng.normal(size=(4, 16))
    features = (1.5 * marks @ centres + 0.6 * rng.normal(size=(800, 16))).astype(np.float32)
    noisy = marks.ravel().copy()
    flipped = np.random.default_rng(1).choice(noisy.size, noisy.size // 20, replace=False)
    noisy[flipped] = ~noisy[flipped]
    # a label of no image can't be examined
    noisy = np.concatenate([noisy.reshape(marks.shape), np.zeros((800, 1), dtype=bool)], axis=1)
    probabilities = predict_out_of_fold(features, noisy, assign_folds(noisy), is_multilabel=True)
    errors = find_label_errors(probabilities, noisy, is_multilabel=True)
    found = {
        (row, int(label))
        for row, suggested, _ in errors
        for label in np.flatnonzero(suggested != noisy[row])
    }
    is_right = np.isin([4 * row + label for row, label in found], flipped)
    assert is_right.sum() >= 0.7 * len(flipped)
    assert is_right.mean() > 0.7
    for label in range(4):
        binary = np.stack([1 - probabilities[:, label], probabilities[:, label]], axis=1)
        issues = find_label_issues(
            noisy[:, label].astype(int), binary, filter_by="confident_learning", n_jobs=1
        )
        assert {row for row, other in found if other == label} == set(np.flatnonzero(issues))


@pytest.mark.parametrize("several", [False, True])
def test_no_image_is_judged_by_a_classifier_that_saw_its_group(several: bool) -> None:
    """Features that mean nothing are of no use to a classifier that did not see the image."""
    rng = np.random.default_rng(0)
    features = np.repeat(rng.normal(size=(200, 300)), 2, axis=0).astype(np.float32)
    groups = [str(number) for number in range(200) for _ in range(2)]
    labels = np.repeat(rng.integers(2, size=200), 2)
    given = mark(labels, 2)
    if several:
        given = np.stack([labels == 1, np.repeat(rng.random(200) < 0.5, 2)], axis=1)
    folds = assign_folds(given if several else labels, groups)
    found = predict_out_of_fold(features, given, folds, is_multilabel=several)
    right = (found >= 0.5) == given
    assert abs(right.mean() - 0.5) < 0.12
    # images apart from their copies are known by them
    folds = assign_folds(given if several else labels)
    apart = predict_out_of_fold(features, given, folds, is_multilabel=several)
    assert ((apart >= 0.5) == given).mean() > 0.9


def test_images_of_no_class_are_unusual_though_they_have_copies() -> None:
    rng = np.random.default_rng(0)
    centres = 5 * rng.normal(size=(2, 32)).repeat(100, axis=0)
    odd = 5 * rng.normal(size=(4, 32)).repeat(2, axis=0)
    features = np.concatenate([centres, odd]) + 0.5 * rng.normal(size=(208, 32))
    distances, is_unusual = find_unusual(features.astype(np.float32))
    assert set(np.argsort(distances)[-8:]) == set(range(200, 208))
    assert is_unusual[200:].all()
    assert is_unusual[:200].mean() <= 0.01
