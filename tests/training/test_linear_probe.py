"""The probe is scikit-learn's regression as one linear layer; what it reads is chosen on images that
it was not fitted on."""

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vit.prediction.batch_predictor import Features
from vit.training.folds import assign_folds
from vit.training.linear_probe import fit_probe


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
    probe = fit_probe(
        features, labels, assign_folds(labels), num_classes=num_classes, balanced=balanced
    )
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


def make_labels(num_images: int = 90) -> tuple[Features, np.ndarray]:
    """Features of `make_features`, three labels that one readout tells, and one that nothing tells."""
    features, labels = make_features(images_a_class=num_images // 3)
    rng = np.random.default_rng(0)
    marks = np.zeros((len(labels), 4), dtype=bool)
    marks[np.arange(len(labels)), labels] = rng.random(len(labels)) < 0.9
    marks[:, 1] |= labels == 2
    marks[:, 3] = rng.random(len(labels)) < 0.3
    return features, marks


@pytest.mark.parametrize("balanced", [False, True])
def test_each_label_is_scikit_learns_regression(balanced: bool) -> None:
    features, marks = make_labels()
    # a label of every image and one of none have no regression
    marks = np.concatenate([marks, np.ones((90, 1), bool), np.zeros((90, 1), bool)], axis=1)
    probe = fit_probe(features, marks, assign_folds(marks), num_classes=6, balanced=balanced)
    assert probe.readout == (2, "avg")
    assert probe.accuracy is not None
    values = features[probe.readout].numpy().astype(np.float64)
    standardised = StandardScaler().fit_transform(values)
    probabilities = expit(probe.compute_logits(values))
    for label in range(4):
        positive = (~marks[:, label]).sum() / marks[:, label].sum() if balanced else 1.0
        reference = LogisticRegression(
            C=probe.strength, max_iter=1000, class_weight={True: positive}
        ).fit(standardised, marks[:, label])
        expected = reference.predict_proba(standardised)[:, 1]
        np.testing.assert_allclose(probabilities[:, label], expected, atol=1e-6)
    assert probabilities[:, 4].min() > 0.99
    assert probabilities[:, 5].max() < 0.01


def test_the_readout_that_tells_the_classes_apart_is_chosen() -> None:
    features, labels = make_features(informative=(1, "token"))
    probe = fit_probe(features, labels, assign_folds(labels), num_classes=3)
    assert probe.readout == (1, "token")
    assert probe.accuracy is not None
    assert 0.8 < probe.accuracy <= 1


def test_its_accuracy_is_that_of_images_that_were_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    features = {(1, "avg"): torch.randn(80, 120, generator=generator)}
    labels = np.arange(80) % 2
    probe = fit_probe(features, labels, assign_folds(labels), num_classes=2)
    assert probe.accuracy is not None
    assert probe.accuracy < 0.75  # of noise


def test_a_class_without_images_has_no_probability() -> None:
    features, labels = make_features()
    probe = fit_probe(features, 2 * labels, assign_folds(labels), num_classes=6)
    probabilities = softmax(probe.compute_logits(features[probe.readout].numpy()), axis=1)
    assert probabilities[:, 1::2].max() < 1e-9
    assert (probabilities.argmax(axis=1) == 2 * labels).mean() > 0.8
