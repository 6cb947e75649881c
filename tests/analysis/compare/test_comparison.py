"""A comparison is paired, says how sure it is, and refuses what can't be compared."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.evaluation.conftest import MakeEvaluation
from vit.analysis.compare.comparison import (
    compare,
    compare_groups,
    group_seeds,
    load_evaluations,
)
from vit.evaluation.predictions import load_predictions
from vit.evaluation.significance import (
    compare_models,
    compare_seeds,
    compute_mcnemar,
    compute_paired_interval,
    correct_p_values,
    count_changes,
    find_detectable,
)

RANKS = np.array([0, 0, 0, 1, 2, 0, 1, 0] * 50)


def flip(ranks: np.ndarray, *where: int) -> np.ndarray:
    """Hits become misses and misses hits at these places."""
    changed = ranks.copy()
    changed[list(where)] = (changed[list(where)] == 0).astype(int)
    return changed


def test_mcnemar_of_cases_worked_by_hand() -> None:
    # 2 (C(10,0) + C(10,1)) / 2^10
    assert compute_mcnemar(1, 9) == pytest.approx(22 / 1024)
    assert compute_mcnemar(9, 1) == compute_mcnemar(1, 9)
    assert compute_mcnemar(0, 0) == 1.0
    assert compute_mcnemar(7, 7) == 1.0


def test_mcnemar_is_the_binomial_test() -> None:
    for only_a, only_b in ((3, 12), (600, 500), (60_000, 59_000)):
        expected = binomtest(only_a, only_a + only_b).pvalue
        assert compute_mcnemar(only_a, only_b) == pytest.approx(expected, rel=1e-6)


def test_the_interval_holds_0_exactly_where_mcnemar_finds_nothing() -> None:
    for only_a, only_b in product(range(40), range(40)):
        low, high = compute_paired_interval(only_a, only_b, 1000)
        is_significant = compute_mcnemar(only_a, only_b) < 0.05
        assert is_significant == (low > 0 or high < 0), (only_a, only_b)


@pytest.mark.parametrize(("num_a", "num_b"), [(2, 2), (3, 3), (2, 3), (1, 3), (5, 5)])
@pytest.mark.parametrize("seed_effect", [0.0, 0.1])
def test_two_recipes_that_are_alike_seldom_differ_significantly(
    num_a: int, num_b: int, seed_effect: float
) -> None:
    """Of 400 comparisons at most 6 % would be 24; as many as 35 come by chance once in 500."""
    rng = np.random.default_rng(0)

    def train(num_seeds: int, difficulty: np.ndarray) -> np.ndarray:
        """Seeds of a recipe with a taste of its own for images."""
        taste = rng.normal(0, 0.5, len(difficulty))
        seeds = rng.normal(0, seed_effect, (num_seeds, 1))
        noise = rng.normal(0, 1, (num_seeds, len(difficulty)))
        return (difficulty + taste + seeds + noise > 0).astype(float)

    num_significant = 0
    for _ in range(400):
        difficulty = rng.normal(1.5, 1, 300)
        p_value, (low, high), _ = compare_seeds(train(num_a, difficulty), train(num_b, difficulty))
        assert (p_value < 0.05) == (low > 0 or high < 0)
        num_significant += p_value < 0.05
    assert num_significant <= 24


def test_seeds_tell_a_large_difference() -> None:
    rng = np.random.default_rng(0)
    worse, better = ((rng.random((3, 1000)) < accuracy).astype(float) for accuracy in (0.8, 0.9))
    p_value, (low, high), detectable = compare_seeds(worse, better)
    assert p_value < 0.01
    assert 0 < detectable < 0.1
    assert low < 0.1 < high


def test_seeds_that_agree_on_every_image_are_compared_as_single_models() -> None:
    right = np.ones((2, 10))
    assert compare_seeds(1 - right, right) == (
        compute_mcnemar(0, 10),
        compute_paired_interval(0, 10, 10),
        find_detectable(10, 10, 0.05),
    )
    assert compare_seeds(right, right)[0] == 1.0
    # of one image nothing follows
    p_value, (low, high), _ = compare_seeds(1 - right[:, :1], right[:, :1])
    assert p_value == 1.0
    assert low <= 0 <= high
    assert compare_seeds(np.array([[0.0], [1.0]]), right[:, :1])[0] > 0.05


def test_no_interval_of_a_difference_goes_beyond_1() -> None:
    p_value, interval, _ = compare_seeds(np.array([[0.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert p_value > 0.05
    assert interval == (-1.0, 1.0)


def test_holm_of_cases_worked_by_hand() -> None:
    # times 4, 3, 2 and 1, and never below a smaller one
    assert correct_p_values([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert correct_p_values([0.2, 0.6]) == pytest.approx([0.4, 0.6])
    assert correct_p_values([0.7, 0.9]) == [1.0, 1.0]
    assert correct_p_values([0.03]) == [0.03]


@pytest.mark.parametrize("num_pairs", [1, 4])
def test_of_equal_models_one_in_twenty_comparisons_differs(num_pairs: int) -> None:
    """Of 600 comparisons of all pairs at most 5 % would be 30; 45 come by chance once in 200."""
    rng = np.random.default_rng(0)
    num_significant = num_uncorrected = 0
    for _ in range(600):
        hits = rng.random((num_pairs + 1, 300)) < rng.beta(4, 1, 300)
        p_values = [
            compute_mcnemar(np.sum(hits[0] > other), np.sum(other > hits[0])) for other in hits[1:]
        ]
        num_significant += min(correct_p_values(p_values)) < 0.05
        num_uncorrected += min(p_values) < 0.05
    assert num_significant <= 45
    assert num_pairs == 1 or num_uncorrected > 60


@pytest.mark.parametrize(
    ("changed", "significance"), [(40, 0.05), (200, 0.05), (40, 0.01), (3, 0.05)]
)
def test_the_smallest_difference_is_found_in_80_of_100(changed: int, significance: float) -> None:
    detectable = find_detectable(changed, 1000, significance)
    # all of six images are the fewest that decide
    changed = max(changed, 6)
    only_b = (changed / 1000 + detectable) / 2 / (changed / 1000)
    drawn = np.random.default_rng(0).binomial(changed, only_b, 4000)
    found = [compute_mcnemar(changed - each, each) < significance for each in drawn.tolist()]
    assert np.mean(found) == pytest.approx(0.8, abs=0.02)


def test_changes_in_groups_count_as_fewer() -> None:
    """Each of 20 images eight times over is as good as 20 images."""
    changes = np.array([1.0] * 9 + [-1.0] + [0.0] * 10)
    clusters = np.repeat(np.arange(20), 8)
    copied = count_changes(np.repeat(changes, 8), clusters)
    assert count_changes(changes, np.arange(20)) == (1, 9, 20)
    # 20/19 of an unbiased variance, and Student's t of 19 degrees instead of 159
    factor = 20 / 19 * (2.0930 / 1.9750) ** 2
    assert copied == pytest.approx((1 / factor, 9 / factor, 20 / factor), rel=1e-3)
    # between whole numbers
    assert compute_mcnemar(2, 9) > compute_mcnemar(1.5, 9) > compute_mcnemar(1, 9)


@pytest.mark.parametrize(("groups", "size", "correlation"), [(10, 10, 0.6), (30, 5, 0.5)])
def test_equal_models_seldom_differ_on_groups(groups: int, size: int, correlation: float) -> None:
    """The shares of images on which one of two models is right vary between the groups."""
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(groups), size)
    concentration = np.array([0.8, 0.1, 0.1]) * (1 - correlation) / correlation
    num_significant = num_covered = num_naive = 0
    for _ in range(500):
        ends = rng.dirichlet(concentration, groups).cumsum(axis=1)[clusters, :2]
        outcome = (rng.random(len(clusters))[:, None] > ends).sum(axis=1)
        changes = np.array([0.0, -1.0, 1.0])[outcome]
        p_value, (low, high), _ = compare_models(changes, clusters)
        num_significant += p_value < 0.05
        num_covered += low <= 0 <= high
        num_naive += compare_models(changes, np.arange(len(clusters)))[0] < 0.05
    assert num_significant <= 25
    assert num_covered >= 475
    assert num_naive > 50


def test_groups_are_read_from_predictions(make_evaluation: MakeEvaluation) -> None:
    better = flip(RANKS, *np.flatnonzero(RANKS[:40]).tolist())
    groups = [f"burst{number // 40}" for number in range(len(RANKS))]
    directories = [make_evaluation(name, ranks) for name, ranks in (("a", RANKS), ("b", better))]
    (alone,) = compare(directories).pairs
    for directory in directories:
        path = directory / "predictions.csv"
        header, *lines = path.read_text().splitlines()
        rows = [f"{line},{group}" for line, group in zip(lines, groups, strict=True)]
        path.write_text("\n".join([f"{header},group", *rows]))
        assert load_predictions(path)["group"] == groups
    (pair,) = compare(directories).pairs
    # all 15 changes are in one of ten bursts
    assert alone.is_significant
    assert not pair.is_significant
    assert pair.difference == alone.difference == 15 / 400
    assert pair.detectable > alone.detectable


def test_p_values_are_corrected_for_the_number_of_models(make_evaluation: MakeEvaluation) -> None:
    first = make_evaluation("a", RANKS)
    wrong = np.flatnonzero(RANKS).tolist()
    others = [make_evaluation(f"b{number}", flip(RANKS, *wrong[:number])) for number in (6, 12, 5)]
    six, twelve, five = compare([first, *others]).pairs
    # 2 / 2^6 alone is 0.03
    (alone,) = compare([first, others[0]]).pairs
    assert alone.is_significant
    assert (six.p_value, six.corrected_p_value) == pytest.approx((2 / 2**6, 4 / 2**6))
    assert not six.is_significant
    assert six.interval[0] <= 0
    assert twelve.is_significant
    assert twelve.corrected_p_value == pytest.approx(3 * 2 / 2**12)
    assert five.corrected_p_value == pytest.approx(2 / 2**5)
    assert six.detectable > alone.detectable


def test_difference_is_of_the_same_images(make_evaluation: MakeEvaluation) -> None:
    a = make_evaluation("a", RANKS)
    b = make_evaluation("b", flip(RANKS, 0, 3, 4, 6, 11))  # 0 is lost; 3, 4, 6 and 11 are won
    evaluations = load_evaluations([a, b])
    pair = compare_groups(*group_seeds(evaluations))
    assert pair.difference == pytest.approx(3 / 400)
    assert pair.only_a == ["test/0000.png"]
    assert pair.only_b == [f"test/{index:04d}.png" for index in (3, 4, 6, 11)]
    assert pair.p_value == pytest.approx(compute_mcnemar(1, 4))
    low, high = pair.interval
    assert low < pair.difference < high
    # the images on which both agree cancel: far narrower than two separate intervals. One image
    # more is counted on each side
    assert high - low == pytest.approx(
        2 * 1.96 * np.sqrt((7 / 402 - (3 / 402) ** 2) / 402), rel=0.01
    )


def test_equal_predictions_don_t_differ(make_evaluation: MakeEvaluation) -> None:
    pair = compare_groups(
        *group_seeds(load_evaluations([make_evaluation("a", RANKS), make_evaluation("b", RANKS)]))
    )
    assert (pair.difference, pair.p_value, pair.is_significant) == (0.0, 1.0, False)
    # 1.96 √2 / 402: other images might show one
    assert pair.interval == pytest.approx((-0.0069, 0.0069), abs=1e-4)
    assert pair.recall_changes == []


def test_classes_that_moved_most_come_first(make_evaluation: MakeEvaluation) -> None:
    # image i is of class i % 4
    evaluations = load_evaluations(
        [make_evaluation("a", RANKS), make_evaluation("b", flip(RANKS, 3, 11, 19, 4))]
    )
    moved = compare_groups(*group_seeds(evaluations)).recall_changes
    assert [move.name for move in moved] == ["class 3", "class 0"]
    assert moved[0].recall_b - moved[0].recall_a == pytest.approx(3 / 100)
    assert moved[0].support == 100


def test_seeds_of_one_recipe_are_grouped_as_mean_and_deviation(
    make_evaluation: MakeEvaluation,
) -> None:
    seeds = [
        make_evaluation(f"seed{seed}", flip(RANKS, *range(0, 10 * seed, 8)), recipe="r", seed=seed)
        for seed in (0, 1, 2)
    ]
    other = make_evaluation("other", flip(RANKS, 3, 4), recipe="s", seed=0)
    first, second = group_seeds(load_evaluations([*seeds, other]))
    assert first.name == "seed0 + seed1 + seed2"
    tops = [1 - np.mean(flip(RANKS, *range(0, 10 * seed, 8)) > 0) for seed in (0, 1, 2)]
    assert first.values == pytest.approx(tops)
    assert first.deviation == pytest.approx(np.std(tops, ddof=1))
    assert second.deviation is None
    pair = compare_groups(first, second)
    assert pair.difference == pytest.approx(second.values[0] - np.mean(tops))
    assert pair.test == "Welch's t-test over 3 and 1 seeds"


@pytest.mark.parametrize("changed", [{"training_fingerprint": "9" * 64}, {"tta": "hflip"}])
def test_other_training_images_or_conditions_are_no_seed(
    make_evaluation: MakeEvaluation, changed: dict[str, str]
) -> None:
    first = make_evaluation("first", RANKS, recipe="r", seed=0)
    second = make_evaluation("second", flip(RANKS, 3), recipe="r", seed=1, **changed)
    groups = group_seeds(load_evaluations([first, second]))
    assert [group.name for group in groups] == ["first", "second"]


def test_one_model_file_is_named_as_such(make_evaluation: MakeEvaluation) -> None:
    first = make_evaluation("first", RANKS, model_sha256="1" * 64)
    second = make_evaluation("second", RANKS, model_sha256="1" * 64, tta="hflip")
    other = make_evaluation("other", RANKS)
    assert compare([first, second, other]).notes == [
        "first and second are evaluations of one model file"
    ]


def test_one_recipe_with_one_seed_twice_is_not_two_seeds(make_evaluation: MakeEvaluation) -> None:
    best = make_evaluation("best", RANKS, recipe="r", seed=0)
    last = make_evaluation("last", flip(RANKS, 3), recipe="r", seed=0)
    assert [group.name for group in group_seeds(load_evaluations([best, last]))] == ["best", "last"]


def test_other_images_are_refused(make_evaluation: MakeEvaluation) -> None:
    a, b = make_evaluation("a", RANKS), make_evaluation("b", RANKS, fingerprint="f" * 64)
    with pytest.raises(ValueError, match="a and b were evaluated on different images"):
        load_evaluations([a, b])


def test_another_order_of_the_same_images_is_aligned(make_evaluation: MakeEvaluation) -> None:
    a = make_evaluation("a", RANKS)
    b = make_evaluation("b", flip(RANKS, 0), reverse=True)
    assert compare_groups(*group_seeds(load_evaluations([a, b]))).only_a == ["test/0000.png"]


def test_what_is_no_evaluation_is_named(make_evaluation: MakeEvaluation, tmp_path: Path) -> None:
    a = make_evaluation("a", RANKS)
    with pytest.raises(FileNotFoundError, match=r"has no evaluation\.json"):
        load_evaluations([a, tmp_path])
    with pytest.raises(ValueError, match="two or more"):
        load_evaluations([a])
    lines = (a / "predictions.csv").read_text().splitlines()
    (a / "predictions.csv").write_text("\n".join(lines[:-3]))
    with pytest.raises(ValueError, match="397 predictions of 400 images"):
        load_evaluations([a, a])


def test_the_comparison_is_saved_whole(make_evaluation: MakeEvaluation, tmp_path: Path) -> None:
    comparison = compare([make_evaluation("a", RANKS), make_evaluation("b", flip(RANKS, 0, 3))])
    comparison.save(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert saved["pairs"][0]["only_b"] == ["test/0003.png"]
    assert [group["name"] for group in saved["groups"]] == ["a", "b"]
