"""Classes of different sizes: how much they differ, and what is done about it."""

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from vit.data.statistics import choose_class_balance, compute_class_weights

LABELS = np.repeat([0, 1, 3], [20, 5, 1])


def test_weights_are_scikit_learns_balanced_ones_and_zero_for_a_class_without_images() -> None:
    weights = compute_class_weights(LABELS, 5)
    expected = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=LABELS)
    np.testing.assert_allclose(weights, [expected[0], expected[1], 0, expected[2], 0], rtol=1e-6)
    assert weights[LABELS].mean() == pytest.approx(1)
    assert weights.dtype == np.float32


def test_auto_is_weights_above_five_to_one() -> None:
    assert choose_class_balance(LABELS, wanted="auto") == "weights"
    five = np.repeat([0, 1], [25, 5])
    assert choose_class_balance(five, wanted="auto") == "none"
    assert choose_class_balance(np.append(five, 0), wanted="auto") == "weights"
    assert choose_class_balance(five, wanted="weights") == "weights"


def test_weights_of_labels_are_the_images_without_for_one_with_it() -> None:
    labels = np.zeros((8, 4), dtype=bool)
    labels[:2, 0] = labels[:6, 1] = labels[:, 2] = True  # all have the third, none the fourth
    np.testing.assert_allclose(compute_class_weights(labels, 4), [3, 1 / 3, 1, 1], rtol=1e-6)
