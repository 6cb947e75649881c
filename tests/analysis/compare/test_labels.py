"""Models of several labels an image are compared by mean average precision, image by image."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, ndtri
from scipy.stats import t as student
from sklearn.metrics import average_precision_score, f1_score

import vit
from tests.conftest import Launcher, SaveModel
from tests.evaluation.records import write_evaluation
from vit.analysis.compare.comparison import Pair
from vit.analysis.compare.labels import compare_labels
from vit.bundle import Bundle, load_bundle
from vit.evaluation.label_metrics import LabelScores, leave_out_parts
from vit.evaluation.label_result import LabelEvaluationResult
from vit.evaluation.predictions import load_label_predictions
from vit.evaluation.significance import compare_models

NAMES = ("ant", "=bee", "cow")
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
MARKS = RNG.random((60, 3)) < (0.2, 0.5, 0.7)


def draw(
    rng: np.random.Generator, num_groups: int, group_size: int, gain: float
) -> tuple[LabelScores, LabelScores]:
    """Scores of two models on images of five labels, of which groups are alike; the second one
    sees `gain` more of what makes a label."""
    share = 0.6 if group_size > 1 else 0.0
    frequencies = np.array([0.1, 0.2, 0.3, 0.4, 0.5])

    def mix() -> np.ndarray:
        of_groups = np.repeat(rng.standard_normal((num_groups, 5)), group_size, axis=0)
        own = rng.standard_normal((num_groups * group_size, 5))
        return np.asarray(np.sqrt(share) * of_groups + np.sqrt(1 - share) * own)

    cause = mix()
    labels = cause > ndtri(1 - frequencies)
    noise = mix() + ndtri(frequencies)
    a, b = (expit(1.5 * (seen * cause + noise + mix())) for seen in (1.2, 1.2 + gain))
    return tuple(LabelScores(labels, values, np.zeros(len(labels))) for values in (a, b))  # type: ignore[return-value]


def measure(scores: LabelScores) -> dict[str, float]:
    """Compute the metrics by scikit-learn."""
    return {
        "map": float(average_precision_score(scores.labels, scores.probabilities)),
        "macro_f1": float(f1_score(scores.labels, scores.predicted, average="macro")),
        "micro_f1": float(f1_score(scores.labels, scores.predicted, average="micro")),
        "exact_match": float(scores.correct.mean()),
    }


@pytest.mark.parametrize("group_size", [1, 4])
def test_the_interval_is_that_of_a_jackknife_over_scikit_learns_metrics(group_size: int) -> None:
    a, b = draw(np.random.default_rng(3), 80 // group_size, group_size, 0.5)
    clusters = np.repeat(np.arange(80 // group_size), group_size)
    (p_value, interval, _), metrics = compare_labels([a], [b], clusters)
    assert interval == metrics[0].interval
    changes = b.correct.astype(float) - a.correct
    assert metrics[-1].interval == compare_models(changes, clusters)[1]
    parts = leave_out_parts(clusters).astype(bool)
    for metric in metrics:
        values = [measure(each)[metric.metric] for each in (a, b)]
        assert (metric.value_a, metric.value_b) == pytest.approx(values, abs=1e-12)
    left_out = [[measure(each.subset(part)) for part in parts] for each in (a, b)]
    for metric in metrics[:3]:
        name = metric.metric
        left = np.array([of_b[name] - of_a[name] for of_a, of_b in zip(*left_out, strict=True)])
        count = len(left)
        counts = np.minimum(a.labels.sum(axis=0), (~a.labels).sum(axis=0))
        variance = (count - 1) ** 2 / count * left.var(ddof=1) + (1 / counts).mean() ** 2 / 25
        error = np.sqrt(variance)
        expected = metric.value_b - metric.value_a + student.ppf([0.025, 0.975], count - 1) * error
        assert metric.interval == pytest.approx(tuple(expected), rel=1e-9)
        if name == "map":
            difference = abs(metric.value_b - metric.value_a)
            assert p_value == pytest.approx(2 * student.sf(difference / error, count - 1), rel=1e-9)


@pytest.mark.extended
@pytest.mark.parametrize(("num_groups", "group_size"), [(300, 1), (60, 5)])
def test_intervals_of_differences_cover_93_to_97_percent(num_groups: int, group_size: int) -> None:
    """Of 400 draws at 95 %, 93 to 97.5 % are what chance gives in 19 of 20 repetitions."""
    large_a, large_b = draw(np.random.default_rng(99), 100_000 // group_size, group_size, 0.3)
    truth_a, truth_b = measure(large_a), measure(large_b)
    clusters = np.repeat(np.arange(num_groups), group_size)
    covered = dict.fromkeys(truth_a, 0)
    num_significant = 0
    for seed in range(400):
        a, b = draw(np.random.default_rng(seed), num_groups, group_size, 0.3)
        for metric in compare_labels([a], [b], clusters)[1]:
            low, high = metric.interval
            truth = truth_b[metric.metric] - truth_a[metric.metric]
            covered[metric.metric] += low <= truth <= high
        a, b = draw(np.random.default_rng(seed), num_groups, group_size, 0.0)
        num_significant += compare_labels([a], [b], clusters)[0][0] < 0.05
    assert all(0.93 <= count / 400 <= 0.98 for count in covered.values()), covered
    assert num_significant <= 30


def test_seeds_widen_the_interval_and_equal_models_do_not_differ() -> None:
    rng = np.random.default_rng(0)
    a, b = draw(rng, 200, 1, 0.8)
    clusters = np.arange(200)
    (alone, interval, _), _ = compare_labels([a], [b], clusters)
    assert alone < 0.01
    shaken = [
        [
            replace(each, probabilities=np.clip(each.probabilities + shift, 0, 1) ** power)
            for shift, power in ((rng.normal(0, 0.2, (200, 5)), 1.0) for _ in range(2))
        ]
        for each in (a, b)
    ]
    (_, wide, _), metrics = compare_labels(shaken[0], shaken[1], clusters)
    assert np.ptp(wide) > np.ptp(interval)
    means = [np.mean([measure(each)["map"] for each in recipe]) for recipe in shaken]
    assert (metrics[0].value_a, metrics[0].value_b) == pytest.approx(means)
    (p_value, (low, high), detectable), _ = compare_labels([a], [a], clusters)
    assert p_value == 1
    assert -0.02 < low < 0 < high < 0.02
    assert 0 < detectable < 0.02
    # a single group tells nothing
    assert compare_labels([a], [b], np.zeros(200, int))[0] == (1.0, (-1.0, 1.0), 1.0)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("models")
    point = {"rule": "f1", "thresholds": {"ant": 0.3, "=bee": 0.6}, "num_images": 9}
    bundles = []
    for depth in (1, 2):
        path = save_model(
            folder / f"{depth}.safetensors",
            class_names=NAMES,
            data={"task": "multilabel"},
            depth=depth,
        )
        bundle = load_bundle(path)
        if depth == 2:
            bundle = replace(bundle, metadata={**bundle.metadata, "operating_point": point})
        bundles.append(bundle)
    return bundles


@pytest.fixture(scope="module")
def results(bundles: list[Bundle]) -> list[LabelEvaluationResult]:
    return [vit.evaluate(each, dataset=(PIXELS, MARKS)) for each in bundles]  # type: ignore[misc]


def test_files_and_results_give_the_same_comparison(
    results: list[LabelEvaluationResult], tmp_path: Path, cli: Launcher
) -> None:
    for name, result in zip("ab", results, strict=True):
        result.save(tmp_path / name)
        columns, scores = load_label_predictions(tmp_path / name / "predictions.csv", NAMES)
        np.testing.assert_array_equal(scores.probabilities, result.scores.probabilities)
        np.testing.assert_array_equal(scores.predicted, result.scores.predicted)
        np.testing.assert_array_equal(scores.labels, MARKS)
        assert columns["path"] == list(result.images.ids)
    # lines in another order are the same images
    lines = (tmp_path / "b" / "predictions.csv").read_text().splitlines()
    (tmp_path / "b" / "predictions.csv").write_text("\n".join([lines[0], *lines[:0:-1]]))
    (from_files,) = vit.compare([tmp_path / "a", tmp_path / "b"]).pairs
    (pair,) = vit.compare(results).pairs
    assert isinstance(pair, Pair)
    assert replace(from_files, a=pair.a, b=pair.b) == pair
    first, second = (measure(result.scores) for result in results)
    assert pair.difference == pytest.approx(second["map"] - first["map"], abs=1e-12)
    assert pair.test == "paired jackknife"
    assert pair.recall_changes == []
    for row in pair.label_changes:
        place = NAMES.index(row.name)
        values = [
            average_precision_score(MARKS[:, place], result.scores.probabilities[:, place])
            for result in results
        ]
        assert (row.average_precision_a, row.average_precision_b) == pytest.approx(values)
        assert row.support == MARKS[:, place].sum()
    correct = [result.scores.correct for result in results]
    assert len(pair.only_a) == (correct[0] & ~correct[1]).sum()

    folders = [tmp_path / "a", tmp_path / "b"]
    text = cli.succeed("compare", *folders, "--output", tmp_path / "comparison").text
    assert "b against a: mAP " in text
    for part in ("macro F1 ", "exact match ", "ant: average precision ", "has all labels right"):
        assert part in text
    saved = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert saved["groups"][0]["map"] == [pytest.approx(first["map"])]
    assert [each["metric"] for each in saved["pairs"][0]["metrics"]] == list(first)


def test_what_cannot_be_compared_is_refused_in_a_sentence(
    results: list[LabelEvaluationResult], bundles: list[Bundle], tmp_path: Path
) -> None:
    results[0].save(tmp_path / "labels")
    classes = write_evaluation(tmp_path, "classes", np.zeros(60, int))
    for pair in ([tmp_path / "labels", classes], [classes, tmp_path / "labels"]):
        with pytest.raises(
            ValueError, match="labels is of several labels an image and classes of one class an"
        ):
            vit.compare(pair)
    for pixels, marks in ((PIXELS, ~MARKS), (255 - PIXELS, MARKS)):
        other = vit.evaluate(bundles[1], dataset=(pixels, marks))
        with pytest.raises(ValueError, match="were evaluated on different images or labels"):
            vit.compare([tmp_path / "labels", other])
    shutil.copytree(tmp_path / "labels", tmp_path / "wrong")
    path = tmp_path / "wrong" / "predictions.csv"
    lines = path.read_text().splitlines()
    for wrong, message in (
        (["path,labels", *lines[1:]], "line 1 is not path,labels,predicted,loss"),
        ([lines[0], "only,three,fields"], "line 2 has 3 fields instead of 8"),
        ([lines[0], lines[1] + "x"], "line 2: a probability is not a number"),
        ([lines[0], lines[1].replace("cow", "cat")], "cat is no label"),
        (lines[:-3], "57 predictions of 60 images"),
    ):
        path.write_text("\n".join(wrong))
        with pytest.raises(ValueError, match=message):
            vit.compare([tmp_path / "labels", tmp_path / "wrong"])
