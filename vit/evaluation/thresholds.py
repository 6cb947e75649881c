"""The operating point: the probability from which a class or a label is predicted, chosen by a rule
on held-out images."""

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vit.bundle import Bundle
from vit.evaluation.images import EvaluationSet
from vit.evaluation.intervals import number_clusters
from vit.evaluation.predictions import CROSS_VALIDATION
from vit.prediction.decision import compute_probabilities
from vit.prediction.probabilities import Bools, Float32s, Floats, Ints
from vit.runtime.arguments import shorten

_RULE = re.compile(
    r"(?:(?P<label>.+):)?(?:(?P<name>sensitivity|specificity|precision)=(?P<value>0?\.\d+)|f1)",
    re.DOTALL,
)


class Rule(NamedTuple):
    """How a threshold is chosen: by the wanted rate of this name, or by "f1", for all labels or for
    one."""

    text: str
    name: str
    value: float
    label: str | None


def parse_rule(text: str, bundle: Bundle) -> Rule:
    """Read a rule, such as "sensitivity=0.95", "effusion:precision=0.8" or "f1". For one class of
    more than two it must name the class. Raises ValueError for any other."""
    match = _RULE.fullmatch(text)
    # F1 needs no rate
    rate = float((match and match["value"]) or 1)
    if match is None or not rate:
        raise ValueError(
            f"--operating-point {text} is no rule; write sensitivity=0.95, specificity=0.9,"
            " precision=0.8 or f1, with rates above 0 and below 1"
        )
    names, label = bundle.class_names, match["label"]
    needs_label = not bundle.is_multilabel and len(names) > 2
    if (needs_label or label is not None) and label not in names:
        raise ValueError(
            f"--operating-point {text} needs the class that is predicted from a threshold on, such"
            f" as {names[0]}:f1; the classes are {shorten(', '.join(names))}"
        )
    return Rule(text, match["name"] or "f1", rate, label)


def choose_operating_point(
    bundle: Bundle, rule: Rule, images: EvaluationSet, logits: Float32s
) -> tuple[Bundle, list[str]]:
    """Choose the thresholds of a model on images with these logits, [n, C]: return the model with
    its operating point, and sentences about it. Raises ValueError if none keeps the promise."""
    probabilities = compute_probabilities(bundle, logits)
    names, marks = bundle.class_names, images.labels
    places = list(range(len(names)))
    if not bundle.is_multilabel:
        marks = images.labels[:, None] == np.arange(len(names))
        # the rarer one of two classes
        places = [int(marks.sum(axis=0).argmin())]
    if rule.label is not None:
        places = [names.index(rule.label)]
    # copies of one photo tell about one photo
    clusters = number_clusters(images.dataset.groups, len(images))
    where = f"{len(images):,} images ({images.dataset.split})"
    thresholds = {}
    sentences = [f"the operating point was chosen on {where}"]
    if images.dataset.split == CROSS_VALIDATION:
        sentences[0] += ", the measured ones: its rates on them are a little too good"
    for place in places:
        columns = (probabilities[:, place], marks[:, place])
        try:
            thresholds[names[place]] = choose_threshold(*columns, rule, clusters, name=names[place])
        except ValueError as error:
            if place == places[-1] and not thresholds:
                raise ValueError(f"--operating-point {rule.text} on {where}: {error}") from error
            sentences.append(f"{names[place]} is predicted from 50 % on: {error}")
    point = {"rule": rule.text, "thresholds": thresholds, "num_images": len(images)}
    return replace(bundle, metadata={**bundle.metadata, "operating_point": point}), sentences


def choose_threshold(
    probabilities: Floats, is_positive: Bools, rule: Rule, clusters: Ints, *, name: str = "positive"
) -> float:
    """Choose the probability from which a label is predicted, halfway between two neighbouring
    probabilities of images, [n], which have the label or not and come in groups with these numbers.

    A promised sensitivity, specificity or precision holds on average over new images: a new image
    is assumed to be on the wrong side (Vovk, Gammerman & Shafer 2005). If images come in groups, it
    counts as many times as the mean image has images of its kind in its group (Angelopoulos, Bates,
    Fisch, Lei & Schuster 2024, "Conformal risk control"). With "f1", F1 is largest. A probability
    of NaN counts as 0. Raises ValueError if no threshold keeps the promise.
    """
    num_positive = int(is_positive.sum())
    num_others = len(is_positive) - num_positive
    if not num_positive or not num_others:
        raise ValueError(f"choose on images with and without {name}; all of them are alike")
    thresholds, hits, alarms = _count_found(probabilities, is_positive)
    if rule.name == "f1":
        return float(thresholds[(2 * hits / (hits + alarms + num_positive)).argmax()])
    # which images the rate is of, how many they are, and how many of them are right
    kind, count, right = {
        "sensitivity": (is_positive, num_positive, hits),
        "specificity": (~is_positive, num_others, num_others - alarms),
        "precision": (np.ones_like(is_positive), hits + alarms, hits),
    }[rule.name]
    # images of the mean image's group; 1 without groups
    sizes = np.bincount(clusters[kind])
    rates = right / (count + (sizes**2).sum() / sizes.sum())
    keeps = np.flatnonzero(rates >= rule.value - 1e-9)
    if not len(keeps):
        raise ValueError(
            f"{num_positive:,} images with {name} and {num_others:,} without allow no"
            f" {rule.name}={rule.value:g}, at most {rates.max():.3g}"
        )
    # thresholds rise: the one with the best other rate
    if rule.name == "sensitivity":
        return float(thresholds[keeps[-1]])
    return float(thresholds[keeps[0]])


def _count_found(probabilities: Floats, is_positive: Bools) -> tuple[Floats, Floats, Floats]:
    """Return the thresholds that make a difference, halfway between two neighbouring probabilities
    and the lowest first, and how many images with and without the label reach each, [k]."""
    values, places = np.unique(np.nan_to_num(probabilities), return_inverse=True)
    lower, upper = np.concatenate([[0.0], values]), np.append(values, 1.0)
    middle = (lower + upper) / 2
    # there may be no number between two neighbours
    thresholds = np.where(middle > lower, middle, upper)
    # no threshold excludes an image of 100 %
    count = len(thresholds) - int(values[-1] >= 1)
    hits, alarms = (
        marks.sum() - np.append(0.0, np.cumsum(np.bincount(places, marks)))[:count]
        for marks in (is_positive, ~is_positive)
    )
    return thresholds[:count], hits, alarms
