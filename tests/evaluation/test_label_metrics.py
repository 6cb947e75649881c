"""Metrics of several labels an image against scikit-learn, and their intervals."""

import numpy as np
import pytest
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    roc_auc_score,
)

from vit.evaluation.metrics import (
    Scores,
    compute_metrics,
    measure,
    score_logits,
)


def draw(num_images: int, num_labels: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw logits and labels, with ties among the logits."""
    rng = np.random.default_rng(seed)
    labels = rng.random((num_images, num_labels)) < 0.2
    logits = np.round(labels * 1.5 + rng.normal(size=labels.shape) - 1, 1)
    return logits.astype(np.float32), labels


def test_metrics_are_those_of_scikit_learn() -> None:
    logits, labels = draw(300, 5)
    labels[:, 3] = False  # a label that no image has
    labels[:, 4] = True  # one that all have
    scores = score_logits(logits, labels)
    found = compute_metrics(scores)
    probabilities = scores.probabilities
    predicted = probabilities >= 0.5
    known = [0, 1, 2, 4]
    columns = [(labels[:, place], probabilities[:, place]) for place in known]
    expected = {
        "map": np.mean([average_precision_score(*column) for column in columns]),
        "roc_auc": np.mean([roc_auc_score(*column) for column in columns[:3]]),
        "macro_f1": f1_score(labels[:, known], predicted[:, known], average="macro"),
        "micro_f1": f1_score(labels, predicted, average="micro"),
        "exact_match": np.mean((labels == predicted).all(axis=1)),
        "loss": np.mean(
            [
                log_loss(*column, labels=[0, 1])
                for column in zip(labels.T, probabilities.T, strict=True)
            ]
        ),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)

    rows = measure(scores, None, ("a", "b", "c", "d", "e")).per_class
    for place in range(3):
        column, probability = labels[:, place], probabilities[:, place]
        row = rows[place]
        values = (row.average_precision, row.roc_auc, row.precision, row.recall, row.f1)
        assert values == pytest.approx(
            (
                average_precision_score(column, probability),
                roc_auc_score(column, probability),
                precision_score(column, predicted[:, place]),
                recall_score(column, predicted[:, place]),
                f1_score(column, predicted[:, place]),
            ),
            abs=1e-12,
        )
    assert rows[3].average_precision is rows[3].recall is rows[4].roc_auc is None
    assert rows[3].average_precision_interval == (0.0, 1.0)


def test_perfect_and_useless_predictions_have_intervals() -> None:
    _, labels = draw(100, 2)
    perfect = score_logits(np.where(labels, 9, -9).astype(np.float32), labels)
    intervals = measure(perfect).intervals
    assert intervals["map"][1] == 1.0
    assert 0.8 < intervals["map"][0] < 0.99
    # no label is ever predicted
    never = score_logits(np.full(labels.shape, -2, np.float32), labels)
    low, high = measure(never).intervals["micro_f1"]
    assert low == 0.0
    assert 0.0 < high < 0.2
    # a single image has intervals that JSON can hold
    single = score_logits(np.array([[2.0, -1.0]], np.float32), np.array([[True, True]]))
    assert np.isfinite(list(measure(single).intervals.values())).all()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("num_images", "num_labels", "shift", "rate", "num_groups"),
    [(200, 3, 2.0, 0.3, None), (200, 3, 4.0, 0.2, None), (100, 5, 1.0, 0.1, None), (300, 3, 2.0, 0.3, 20)],
)  # fmt: skip
def test_intervals_cover(
    num_images: int, num_labels: int, shift: float, rate: float, num_groups: int | None
) -> None:
    rng = np.random.default_rng(1)

    def draw_scores(count: int, groups: int | None) -> tuple[Scores, list[str] | None]:
        labels = rng.random((count, num_labels)) < rate
        group_of = rng.integers(0, groups or 1, count)
        effects = rng.normal(size=(groups or 1, num_labels))[group_of] * 0.8 * (groups is not None)
        logits = labels * shift + rng.normal(size=labels.shape) + effects - shift / 2
        names = None if groups is None else [str(group) for group in group_of]
        return score_logits(logits.astype(np.float32), labels), names

    num_draws = 200
    everything, _ = draw_scores(60_000, None if num_groups is None else 4000)
    true = compute_metrics(everything)
    covered = dict.fromkeys(measure(draw_scores(50, None)[0]).intervals, 0)
    for _ in range(num_draws):
        for name, (low, high) in measure(*draw_scores(num_images, num_groups)).intervals.items():
            covered[name] += low <= true[name] <= high
    # 95 % less three standard errors of 200 draws
    assert all(count >= 0.904 * num_draws for count in covered.values()), covered
