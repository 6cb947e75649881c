"""Probabilities of classes or labels, and what a model predicts by them: the most probable class,
or the labels of at least 50 %. An operating point in the model file sets other thresholds."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit.bundle import Bundle
from vit.prediction.probabilities import Bools, Float32s, Floats, Ints
from vit.runtime.arguments import shorten

# probability from which a label counts as predicted
THRESHOLD = 0.5


def find_class(target: Any, class_names: Sequence[str]) -> int:
    """Find the index of a class by its name, its index or one of its synonyms. A number is an
    index; a text of digits is a name if a class is called by a number."""
    if target in class_names:
        return class_names.index(target)
    name = str(target)
    are_numbers = any(class_name.isdecimal() for class_name in class_names)
    is_index = name.isdecimal() and not (are_numbers and isinstance(target, str))
    if is_index and int(name) < len(class_names):
        return int(name)
    # ImageNet's classes have synonyms, separated by commas; case doesn't matter
    wanted = name.casefold()
    names = [one.casefold() for one in class_names]
    matches = [
        index for index, one in enumerate(names) if wanted in (one, *re.split(r"\s*,\s*", one))
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = "; ".join(f"{index} ({class_names[index]})" for index in matches)
        raise ValueError(f"class {target!r} is not unique: {choices}; give the index")
    indices = "" if are_numbers else f"0 to {len(class_names) - 1} or "
    raise ValueError(
        f"unknown class {target!r}; known: {shorten(indices + ', '.join(class_names))}"
    )


def compute_probabilities(bundle: Bundle, logits: Float32s) -> Floats:
    """Compute the probability of each class or label, float64 [n, C], from logits [n, C], which the
    model's temperature divides."""
    from scipy.special import expit, softmax  # a fifth of a second to import

    scaled = logits.astype(np.float64) / bundle.temperature
    return np.asarray(expit(scaled) if bundle.is_multilabel else softmax(scaled, axis=1))


def read_thresholds(bundle: Bundle) -> Floats:
    """Return the probability from which each label or class of a model is predicted, [C]; NaN for a
    class that is predicted if it is the most probable one."""
    chosen = bundle.operating_point.get("thresholds", {})
    usual = THRESHOLD if bundle.is_multilabel else np.nan
    return np.array([chosen.get(name, usual) for name in bundle.class_names])


def decide_labels(bundle: Bundle, probabilities: Floats) -> Bools:
    """Decide which labels each image has, [n, C], by the probability of each label, [n, C]."""
    return np.greater_equal(probabilities, read_thresholds(bundle))


def decide_classes(thresholds: Floats, probabilities: Floats) -> Ints:
    """Decide the class of each image, [n], by the probability of each class, [n, C]: the one that
    reaches its threshold, [C], else the most probable of those without one."""
    order = probabilities.copy()
    has_point = ~np.isnan(thresholds)
    is_reached = probabilities[:, has_point] >= thresholds[has_point]
    order[:, has_point] = np.where(is_reached, np.inf, -1)
    return np.asarray(order.argmax(axis=1))


def rank_classes(bundle: Bundle, probabilities: Floats) -> Iterator[list[int]]:
    """Yield the classes of each image, [n, C], the most probable first. With an operating point,
    the class that it predicts comes first."""
    order = probabilities.copy()
    if not bundle.is_multilabel:
        order[np.arange(len(order)), decide_classes(read_thresholds(bundle), probabilities)] = (
            np.inf
        )
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
