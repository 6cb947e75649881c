"""Cross-validation: no image is predicted by a probe that has seen it or its group, and the interval
holds what it says."""

import numpy as np
import pytest
import torch
from scipy import stats

from vit.evaluation.clusters import compute_clustered_interval
from vit.prediction.features import Features
from vit.training.cross_validation import CrossValidation, cross_validate
from vit.training.folds import assign_folds

BURST = 4


def make_features(values: np.ndarray) -> Features:
    """At two blocks, of which the first is noise."""
    noise = np.random.default_rng(7).normal(size=values.shape)
    return {
        (depth, "avg"): torch.from_numpy(array).float()
        for depth, array in enumerate((noise, values), start=1)
    }


def run(features: Features, labels: np.ndarray, groups: list[str] | None = None) -> CrossValidation:
    return cross_validate(
        features,
        labels,
        ids=[f"{number}.jpg" for number in range(len(labels))],
        class_names=("cat", "dog"),
        groups=groups,
        num_folds=5,
    )


def test_every_image_is_predicted_once_and_what_can_be_learnt_is() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(100) % 2
    centres = rng.normal(size=(2, 8))
    result = run(make_features(centres[labels] + 0.5 * rng.normal(size=(100, 8))), labels)
    assert len({prediction.path for prediction in result.predictions}) == 100
    assert np.bincount([prediction.fold for prediction in result.predictions]).tolist() == [20] * 5
    right = [prediction.label == prediction.predicted for prediction in result.predictions]
    assert result.top1 == np.mean(right) > 0.9
    # each image its own cluster: Clopper and Pearson's
    exact = stats.binomtest(sum(right), 100).proportion_ci(method="exact")
    assert result.interval == pytest.approx((exact.low, exact.high), abs=0.01)
    assert "5-fold cross-validation of 100 images: top-1" in result.describe()
    assert (result.majority, result.chance) == (0.5, 0.5)


def test_bursts_overstate_unless_they_are_groups() -> None:
    """Features that know the burst, of which the label is drawn: there is nothing to be learnt."""
    rng = np.random.default_rng(0)
    bursts = np.repeat(np.arange(40), BURST)
    labels = np.repeat(rng.permutation(40) % 2, BURST)
    features = make_features(rng.normal(size=(40, 32))[bursts] + 0.1 * rng.normal(size=(160, 32)))
    naive = run(features, labels)
    grouped = run(features, labels, [f"burst{burst}" for burst in bursts])
    assert naive.interval[0] > 0.7
    assert grouped.interval[0] < 0.5 < grouped.interval[1]
    assert grouped.num_groups == 40
    folds = {(item.group, item.fold) for item in grouped.predictions}
    assert len(folds) == 40


def test_folds_have_whole_groups_whatever_the_smallest_class_has() -> None:
    labels = np.repeat([0, 1], [30, 6])
    groups = [f"{number // 3}" for number in range(36)]
    folds = assign_folds(labels, groups, num_folds=5)
    assert folds.max() == 4
    assert len(set(folds[30:].tolist())) == 2
    assert all(len(set(folds[start : start + 3])) == 1 for start in range(0, 36, 3))
    alone = assign_folds(labels, ["a"] * 30 + ["b"] * 6, num_folds=5)
    assert (alone == -1).all()
    with pytest.raises(ValueError, match="every class has one image or group alone"):
        run(make_features(np.zeros((36, 2))), labels, ["a"] * 30 + ["b"] * 6)


def measure_coverage(accuracy: float, correlation: float, *, num_clusters: int) -> float:
    """Of 200 draws of clusters of 1 to 9 images, whose accuracies vary (beta-binomial)."""
    rng = np.random.default_rng(0)
    spread = (1 - correlation) / correlation
    num_covered = 0
    for _ in range(200):
        sizes = rng.integers(1, 10, num_clusters)
        clusters = np.repeat(np.arange(num_clusters), sizes)
        rates = rng.beta(accuracy * spread, (1 - accuracy) * spread, num_clusters)
        low, high = compute_clustered_interval(
            rng.random(len(clusters)) < rates[clusters], clusters
        )
        num_covered += low <= accuracy <= high
    return num_covered / 200


@pytest.mark.parametrize("num_clusters", [15, 60])
@pytest.mark.parametrize("accuracy", [0.6, 0.9, 0.97])
@pytest.mark.parametrize("correlation", [0.05, 0.5])
def test_the_clustered_interval_covers_what_it_says(
    accuracy: float, correlation: float, num_clusters: int
) -> None:
    # of 200 draws at 95 %, fewer than 90 % are covered once in 500
    assert measure_coverage(accuracy, correlation, num_clusters=num_clusters) >= 0.9


def test_the_ends_of_the_interval() -> None:
    clusters = np.repeat(np.arange(10), 5)
    # nothing wrong: as of ten images, not of fifty
    low, high = compute_clustered_interval(np.ones(50, dtype=bool), clusters)
    assert high == 1
    assert 0.5 < low < stats.beta.ppf(0.025, 10, 1) + 1e-9
    assert compute_clustered_interval(np.array([True, False]), np.zeros(2, dtype=int)) == (0, 1)


def test_labels_are_predicted_by_probes_of_the_other_folds() -> None:
    """Groups whose features are their own: what a label is can't be told of another group."""
    rng = np.random.default_rng(0)
    bursts = np.repeat(np.arange(40), BURST)
    marks = (rng.random((40, 3)) < (0.5, 0.3, 0.2))[bursts]
    features = make_features(rng.normal(size=(40, 32))[bursts] + 0.1 * rng.normal(size=(160, 32)))

    def validate(groups: list[str] | None) -> CrossValidation:
        return cross_validate(
            features,
            marks,
            ids=[f"{number}.jpg" for number in range(160)],
            class_names=("cat", "dog", "owl"),
            groups=groups,
            num_folds=5,
        )

    naive, grouped = validate(None), validate([f"burst{burst}" for burst in bursts])
    assert naive.map is not None
    assert naive.map > 0.95
    assert grouped.interval[0] < grouped.chance < grouped.interval[1]
    assert grouped.chance == pytest.approx(marks.mean())
    assert len({(item.group, item.fold) for item in grouped.predictions}) == 40
    first = grouped.predictions[0]
    assert first.predicted == [
        name
        for name, probability in zip(("cat", "dog", "owl"), first.probability, strict=True)
        if probability >= 0.5
    ]
    assert "mean average precision" in grouped.describe()
