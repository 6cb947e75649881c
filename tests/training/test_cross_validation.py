"""Cross-validation: no image is predicted by a probe that has seen it or its group, and the interval
holds what it says."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from vit.evaluation.intervals import compute_clustered_interval
from vit.prediction.batch_predictor import Features
from vit.training.folds import assign_folds
from vit.training.linear_probe import predict_left_out

BURST = 4


def make_features(values: np.ndarray) -> Features:
    """At two blocks, of which the first is noise."""
    noise = np.random.default_rng(7).normal(size=values.shape)
    return {
        (depth, "avg"): torch.from_numpy(array).float()
        for depth, array in enumerate((noise, values), start=1)
    }


def run(
    features: Features, labels: np.ndarray, groups: list[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The fold that left out each image, and its logits."""
    folds, logits = assign_folds(labels, groups, num_folds=3), np.zeros((len(labels), 3))
    for fold in range(3):
        logits[folds == fold] = predict_left_out(
            features, labels, folds, fold, num_classes=3, groups=groups
        )
    return folds, logits


def test_every_image_is_predicted_once_and_what_can_be_learnt_is() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(100) % 2
    centres = rng.normal(size=(2, 8))
    folds, logits = run(make_features(centres[labels] + 0.5 * rng.normal(size=(100, 8))), labels)
    assert np.bincount(folds).tolist() == [34, 33, 33]
    assert (logits.argmax(axis=1) == labels).mean() > 0.9


def test_bursts_overstate_unless_they_are_groups() -> None:
    """Features that know the burst, of which the label is drawn: there is nothing to be learnt."""
    rng = np.random.default_rng(0)
    bursts = np.repeat(np.arange(40), BURST)
    labels = np.repeat(rng.permutation(40) % 2, BURST)
    features = make_features(rng.normal(size=(40, 32))[bursts] + 0.1 * rng.normal(size=(160, 32)))
    _, naive = run(features, labels)
    folds, grouped = run(features, labels, [f"burst{burst}" for burst in bursts])
    naive, grouped = (logits.argmax(axis=1) == labels for logits in (naive, grouped))
    assert compute_clustered_interval(naive, np.arange(160))[0] > 0.7
    low, high = compute_clustered_interval(grouped, bursts)
    assert low < 0.5 < high
    assert len(set(zip(bursts.tolist(), folds.tolist(), strict=True))) == 40


@pytest.mark.extended
def test_labels_are_predicted_by_probes_of_the_other_folds() -> None:
    """Groups whose features are their own: what a label is can't be told of another group."""
    rng = np.random.default_rng(0)
    bursts = np.repeat(np.arange(40), BURST)
    marks = (rng.random((40, 3)) < (0.5, 0.3, 0.2))[bursts]
    features = make_features(rng.normal(size=(40, 32))[bursts] + 0.1 * rng.normal(size=(160, 32)))

    def measure(groups: list[str] | None) -> float:
        return float(average_precision_score(marks, run(features, marks, groups)[1]))

    assert measure(None) > 0.95
    assert measure([f"burst{burst}" for burst in bursts]) < marks.mean() + 0.15
