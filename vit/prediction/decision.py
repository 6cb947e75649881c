"""Decide what a model predicts: its most probable class, or the labels of at least 50 %, unless the
model file has an operating point, which sets other thresholds."""

from typing import NamedTuple

import numpy as np

from vit.bundle import Bundle
from vit.prediction.probabilities import Bools, Floats, Ints
from vit.runtime.arguments import shorten

# probability from which a label counts as predicted
THRESHOLD = 0.5
_MAX_SHOWN = 5  # thresholds in a sentence


class ClassThreshold(NamedTuple):
    """The class that is predicted from some probability on, against the rest."""

    place: int
    probability: float

    def decide(self, probabilities: Floats) -> Ints:
        """Return the index of each image's predicted class, [n]: this class where it reaches its
        probability, and the most probable of the others where it doesn't."""
        others = probabilities.copy()
        others[:, self.place] = -1
        is_reached = probabilities[:, self.place] >= self.probability
        return np.where(is_reached, self.place, others.argmax(axis=1))


def read_thresholds(bundle: Bundle) -> Floats:
    """Return the probability from which each label of a model counts as predicted, [C]."""
    # labels without a threshold of their own need a half
    chosen = bundle.operating_point.get("thresholds", {})
    return np.array([chosen.get(name, THRESHOLD) for name in bundle.class_names])


def read_class_threshold(bundle: Bundle) -> ClassThreshold | None:
    """Return the operating point of a model of one class an image; None without one."""
    if bundle.is_multilabel or not bundle.operating_point:
        return None
    ((name, probability),) = bundle.operating_point["thresholds"].items()
    return ClassThreshold(bundle.class_names.index(name), float(probability))


def decide_labels(bundle: Bundle, probabilities: Floats) -> Bools:
    """Decide which labels each image has, [n, C].

    Args:
        bundle: A model of several labels an image.
        probabilities: Probability of each label, [n, C].
    """
    reached: Bools = probabilities >= read_thresholds(bundle)
    return reached


def decide_classes(bundle: Bundle, probabilities: Floats) -> Ints:
    """Decide the class of each image, [n].

    Args:
        bundle: A model of one class an image.
        probabilities: Probability of each class, [n, C], with the model's temperature.
    """
    threshold = read_class_threshold(bundle)
    return probabilities.argmax(axis=1) if threshold is None else threshold.decide(probabilities)


def describe_decision(bundle: Bundle) -> str:
    """Return a sentence on how the operating point decides; empty without one."""
    point = bundle.operating_point
    if not point:
        return ""
    chosen = [f"{name} from {value:.4g} on" for name, value in point["thresholds"].items()]
    shown = ", ".join(shorten(each, 80) for each in chosen[:_MAX_SHOWN])
    if len(chosen) > _MAX_SHOWN:
        shown += f" and {len(chosen) - _MAX_SHOWN} other labels by thresholds of their own"
    rest = "" if bundle.is_multilabel else ", otherwise the most probable of the others"
    return f"operating point {point['rule']}: predicts {shown}{rest}"
