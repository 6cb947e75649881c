"""Intervals have the width that theory gives them, and hold the truth also where errors are few."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.stats import binom, binomtest

from tests.evaluation.conftest import MakePredictions
from vit.evaluation.intervals import (
    compute_clustered_interval,
    compute_design_effect,
    compute_proportion_interval,
)
from vit.evaluation.metrics import (
    Scores,
    compute_metrics,
    measure,
    score_logits,
)


def test_the_interval_of_a_proportion_is_the_one_of_clopper_and_pearson() -> None:
    for successes, count in zip((0, 7, 100), (20, 9, 100), strict=True):
        exact = binomtest(successes, count).proportion_ci()
        interval = compute_proportion_interval(successes, count)
        assert interval == pytest.approx((exact.low, exact.high))
    # of no image nothing is known
    assert compute_proportion_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("accuracy", [0.5, 0.9, 0.98, 0.99, 0.999])
@pytest.mark.parametrize("count", [20, 30, 100, 1000, 10_000])
def test_at_least_95_of_100_intervals_of_an_accuracy_hold_it(accuracy: float, count: int) -> None:
    correct = np.arange(count + 1)
    low, high = np.array([compute_proportion_interval(hits, count) for hits in correct]).T
    holds = (low <= accuracy) & (accuracy <= high)
    coverage = binom.pmf(correct, count, accuracy)[holds].sum()
    assert coverage >= 0.95
    if count * (1 - accuracy) >= 10:
        # with fewer errors, one number of errors more or less is several per cent of all draws
        assert coverage <= 0.98


def test_an_evaluation_without_errors_may_still_have_met_luck() -> None:
    labels = np.arange(100) % 10
    scores = score_logits((20 * np.eye(10)[labels]).astype(np.float32), labels)
    intervals = measure(scores).intervals
    # (1 - 0.9638)^100 = 2.5 %
    assert intervals["top1"] == pytest.approx((0.9638, 1), abs=1e-4)
    for name in ("macro_f1", "macro_recall"):
        assert intervals[name] == pytest.approx((0.9638, 1), abs=2e-3), name


@pytest.mark.parametrize("accuracy", [0.8, 0.99])
@pytest.mark.parametrize("count", [20, 100])
def test_intervals_hold_the_truth_near_the_edge_too(accuracy: float, count: int) -> None:
    generator = np.random.default_rng(0)
    sharpness = {0.8: 5.26, 0.99: 104.0}[accuracy]

    def draw(images: int) -> Scores:
        logits = sharpness * generator.standard_normal((images, 10))
        labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
        # twice as sure as it may be
        return score_logits((2 * logits).astype(np.float32), labels)

    truth = compute_metrics(draw(100_000))
    assert truth["top1"] == pytest.approx(accuracy, abs=0.01)
    intervals = [measure(draw(count)).intervals for _ in range(40)]
    for name, value in truth.items():
        if name not in intervals[0]:
            continue
        holds = sum(low <= value <= high for low, high in (each[name] for each in intervals))
        # fewer of 95 %: once in 2,000 tests
        assert holds >= 33, (name, holds)


def draw_sizes(name: str, rng: np.random.Generator) -> np.ndarray:
    if name == "varying":
        return np.maximum(1, rng.poisson(rng.gamma(1, 10, 20)))
    if name == "one large":
        return np.array([75, *[5] * 14])
    groups, size = map(int, name.split("x"))
    return np.full(groups, size)


@pytest.mark.parametrize(
    ("sizes", "accuracy", "correlation"),
    [
        ("varying", 0.9, 0.6),
        ("30x5", 0.95, 0.5),
        ("6x30", 0.8, 0.7),
        ("10x10", 0.9, 0.6),
        ("one large", 0.9, 0.9),
        ("100x5", 0.98, 0.5),
        ("10x20", 0.9, 0.5),
        ("8x20", 0.9, 0.3),
    ],
)
def test_intervals_of_few_groups_cover(sizes: str, accuracy: float, correlation: float) -> None:
    """Without the prior, 86 to 93 % here."""
    rng = np.random.default_rng(0)
    spread = (1 - correlation) / correlation
    num_covered = 0
    for _ in range(1000):
        drawn = draw_sizes(sizes, rng)
        rates = rng.beta(accuracy * spread, (1 - accuracy) * spread, len(drawn))
        clusters = np.repeat(np.arange(len(drawn)), drawn)
        correct = rng.random(len(clusters)) < rates[clusters]
        low, high = compute_clustered_interval(correct, clusters)
        num_covered += low <= accuracy <= high
    assert num_covered >= 930


def test_the_design_effect_by_hand() -> None:
    """Three groups of two, of which one is wrong as a whole and two are right."""
    correct = np.array([False, False, True, True, True, True])
    clusters = np.array([5, 5, 1, 1, 9, 9])
    # deviations -2/3 and 1/3: sums -4/3, 2/3, 2/3; 3/2 · 24/9 over 12/9, which is more than Σm²/n = 2
    student = stats.t.ppf(0.975, 2) / stats.t.ppf(0.975, 5)
    effect = compute_design_effect(correct, clusters)
    assert effect == pytest.approx(3 * student**2)
    # one error in a group: (3/2) · (1/3 + …) is below 1, and one group of 1.5 shows it
    correct = np.array([False, True, True, True, True, True])
    measured = max(1.5 * ((-4 / 6) ** 2 + 2 * (2 / 6) ** 2) / (5 / 6), 1)
    effect = compute_design_effect(correct, clusters)
    assert effect == pytest.approx((measured + 0.5 * 2) / 1.5 * student**2)
    assert compute_design_effect(correct, np.arange(6)) == 1


def draw_groups(rng: np.random.Generator) -> tuple[Scores, list[str]]:
    """12 sites of 20 images of four classes, each site with a shift of its own."""
    clusters = np.repeat(np.arange(12), 20)
    labels = rng.integers(4, size=240)
    noise = np.sqrt(0.3) * rng.standard_normal((12, 4))[clusters]
    noise += np.sqrt(0.7) * rng.standard_normal((240, 4))
    logits = 4 * np.eye(4)[labels] + 2 * noise
    return score_logits(logits.astype(np.float32), labels), clusters.astype(str).tolist()


def test_all_metrics_of_groups_are_covered() -> None:
    rng = np.random.default_rng(0)
    many = [draw_groups(rng)[0] for _ in range(400)]
    names = ("labels", "predicted", "probabilities", "loss", "rank")
    columns = {name: np.concatenate([getattr(each, name) for each in many]) for name in names}
    truth = compute_metrics(replace(many[0], **columns))
    intervals = [measure(*draw_groups(rng)).intervals for _ in range(80)]
    for name in intervals[0]:
        value = truth[name]
        covered = sum(low <= value <= high for low, high in (each[name] for each in intervals))
        assert covered >= 0.93 * 80, (name, covered)


def test_intervals_of_a_class_are_those_of_its_groups(make_predictions: MakePredictions) -> None:
    logits, labels = make_predictions(120, 3)
    scores = score_logits(logits, labels)
    names = ("a", "b", "c")
    groups = [f"{number // 4}" for number in range(120)]
    alone, grouped = (
        measure(scores, None, names).per_class,
        measure(scores, groups, names).per_class,
    )
    clusters = np.arange(120) // 4
    for index, (row, wider) in enumerate(zip(alone, grouped, strict=True)):
        chosen = labels == index
        expected = compute_clustered_interval(scores.correct[chosen], clusters[chosen])
        assert wider.recall_interval == pytest.approx(expected)
        guessed = scores.predicted == index
        expected = compute_clustered_interval(scores.correct[guessed], clusters[guessed])
        assert wider.precision_interval == pytest.approx(expected)
        assert np.ptp(wider.recall_interval) > np.ptp(row.recall_interval)
        assert (wider.recall, wider.support) == (row.recall, row.support)
