"""The learning curve of a probe: measured on images that it was not fitted on, its forecast holds for
twice as many, and it says so where it can't tell."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vit.analysis.learning_curve import curve as curve_module
from vit.analysis.learning_curve.curve import (
    LEARNING_CURVE_FILE,
    LearningCurve,
    forecast_twice,
    load_learning_curve,
    measure_learning_curve,
)
from vit.training.linear_probe import LinearProbe

READOUT = (1, "avg")
STRENGTH = 0.01


def measure(
    values: np.ndarray, labels: np.ndarray, groups: list[str] | None = None
) -> LearningCurve:
    num_classes = labels.shape[1] if labels.ndim == 2 else labels.max() + 1
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


def test_the_forecast_holds_what_twice_as_many_images_give() -> None:
    num_draws = 12
    num_covered = 0
    gains = []
    expected_gains = []
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH))
    for seed in range(num_draws):
        classes = GaussianClasses(seed)
        values, labels = classes.draw(25)
        more_values, more_labels = classes.draw(25)
        test = classes.draw(500)
        forecast = measure(values, labels).forecast
        assert forecast is not None
        assert forecast.num_images == 200

        now = probe.fit(values, labels).score(*test)
        all_values = np.concatenate([values, more_values])
        twice = probe.fit(all_values, np.concatenate([labels, more_labels])).score(*test)
        num_covered += forecast.interval[0] <= twice <= forecast.interval[1]
        gains.append(twice - now)
        expected_gains.append(forecast.top1 - forecast.top1_now)
    assert num_covered >= 0.8 * num_draws
    # there is something to be foreseen, and it is
    assert np.mean(gains) > 0.03
    assert abs(np.mean(expected_gains) - np.mean(gains)) < 0.5 * np.mean(gains)


def test_the_power_law_is_found_again() -> None:
    sizes = np.array([40.0, 80, 160, 240, 320, 400])
    for a, b, c in ((0.05, 1.2, 0.5), (0.0, 2.0, 0.7), (0.2, 0.0, 1.0)):
        scores = np.stack([1 - a - b * sizes**-c] * 5, axis=1)
        forecast = forecast_twice(sizes, scores, num_images=500)
        assert forecast.top1 == pytest.approx(1 - a - b * 1000**-c, abs=3e-3)
    # what rises with more images is level
    rising = np.stack([1 - sizes / 1000] * 5, axis=1)
    forecast = forecast_twice(sizes, rising, num_images=500)
    assert forecast.top1 == pytest.approx(forecast.top1_now, abs=0.02)


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


def test_where_it_cannot_tell_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    values, labels = GaussianClasses(0).draw(8)
    few = measure(values, labels)
    assert few.forecast is None
    assert "32 photos in 4 classes are too few" in few.describe()
    assert few.points

    alone = measure(values[::8], labels[::8])
    assert alone.points == []
    assert "too few photos to leave any out" in alone.describe()
    of_one_group = measure(values, labels, [str(label) for label in labels])
    assert "every class has too few groups to leave any out" in of_one_group.describe()

    easy, labels = GaussianClasses(0, separation=20).draw(40)
    assert "0 errors in 160 photos are too few" in measure(easy, labels).describe()
    monkeypatch.setattr(curve_module, "_MAX_VALUES", 1000)
    nothing = measure(easy, labels)
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
    assert [point.num_images for point in curve.points] == [12, 25, 51, 76, 102, 128]
    assert "With twice as many photos (320) about" in curve.describe()

    content = json.loads(contents[0])
    content["points"][0][1] = float("nan")
    (tmp_path / LEARNING_CURVE_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"learning_curve\.json: points\.0"):
        load_learning_curve(tmp_path)


def test_the_curve_of_labels_is_of_their_average_precision() -> None:
    """Its forecast holds what twice as many images give."""
    num_covered = 0
    probe = make_pipeline(StandardScaler(), OneVsRestClassifier(LogisticRegression(C=STRENGTH)))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        directions = 0.25 * rng.normal(size=(64, 5))
        values = rng.normal(size=(1400, 64))
        marks = values @ directions - 1 + rng.normal(size=(1400, 5)) > 0
        curve = measure(values[:200], marks[:200])
        assert curve.measure == "map"
        answers = probe.fit(values[:400], marks[:400]).predict_proba(values[400:])
        twice = average_precision_score(marks[400:], answers, average="macro")
        assert curve.forecast is not None
        num_covered += curve.forecast.interval[0] <= twice <= curve.forecast.interval[1]
    assert num_covered >= 3
    assert "as mean average precision" in curve.describe()
