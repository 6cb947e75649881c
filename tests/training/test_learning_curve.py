"""The learning curve of a probe: measured on images that it was not fitted on, its forecast holds for
twice as many, and it says so where it can't tell."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vit.training import learning_curve
from vit.training.learning_curve import LearningCurve, forecast_twice, measure_learning_curve

STRENGTH = 0.01


def measure(
    values: np.ndarray, labels: np.ndarray, groups: list[str] | None = None
) -> LearningCurve:
    return measure_learning_curve(values, labels, strength=STRENGTH, groups=groups)


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
        curve = measure(values, labels)
        forecast = curve.forecast
        assert forecast is not None
        assert forecast.num_images == 200

        now = probe.fit(values, labels).score(*test)
        all_values = np.concatenate([values, more_values])
        twice = probe.fit(all_values, np.concatenate([labels, more_labels])).score(*test)
        num_covered += forecast.interval[0] <= twice <= forecast.interval[1]
        gains.append(twice - now)
        expected_gains.append(forecast.top1 - curve.top1_now)
    assert num_covered >= 0.8 * num_draws
    # there is something to be foreseen, and it is
    assert np.mean(gains) > 0.03
    assert abs(np.mean(expected_gains) - np.mean(gains)) < 0.5 * np.mean(gains)


def test_the_power_law_is_found_again() -> None:
    sizes = np.array([40.0, 80, 160, 240, 320, 400])
    for a, b, c in ((0.05, 1.2, 0.5), (0.0, 2.0, 0.7), (0.2, 0.0, 1.0)):
        scores = np.stack([1 - a - b * sizes**-c] * 5, axis=1)
        forecast, _ = forecast_twice(sizes, scores, num_images=500)
        assert forecast.top1 == pytest.approx(1 - a - b * 1000**-c, abs=3e-3)
    # what rises with more images is level
    rising = np.stack([1 - sizes / 1000] * 5, axis=1)
    forecast, now = forecast_twice(sizes, rising, num_images=500)
    assert forecast.top1 == pytest.approx(now, abs=0.02)


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
    assert "32 photos in 4 classes" in few.sentence
    assert few.points

    alone = measure(values[::8], labels[::8])
    assert alone.points == []
    assert "too few photos or groups to leave any out" in alone.sentence
    of_one_group = measure(values, labels, [str(label) for label in labels])
    assert "every class has too few photos or groups" in of_one_group.sentence

    easy, labels = GaussianClasses(0, separation=20).draw(40)
    assert "160 photos in 4 classes, 0 of them wrong" in measure(easy, labels).sentence
    monkeypatch.setattr(learning_curve, "_MAX_VALUES", 1000)
    nothing = measure(easy, labels)
    assert nothing.points == []
    assert "take too long" in nothing.sentence


def test_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    values, labels = GaussianClasses(0).draw(40)
    contents = []
    for _ in range(2):
        measure(values, labels).save(tmp_path)
        contents.append((tmp_path / "learning_curve.json").read_bytes())
    assert contents[0] == contents[1]
    content = json.loads(contents[0])
    assert [point["num_images"] for point in content["points"]] == [12, 25, 51, 76, 102, 128]
    assert "With twice as many photos (320) about" in content["sentence"]
