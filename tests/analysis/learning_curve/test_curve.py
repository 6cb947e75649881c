"""The learning curve of a probe: measured on images that it was not fitted on, its forecast holds for
twice as many, and it says so where it can't tell."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from vit.analysis.learning_curve import curve as curve_module
from vit.analysis.learning_curve.curve import (
    LEARNING_CURVE_FILE,
    LearningCurve,
    _fit_power_law,
    load_learning_curve,
    measure_learning_curve,
)
from vit.training.linear_probe import LinearProbe, fit_path

READOUT = (1, "avg")
STRENGTH = 0.01


def measure(
    values: np.ndarray,
    labels: np.ndarray,
    groups: list[str] | None = None,
) -> LearningCurve:
    num_classes = labels.max() + 1
    empty = np.zeros((num_classes, values.shape[1]))
    return measure_learning_curve(
        {READOUT: torch.from_numpy(values).float()},
        labels,
        LinearProbe(READOUT, STRENGTH, empty, empty[:, 0], None),
        class_names=[f"class {label}" for label in range(num_classes)],
        groups=groups,
    )


class GaussianClasses:
    """Classes of features around a centre each, drawn anew with each seed."""

    def __init__(self, seed: int, *, num_classes: int = 4, separation: float = 0.25) -> None:
        self.rng = np.random.default_rng(seed)
        self.centres = separation * self.rng.normal(size=(num_classes, 64))

    def draw(self, images_a_class: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(len(self.centres)), images_a_class)
        return self.centres[labels] + self.rng.normal(size=(len(labels), 64)), labels


Images = tuple[np.ndarray, np.ndarray]


def measure_top1(train: Images, test: Images) -> float:
    ((weight, bias, _),) = fit_path(*train, [STRENGTH], balanced=False)
    values, labels = test
    return float(((values @ weight.T + bias).argmax(axis=1) == labels).mean())


def test_the_forecast_holds_what_twice_as_many_images_give() -> None:
    num_draws = 12
    num_covered = 0
    gains = []
    expected_gains = []
    for seed in range(num_draws):
        classes = GaussianClasses(seed)
        values, labels = classes.draw(25)
        more_values, more_labels = classes.draw(25)
        test = classes.draw(500)
        forecast = measure(values, labels).forecast
        assert forecast is not None
        assert forecast.num_images == 200

        all_labels = np.concatenate([labels, more_labels])
        twice = measure_top1((np.concatenate([values, more_values]), all_labels), test)
        num_covered += forecast.interval[0] <= twice <= forecast.interval[1]
        gains.append(twice - measure_top1((values, labels), test))
        expected_gains.append(forecast.top1 - forecast.top1_now)
    assert num_covered >= 0.8 * num_draws
    # there is something to be foreseen, and it is
    assert np.mean(gains) > 0.03
    assert abs(np.mean(expected_gains) - np.mean(gains)) < 0.5 * np.mean(gains)


def test_the_power_law_is_found_again() -> None:
    sizes = np.array([40.0, 80, 160, 240, 320, 400])
    laws = [(0.05, 1.2, 0.5), (0.0, 2.0, 0.7), (0.2, 0.0, 1.0)]
    errors = np.array([a + b * sizes**-c for a, b, c in laws])
    a, b, c = _fit_power_law(sizes, errors, np.ones(6))
    np.testing.assert_allclose(a + b * 800.0**-c, [a + b * 800**-c for a, b, c in laws], atol=1e-3)
    # what falls faster than to 0 stays at 0, what rises is level
    a, b, _ = _fit_power_law(sizes, np.array([0.5 - sizes / 1000, sizes / 1000]), np.ones(6))
    assert (a >= 0).all()
    assert b[1] == 0


def test_bursts_overstate_unless_they_are_groups() -> None:
    """Features that know the burst, of which the label is drawn: more bursts bring nothing."""
    rng = np.random.default_rng(0)
    bursts = np.repeat(np.arange(40), 4)
    labels = np.repeat(rng.permutation(40) % 2, 4)
    values = rng.normal(size=(40, 32))[bursts] + 0.1 * rng.normal(size=(160, 32))
    naive = measure(values, labels)
    grouped = measure(values, labels, [f"burst{burst}" for burst in bursts])
    assert naive.points[-1].interval[0] > 0.6
    assert all(point.interval[0] < 0.5 < point.interval[1] for point in grouped.points)
    assert grouped.num_groups == 40
    # whole bursts
    assert [point.num_images for point in grouped.points] == sorted(
        point.num_images for point in grouped.points
    )
    assert not grouped.gains


def test_each_point_has_its_share_of_every_class() -> None:
    values, labels = GaussianClasses(0).draw(50)
    curve = measure(values, labels)
    assert [point.num_images for point in curve.points] == [16, 32, 64, 80, 96, 128, 160]
    assert curve.num_folds == 5
    for point in curve.points:
        assert point.interval[0] < point.top1 < point.interval[1]


def test_classes_that_need_more_images_are_named() -> None:
    """Two classes lie in 60 places each, of which half of the images show few; the third in one."""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 150)
    places = 60 * labels + np.where(labels == 2, 0, rng.integers(0, 60, 450))
    values = rng.normal(size=(121, 128))[places] + 0.3 * rng.normal(size=(450, 128))
    curve = measure(values, labels)
    assert {gain.name for gain in curve.gains} == {"class 0", "class 1"}
    assert all(gain.difference > 0.03 for gain in curve.gains)
    assert "would gain most: " in curve.describe()


def test_of_noise_no_class_gains() -> None:
    num_named = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        labels = np.repeat(np.arange(4), 40)
        num_named += bool(measure(rng.normal(size=(160, 8)), labels).gains)
    assert num_named <= 2


def test_where_it_cannot_tell_it_says_so() -> None:
    values, labels = GaussianClasses(0).draw(8)
    few = measure(values, labels)
    assert few.forecast is None
    assert "32 photos in 4 classes are too few" in few.describe()
    assert len(few.points) == 7

    alone = measure(values[::8], labels[::8])
    assert alone.points == []
    assert "too few photos to leave any out" in alone.describe()
    of_one_group = measure(values, labels, [str(label) for label in labels])
    assert "every class has too few groups to leave any out" in of_one_group.describe()

    easy, labels = GaussianClasses(0, separation=20).draw(40)
    assert "0 errors in 160 photos are too few" in measure(easy, labels).describe()


def test_what_would_take_long_is_measured_in_part_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, labels = GaussianClasses(0).draw(100)
    size = 0.8 * values.size * 4
    monkeypatch.setattr(curve_module, "_MAX_VALUES", 8 * size)
    fewer_folds = measure(values, labels)
    assert fewer_folds.note == "only 2 of 5 folds were left out, to save time"
    assert fewer_folds.forecast is not None
    monkeypatch.setattr(curve_module, "_MAX_VALUES", 1.3 * size)
    fewer_points = measure(values, labels)
    assert [point.fraction for point in fewer_points.points] == [0.1, 0.2, 0.4, 0.5]
    assert "at most 50 % of the other photos" in (fewer_points.note or "")
    assert not fewer_points.gains
    monkeypatch.setattr(curve_module, "_MAX_VALUES", size)
    nothing = measure(values, labels)
    assert nothing.points == []
    assert "take too long" in nothing.describe()


def test_the_file_is_the_same_each_time_and_is_read_again(tmp_path: Path) -> None:
    assert load_learning_curve(tmp_path) is None
    values, labels = GaussianClasses(0).draw(40)
    contents = []
    for _ in range(2):
        measure(values, labels).save(tmp_path)
        contents.append((tmp_path / LEARNING_CURVE_FILE).read_bytes())
    assert contents[0] == contents[1]
    curve = load_learning_curve(tmp_path)
    assert curve == measure(values, labels)
    assert curve is not None
    assert "With twice as many photos (320) about" in curve.describe()

    content = json.loads(contents[0])
    content["points"][0]["top1"] = float("nan")
    (tmp_path / LEARNING_CURVE_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"learning_curve\.json: points\.0\.top1"):
        load_learning_curve(tmp_path)


def test_the_curve_of_labels_is_of_their_average_precision() -> None:
    """Its forecast holds what twice as many images give, and its last point is scikit-learn's."""
    num_covered = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        directions = 0.25 * rng.normal(size=(64, 5))
        values = rng.normal(size=(1400, 64))
        logits = values @ directions - 1 + rng.normal(size=(1400, 5))
        marks = logits > 0
        curve = measure_learning_curve(
            {READOUT: torch.from_numpy(values[:200]).float()},
            marks[:200],
            LinearProbe(READOUT, STRENGTH, np.zeros((5, 64)), np.zeros(5), None, 0.5),
            class_names=list("abcde"),
        )
        assert curve.measure == "map"
        assert [point.top1 for point in curve.points[::3]] == sorted(
            point.top1 for point in curve.points[::3]
        )
        ((weight, bias, _),) = fit_path(values[:400], marks[:400], [STRENGTH], balanced=False)
        answers = values[400:] @ weight.T + bias
        twice = average_precision_score(marks[400:], answers, average="macro")
        assert curve.forecast is not None
        num_covered += curve.forecast.interval[0] <= twice <= curve.forecast.interval[1]
    assert num_covered >= 3
    assert "as mean average precision" in curve.describe()
