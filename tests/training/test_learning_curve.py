"""The learning curve of a probe: measured on images that it was not fitted on, its forecast holds for
twice as many, and there is none where it can't tell."""

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vit.training.folds import assign_folds
from vit.training.learning_curve import measure_learning_curve

STRENGTH = 0.01


def measure(
    values: np.ndarray, labels: np.ndarray, groups: list[str] | None = None
) -> dict[str, Any] | None:
    folds = assign_folds(labels, groups)
    return measure_learning_curve(values, labels, folds, strength=STRENGTH, balanced=False)


class GaussianClasses:
    """Classes of features around a centre each, drawn anew with each seed."""

    def __init__(self, seed: int, *, num_classes: int = 4, separation: float = 0.25) -> None:
        self.rng = np.random.default_rng(seed)
        self.centres = separation * self.rng.normal(size=(num_classes, 64))

    def draw(self, images_a_class: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(len(self.centres)), images_a_class)
        return self.centres[labels] + self.rng.normal(size=(len(labels), 64)), labels


@pytest.mark.extended
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
        assert curve is not None
        forecast = curve["forecast"]
        assert forecast["num_images"] == 200
        assert "With twice as many photos (200) about" in curve["sentence"]

        now = probe.fit(values, labels).score(*test)
        all_values = np.concatenate([values, more_values])
        twice = probe.fit(all_values, np.concatenate([labels, more_labels])).score(*test)
        low, high = forecast["interval"]
        num_covered += low <= twice <= high
        gains.append(twice - now)
        expected_gains.append(forecast["top1"] - curve["top1_now"])
    assert num_covered >= 0.8 * num_draws
    # there is something to be foreseen, and it is
    assert np.mean(gains) > 0.03
    assert abs(np.mean(expected_gains) - np.mean(gains)) < 0.5 * np.mean(gains)


def test_there_is_none_where_it_cannot_tell() -> None:
    values, labels = GaussianClasses(0).draw(8)
    assert measure(values, labels) is None
    assert measure(values[::8], labels[::8]) is None
    assert measure(values, labels, [str(label) for label in labels]) is None
    # of an easy task hardly an image is wrong
    assert measure(*GaussianClasses(0, separation=20).draw(40)) is None
