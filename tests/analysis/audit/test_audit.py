"""An audit finds planted label errors, copies and odd images."""

from pathlib import Path

import numpy as np
import pytest
from cleanlab.filter import find_label_issues
from cleanlab.multilabel_classification.rank import get_label_quality_scores_per_class
from PIL import Image

from vit.analysis.audit.suspects import (
    find_confused,
    find_suspect_pairs,
    find_suspects,
    measure_between,
    measure_image,
    predict_labels_out_of_fold,
    predict_out_of_fold,
)
from vit.data.duplicates import compute_dhash, find_pairs, hash_pixels


def make_features(count: int, num_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Clusters, and the class of each."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % num_classes
    centres = rng.normal(size=(num_classes, 16))
    features = 1.5 * centres[labels] + rng.normal(size=(count, 16))
    return features.astype(np.float32), labels


def make_digests(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(2**63, size=count, dtype=np.uint64)


def swap_labels(labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The labels, of which `count` are those of the next class; and which."""
    swapped = np.random.default_rng(1).choice(len(labels), count, replace=False)
    noisy = labels.copy()
    noisy[swapped] = (labels[swapped] + 1) % (labels.max() + 1)
    return noisy, swapped


def test_swapped_labels_are_found_with_the_right_class() -> None:
    features, labels = make_features(1000, 5)
    noisy, swapped = swap_labels(labels, 50)
    probabilities = predict_out_of_fold(features, noisy, make_digests(1000), num_classes=5)
    suspects, suggested = find_suspects(probabilities, noisy)
    is_right = np.isin(suspects, swapped)
    errors = np.array(suspects)[is_right]
    # those whose right class is more probable than it is on average on its own images
    assert is_right.sum() >= 35
    assert is_right.mean() > 0.7
    assert (np.array(suggested)[is_right] == labels[errors]).mean() > 0.95


def make_marks(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Features, and four labels of which an image has any number."""
    rng = np.random.default_rng(0)
    marks = rng.random((count, 4)) < (0.5, 0.4, 0.3, 0.2)
    centres = rng.normal(size=(4, 16))
    features = 1.5 * marks @ centres + 0.6 * rng.normal(size=(count, 16))
    return features.astype(np.float32), marks


def test_flipped_labels_are_found_as_cleanlab_finds_them() -> None:
    features, marks = make_marks(800)
    noisy = marks.ravel().copy()
    flipped = np.random.default_rng(1).choice(noisy.size, noisy.size // 20, replace=False)
    noisy[flipped] = ~noisy[flipped]
    noisy = noisy.reshape(marks.shape)
    # a label of no image can't be examined
    noisy = np.concatenate([noisy, np.zeros((800, 1), dtype=bool)], axis=1)
    probabilities = predict_labels_out_of_fold(features, noisy, make_digests(800))
    found = find_suspect_pairs(probabilities, noisy)
    is_right = np.isin([4 * image + label for image, label in found], flipped)
    assert is_right.sum() >= 0.7 * len(flipped)
    assert is_right.mean() > 0.7
    scores = get_label_quality_scores_per_class(
        [np.flatnonzero(row).tolist() for row in noisy], probabilities
    )
    confidence = [scores[image, label] for image, label in found]
    assert confidence == sorted(confidence)
    for label in range(4):
        binary = np.stack([1 - probabilities[:, label], probabilities[:, label]], axis=1)
        issues = find_label_issues(
            noisy[:, label].astype(int), binary, filter_by="confident_learning", n_jobs=1
        )
        ours = {image for image, other in found if other == label}
        assert ours == set(np.flatnonzero(issues).tolist())


def test_labels_are_not_judged_by_a_classifier_that_saw_a_copy_or_the_group() -> None:
    rng = np.random.default_rng(0)
    features = np.repeat(rng.normal(size=(200, 300)), 2, axis=0).astype(np.float32)
    marks = np.repeat(rng.random((200, 2)) < 0.5, 2, axis=0)
    copies = np.repeat(make_digests(200), 2)
    groups = [f"patient {index // 2}" for index in range(400)]
    for digests, own_groups in ((copies, None), (make_digests(400), groups)):
        found = predict_labels_out_of_fold(features, marks, digests, groups=own_groups)
        assert abs(((found >= 0.5) == marks).mean() - 0.5) < 0.1


def test_no_image_is_judged_by_a_classifier_that_saw_it_or_its_copy() -> None:
    """Features that mean nothing are of no use to a classifier that did not see the image."""
    rng = np.random.default_rng(0)
    features = np.repeat(rng.normal(size=(200, 300)), 2, axis=0).astype(np.float32)
    labels = np.repeat(rng.integers(2, size=200), 2)
    digests = np.repeat(make_digests(200), 2)
    probabilities = predict_out_of_fold(features, labels, digests, num_classes=2)
    accuracy = (probabilities.argmax(axis=1) == labels).mean()
    assert abs(accuracy - 0.5) < 0.12
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-9)

    # neither names nor the order of the images matter
    order = rng.permutation(400)
    shuffled = predict_out_of_fold(features[order], labels[order], digests[order], num_classes=2)
    np.testing.assert_allclose(shuffled, probabilities[order], atol=2e-3)


def test_classes_that_cannot_be_told_apart_by_hand() -> None:
    labels = np.repeat([0, 1, 2], 10)
    predicted = labels.copy()
    predicted[:3] = 1
    predicted[10:12] = 0
    predicted[20] = 0
    (pair,) = find_confused(np.eye(3)[predicted], labels, ("ant", "bee", "cow"))
    assert (pair.classes, pair.confused, pair.count) == (("ant", "bee"), 5, 20)


def test_copies_are_found_also_recoded_and_mirrored(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    photos = []
    for _ in range(4):
        pixels = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        photos.append(Image.fromarray(pixels).resize((64, 64), Image.Resampling.BICUBIC))
    photos[1].save(tmp_path / "again.jpg", quality=70)
    with Image.open(tmp_path / "again.jpg") as file:
        recoded = file.convert("RGB")
    mirrored = photos[2].transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    images = [*photos, photos[0], recoded, mirrored]
    hashes = np.array([[f(image) for image in images] for f in (hash_pixels, compute_dhash)])
    assert find_pairs(hashes.astype(np.uint64)) == [(0, 4, True), (1, 5, False), (2, 6, False)]


def test_properties_by_hand() -> None:
    grey = measure_image(Image.new("RGB", (40, 20), (100, 100, 100)))
    assert grey == {"brightness": 100.0, "sharpness": 0.0, "pixels": 800.0, "aspect": 2.0}
    # a chessboard of single pixels: each differs from its four neighbours by 255
    board = (np.indices((8, 8)).sum(axis=0) % 2 * 255).astype(np.uint8)
    sharp = measure_image(Image.fromarray(board).convert("RGB"))["sharpness"]
    blurred = measure_image(Image.fromarray(board // 4 + 96).convert("RGB"))["sharpness"]
    assert sharp == pytest.approx(16 * blurred, rel=0.05)


def test_the_share_between_classes_is_without_bias() -> None:
    # 1, 3 and 5, 7: total 20, within 4, so η² = 0.8; 1 - 0.2 · 3 / 2
    assert measure_between(np.array([1.0, 3, 5, 7]), np.array([0, 0, 1, 1])) == pytest.approx(0.7)
    # numbers of classes without images change nothing, nor does the order
    assert measure_between(np.array([5.0, 1, 7, 3]), np.array([9, 2, 9, 2])) == pytest.approx(0.7)
    # pure noise in 37 classes of five: η² is 20 % on average
    rng = np.random.default_rng(0)
    labels = np.arange(185) % 37
    shares = [measure_between(rng.normal(size=185), labels) for _ in range(200)]
    assert np.mean(shares) < 0.05
    # a planted share of 50 %
    shares = [
        measure_between(rng.normal(size=37)[labels] + rng.normal(size=185), labels)
        for _ in range(200)
    ]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
    assert measure_between(np.arange(3.0), np.arange(3)) == 0
