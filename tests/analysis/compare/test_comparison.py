"""A comparison is paired, says how sure it is, and refuses what can't be compared."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

import vit
from tests.conftest import SaveModel
from tests.evaluation.conftest import MakeEvaluation
from vit.analysis.compare.comparison import compare, compute_paired_test
from vit.bundle import load_bundle

RANKS = np.array([0, 0, 0, 1, 2, 0, 1, 0] * 50)
# names with everything that separates or quotes something in a table
NAMES = ("ant|bee", "=cow", 'a "quoted" name', "one, two", "ant")
PIXELS = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
MARKS = np.random.default_rng(1).random((60, len(NAMES))) < 0.5


def flip(ranks: np.ndarray, *where: int) -> np.ndarray:
    """Hits become misses and misses hits at these places."""
    changed = ranks.copy()
    changed[list(where)] = (changed[list(where)] == 0).astype(int)
    return changed


def count_changes(only_a: int, only_b: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Changes of images of which each is its own group."""
    changes = np.zeros(count, int)
    changes[:only_a] = -1
    changes[only_a : only_a + only_b] = 1
    return changes, np.arange(count)


def test_the_p_value_is_mcnemars() -> None:
    # 2 (C(10,0) + C(10,1)) / 2^10
    assert compute_paired_test(*count_changes(1, 9, 50))[0] == pytest.approx(22 / 1024)
    assert compute_paired_test(*count_changes(0, 0, 50))[0] == 1
    for only_a, only_b in ((3, 12), (12, 3), (7, 7), (60, 50)):
        expected = binomtest(only_a, only_a + only_b).pvalue
        found, _ = compute_paired_test(*count_changes(only_a, only_b, 200))
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_interval_holds_0_where_nothing_is_significant_and_the_difference_always() -> None:
    for only_a, only_b in product(range(0, 12, 2), range(12)):
        p_value, (low, high) = compute_paired_test(*count_changes(only_a, only_b, 40))
        assert -1 <= low <= (only_b - only_a) / 40 <= high <= 1
        if p_value >= 0.05:
            assert low <= 0 <= high
    # models that never disagree here would on other images
    _, (low, high) = compute_paired_test(*count_changes(0, 0, 400))
    assert (low, high) == pytest.approx((-0.0069, 0.0069), abs=1e-3)


@pytest.mark.extended
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
        changes = np.array([0, -1, 1])[outcome]
        p_value, (low, high) = compute_paired_test(changes, clusters)
        num_significant += p_value < 0.05
        num_covered += low <= 0 <= high
        only_b, changed = int((changes > 0).sum()), int((changes != 0).sum())
        num_naive += changed > 0 and binomtest(only_b, changed).pvalue < 0.05
    assert num_significant <= 25
    assert num_covered >= 475
    assert num_naive > 50


@pytest.mark.extended
@pytest.mark.parametrize("true_difference", [0.0, 0.1])
def test_intervals_cover_the_true_difference(true_difference: float) -> None:
    """Of 600 draws at 95 %, 93 % is what chance stays above in 99 of 100 repetitions."""
    rng = np.random.default_rng(0)
    num_covered = 0
    for _ in range(600):
        shares = (0.8 - true_difference, 0.1, 0.1 + true_difference)
        changes = rng.choice([0, -1, 1], 200, p=shares)
        _, (low, high) = compute_paired_test(changes, np.arange(200))
        num_covered += low <= true_difference <= high
    assert num_covered >= 558


def test_groups_are_read_from_predictions(make_evaluation: MakeEvaluation) -> None:
    better = flip(RANKS, *np.flatnonzero(RANKS[:40]).tolist())
    groups = [f"burst{number // 40}" for number in range(len(RANKS))]
    alone = compare(make_evaluation("a", RANKS), make_evaluation("b", better))
    directories = [
        make_evaluation(f"{name} grouped", ranks, groups=groups)
        for name, ranks in (("a", RANKS), ("b", better))
    ]
    grouped = compare(*directories)
    # all 15 changes are in one of ten bursts
    assert alone.is_significant
    assert not grouped.is_significant
    assert grouped.difference == alone.difference == 15 / 400


def test_the_same_images_are_compared_in_any_order(make_evaluation: MakeEvaluation) -> None:
    a = make_evaluation("a", RANKS)
    ranks = flip(RANKS, 0, 3, 4, 6, 11)  # 0 is lost; 3, 4, 6 and 11 are won
    b = make_evaluation("b", ranks)
    found = compare(a, b)
    assert found.difference == pytest.approx(3 / 400)
    assert found.only_a == ["test/0000.png"]
    assert found.only_b == [f"test/{index:04d}.png" for index in (3, 4, 6, 11)]
    assert found.p_value == pytest.approx(12 / 2**5)
    reversed_order = compare(a, make_evaluation("c", ranks, reverse=True))
    assert replace(reversed_order, b=str(b)) == found
    with pytest.raises(ValueError, match="from which this is made"):
        found.save(a, overwrite=True)


def test_what_is_no_evaluation_is_named(make_evaluation: MakeEvaluation, tmp_path: Path) -> None:
    a, b = make_evaluation("a", RANKS), make_evaluation("b", RANKS, fingerprint="f" * 64)
    with pytest.raises(ValueError, match="were evaluated on different images"):
        compare(a, b)
    with pytest.raises(FileNotFoundError, match=r"has no evaluation\.json"):
        compare(a, tmp_path)
    predictions = a / "predictions.npz"
    others = make_evaluation("others", RANKS[:100]) / "predictions.npz"
    again = "a has no predictions.npz of 400 images.*evaluate again"
    for replacement, sentence in (
        (others.read_bytes(), again),
        (b"PK", "is damaged"),
        (None, again),
    ):
        predictions.unlink(missing_ok=True)
        if replacement is not None:
            predictions.write_bytes(replacement)
        with pytest.raises(ValueError, match=sentence):
            compare(b, a)
    for content in ("[]", '{"schema_version": 1}', "{"):
        (b / "evaluation.json").write_text(content)
        with pytest.raises(ValueError, match=r"evaluation\.json"):
            compare(b, a)


def test_several_labels_of_any_name_are_right_together(
    save_model: SaveModel, make_evaluation: MakeEvaluation, tmp_path: Path
) -> None:
    path = save_model(
        tmp_path / "model.safetensors", class_names=NAMES, data={"task": "multilabel"}
    )
    bundle = load_bundle(path)
    # different thresholds are different models: some images have all labels right
    bundles = []
    for values in (np.linspace(0.2, 0.8, 5), np.full(5, 0.5)):
        thresholds = dict(zip(NAMES, values.tolist(), strict=True))
        point = {"rule": "f1", "thresholds": thresholds, "num_images": 9}
        bundles.append(replace(bundle, metadata={**bundle.metadata, "operating_point": point}))
    correct = []
    # the labels of 40 images are as the first model predicts, of 30 as the second one does
    predicted = [
        [set(each.labels) for each in vit.predict(bundle, PIXELS).predictions] for bundle in bundles
    ]
    truth = [{NAMES[place] for place in np.flatnonzero(row)} for row in MARKS]
    for place in range(50):
        truth[place] = predicted[place >= 30][place]
    for name, bundle, labels in zip("ab", bundles, predicted, strict=True):
        vit.evaluate(bundle, dataset=(PIXELS, truth), num_examples=0).save(tmp_path / name)
        correct.append(np.array([one == other for one, other in zip(labels, truth, strict=True)]))
    found = vit.compare(tmp_path / "a", tmp_path / "b")
    assert found.difference == pytest.approx(correct[1].mean() - correct[0].mean())
    assert len(found.only_a) == (correct[0] & ~correct[1]).sum() > 10
    assert len(found.only_b) == (correct[1] & ~correct[0]).sum() > 5

    classes = make_evaluation("classes", np.zeros(60, int))
    with pytest.raises(ValueError, match="were evaluated on different images or labels"):
        vit.compare(classes, tmp_path / "a")
