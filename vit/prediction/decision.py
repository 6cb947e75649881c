"""Probabilities of classes or labels, and what a model predicts by them: the most probable class,
or the labels of at least 50 %. An operating point in the model file sets other thresholds."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vit.bundle import Bundle
from vit.prediction.probabilities import Bools, Float32s, Floats, Ints
from vit.runtime.arguments import shorten

# probability from which a label counts as predicted
THRESHOLD = 0.5


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


def compute_probabilities(bundle: Bundle, logits: Float32s) -> Floats:
    """Compute the probability of each class or label, float64 [n, C], from logits [n, C], which the
    model's temperature divides."""
    from scipy.special import expit, softmax  # a fifth of a second to import

    scaled = logits.astype(np.float64) / bundle.temperature
    return np.asarray(expit(scaled) if bundle.is_multilabel else softmax(scaled, axis=1))


def read_thresholds(bundle: Bundle) -> Floats:
    """Return the probability from which each label of a model counts as predicted, [C]."""
    chosen = bundle.operating_point.get("thresholds", {})
    return np.array([chosen.get(name, THRESHOLD) for name in bundle.class_names])


def read_class_threshold(bundle: Bundle) -> ClassThreshold | None:
    """Return the operating point of a model of one class an image; None without one."""
    if bundle.is_multilabel or not bundle.operating_point:
        return None
    ((name, probability),) = bundle.operating_point["thresholds"].items()
    return ClassThreshold(bundle.class_names.index(name), float(probability))


def decide_labels(bundle: Bundle, probabilities: Floats) -> Bools:
    """Decide which labels each image has, [n, C], by the probability of each label, [n, C]."""
    reached: Bools = probabilities >= read_thresholds(bundle)
    return reached


def decide_classes(bundle: Bundle, probabilities: Floats) -> Ints:
    """Decide the class of each image, [n], by the probability of each class, [n, C]."""
    threshold = read_class_threshold(bundle)
    return probabilities.argmax(axis=1) if threshold is None else threshold.decide(probabilities)


def rank_classes(bundle: Bundle, probabilities: Floats) -> Iterator[list[int]]:
    """Yield the classes of each image, [n, C], the most probable first. With an operating point,
    the class that it predicts comes first."""
    order = probabilities.copy()
    if not bundle.is_multilabel:
        order[np.arange(len(order)), decide_classes(bundle, probabilities)] = np.inf
    # a stable order: of equally probable classes the first one comes first
    return (np.argsort(-row, kind="stable").tolist() for row in order)


def describe_decision(bundle: Bundle) -> str:
    """Return a sentence on how the operating point decides; empty without one."""
    point = bundle.operating_point
    if not point:
        return ""
    chosen = [f"{name} from {value:.4g} on" for name, value in point["thresholds"].items()]
    rest = "" if bundle.is_multilabel else ", otherwise the most probable of the others"
    return f"operating point {point['rule']}: predicts {shorten(', '.join(chosen))}{rest}"
