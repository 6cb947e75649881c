"""The probe is scikit-learn's regression as one linear layer; what it reads is chosen on images that
it was not fitted on."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vit.prediction.features import Features
from vit.training.linear_probe import assign_folds, fit_probe


def make_features(
    num_classes: int = 3, *, informative: tuple[int, str] = (2, "avg"), images_a_class: int = 30
) -> tuple[Features, np.ndarray]:
    """Noise at three readouts, and classes that can be told apart at a fourth."""
    generator = torch.Generator().manual_seed(0)
    labels = np.repeat(np.arange(num_classes), images_a_class)
    features = {
        (depth, pool): 3 + 2 * torch.randn(len(labels), 8, generator=generator)
        for depth in (1, 2)
        for pool in ("token", "avg")
    }
    centres = 3 * torch.randn(num_classes, 8, generator=generator)
    features[informative] += centres[labels]
    # a channel that never changes
    features[informative][:, 0] = 7.0
    return features, labels


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("balanced", [False, True])
def test_probabilities_are_scikit_learns(num_classes: int, balanced: bool) -> None:
    features, labels = make_features(num_classes)
    # of other numbers in each class
    chosen = np.flatnonzero((labels > 0) | (np.arange(len(labels)) % 3 == 0))
    features = {readout: values[chosen] for readout, values in features.items()}
    labels = labels[chosen]
    probe = fit_probe(features, labels, num_classes=num_classes, balanced=balanced)
    values = features[probe.readout].numpy().astype(np.float64)
    reference = make_pipeline(
        StandardScaler(),
        LogisticRegression(
            C=probe.strength, max_iter=1000, class_weight="balanced" if balanced else None
        ),
    ).fit(values, labels)
    probabilities = softmax(probe.compute_logits(values), axis=1)
    np.testing.assert_allclose(probabilities, reference.predict_proba(values), atol=1e-9)
    assert probe.weight.shape == (num_classes, 8)


def test_the_readout_that_tells_the_classes_apart_is_chosen() -> None:
    features, labels = make_features(informative=(1, "token"))
    probe = fit_probe(features, labels, num_classes=3)
    assert probe.readout == (1, "token")
    assert probe.top1 is not None
    assert 0.8 < probe.top1 <= 1


def test_accuracy_is_of_images_that_were_left_out() -> None:
    """Labels that nothing tells: a regression of 8 channels on 12 images knows its own by heart."""
    features, _ = make_features(images_a_class=4)
    labels = np.random.default_rng(1).permutation(np.repeat([0, 1, 2], 4))
    noise = {(1, "token"): features[1, "token"]}
    probe = fit_probe(noise, labels, num_classes=3)
    assert probe.top1 is not None
    assert probe.top1 < 0.7


def test_a_class_without_images_has_no_probability() -> None:
    features, labels = make_features()
    probe = fit_probe(features, 2 * labels, num_classes=6)
    probabilities = softmax(probe.compute_logits(features[probe.readout].numpy()), axis=1)
    assert probabilities[:, 1::2].max() < 1e-9
    assert (probabilities.argmax(axis=1) == 2 * labels).mean() > 0.8


def test_one_image_a_class_is_fitted_without_a_choice() -> None:
    features, labels = make_features(images_a_class=1)
    probe = fit_probe(features, labels, num_classes=3)
    assert probe.readout == (2, "avg")
    assert probe.top1 is None
    with pytest.raises(ValueError, match="at least two classes"):
        fit_probe(features, np.zeros(3, dtype=np.int64), num_classes=3)


def test_folds_that_leave_out_whole_classes_are_taken() -> None:
    features, labels = make_features()
    probe = fit_probe(features, labels, num_classes=3, folds=labels)
    assert probe.top1 == 0


def test_folds_are_stratified_and_even() -> None:
    labels = np.repeat([0, 1, 2, 3], [11, 7, 23, 1])
    folds = assign_folds(labels)
    assert folds[labels == 3] == -1
    counts = np.array([np.bincount(folds[labels == label], minlength=5) for label in range(3)])
    assert (np.ptp(counts, axis=1) <= 1).all()
    assert np.ptp(counts.sum(axis=0)) <= 1
    assert (assign_folds(labels) == folds).all()
    # as many as the smallest class has images
    assert assign_folds(np.array([0, 0, 0, 1, 1])).max() == 1
