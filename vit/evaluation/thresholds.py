"""Thresholds of the probability of one class or label: their rates on images, and the operating
point that a rule chooses on held-out images."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit.bundle import Bundle
from vit.evaluation.clusters import Interval, compute_clustered_interval, number_clusters
from vit.evaluation.images import EvaluationSet
from vit.model.model_file import OperatingPoint
from vit.prediction.decision import compute_probabilities
from vit.prediction.probabilities import Bools, Float32s, Floats, Ints
from vit.runtime.arguments import shorten

# rates at which the other one is given
LEVELS = (0.9, 0.95)
_RULE = re.compile(
    r"(?:(?P<label>.+):)?(?:(?P<name>sensitivity|specificity|precision)=(?P<value>[\d.e-]+)|f1)",
    re.DOTALL,
)
_EXAMPLES = "sensitivity=0.95, specificity=0.9, precision=0.8 or f1"


@dataclass(frozen=True)
class Rule:
    """How a threshold is chosen.

    Attributes:
        text: The rule as it was given.
        name: "sensitivity", "specificity", "precision" or "f1".
        value: The wanted rate; nothing for F1.
        label: The class or label that it is for; None if none was named.
    """

    text: str
    name: str
    value: float
    label: str | None


@dataclass(frozen=True)
class ThresholdRates:
    """Sensitivity and specificity at one threshold, 0 to 1, with 95 % intervals.

    Attributes:
        rule: How the threshold is chosen, as `vit evaluate --operating-point` takes it; empty for
            the one that decides what is predicted.
    """

    rule: str
    threshold: float
    sensitivity: float
    specificity: float
    sensitivity_interval: Interval
    specificity_interval: Interval


def parse_rule(text: str, class_names: Sequence[str], *, is_multilabel: bool = False) -> Rule:
    """Read a rule, such as "sensitivity=0.95", "effusion:precision=0.8" or "f1".

    Args:
        text: The rule.
        class_names: Classes or labels of the model.
        is_multilabel: True for labels. With more than two classes the rule must name one.

    Raises:
        ValueError: It is none, or names an unknown class or none of several.
    """
    match = _RULE.fullmatch(text)
    try:
        rate = float((match and match["value"]) or 0.5)
    except ValueError:
        rate = np.nan
    # NaN is no rate between 0 and 1
    if match is None or not 0 < rate < 1:
        raise ValueError(
            f"--operating-point {text} is no rule; write {_EXAMPLES}, with rates above 0 and below 1"
        )
    known = shorten(", ".join(class_names))
    label = match["label"]
    if label is not None and label not in class_names:
        raise ValueError(f"--operating-point {text}: {label} is not one of the classes {known}")
    if label is None and not is_multilabel and len(class_names) > 2:
        raise ValueError(
            f"--operating-point {text} needs the class that is predicted from a threshold on, such"
            f" as {class_names[0]}:{text}; the classes are {known}"
        )
    return Rule(text, match["name"] or "f1", rate, label)


def choose_operating_point(
    bundle: Bundle, rule: Rule, validation: EvaluationSet, logits: Float32s
) -> tuple[OperatingPoint, list[str]]:
    """Choose the thresholds of a model.

    Args:
        bundle: The model, with its temperature.
        rule: The rule.
        validation: Images to choose on.
        logits: Their logits, [n, C].

    Returns:
        The operating point, and sentences about it.

    Raises:
        ValueError: No threshold of these images keeps the promise.
    """
    probabilities = compute_probabilities(bundle, logits)
    names = bundle.class_names
    if bundle.is_multilabel:
        marks = validation.labels.astype(bool)
        places = list(range(len(names)))
    else:
        marks = validation.labels[:, None] == np.arange(len(names))
        # the rarer one of two classes
        places = [int(marks.sum(axis=0).argmin())]
    if rule.label is not None:
        places = [names.index(rule.label)]
    # copies of one photo tell about one photo
    clusters = number_clusters(validation.dataset.groups, len(validation))
    images = f"{len(validation):,} images ({validation.dataset.split})"
    thresholds = {}
    sentences = [f"the operating point was chosen on {images}"]
    for place in places:
        columns = (probabilities[:, place], marks[:, place])
        try:
            thresholds[names[place]] = choose_threshold(*columns, rule, clusters, name=names[place])
        except ValueError as error:
            if place == places[-1] and not thresholds:
                raise ValueError(f"--operating-point {rule.text} on {images}: {error}") from error
            sentences.append(f"{names[place]} is predicted from 50 % on: {error}")
    point = OperatingPoint(rule=rule.text, thresholds=thresholds, num_images=len(validation))
    return point, sentences


def choose_threshold(
    probabilities: Floats, is_positive: Bools, rule: Rule, clusters: Ints, *, name: str = "positive"
) -> float:
    """Choose the probability from which a label is predicted.

    A promised sensitivity, specificity or precision holds on average over new images: a new image
    is assumed to be on the wrong side (Vovk, Gammerman & Shafer 2005). If images come in groups, it
    counts as many times as the mean image has images of its kind in its group (Angelopoulos, Bates,
    Fisch, Lei & Schuster 2024, "Conformal risk control"). With "f1", F1 is largest.

    Args:
        probabilities: Probability of the label, [n]. NaN counts as 0.
        is_positive: Which images have it, [n].
        rule: The rule.
        clusters: Number of each image's group, [n].
        name: The label.

    Returns:
        The threshold: halfway between two neighbouring probabilities of these images.

    Raises:
        ValueError: There are too few images, or none of the thresholds keeps the promise.
    """
    num_positive = int(is_positive.sum())
    if num_positive in (0, len(is_positive)):
        have = "all of them have" if num_positive else "none of them has"
        raise ValueError(f"{have} {name}; choose on images with and without it")
    thresholds, missed, alarms = _count_errors(probabilities, is_positive)
    hits = num_positive - missed
    # thresholds rise, so that the first one which keeps a promise has the best other rate
    if rule.name == "f1":
        return float(thresholds[(2 * hits / (hits + alarms + num_positive)).argmax()])
    if rule.name == "precision":
        new = _measure_group_size(clusters)
        keeps = hits >= rule.value * (hits + alarms + new)
        if not keeps.any():
            best = float((hits / (hits + alarms + new)).max())
            raise ValueError(
                f"no threshold has a precision of {100 * rule.value:g} %; up to {100 * best:.0f} %"
                " can be promised"
            )
        return float(thresholds[keeps.argmax()])
    if rule.name == "sensitivity":
        allowed = _count_allowed(is_positive, rule, clusters, f"images with {name}")
        return float(thresholds[np.flatnonzero(missed <= allowed)[-1]])
    allowed = _count_allowed(~is_positive, rule, clusters, f"images without {name}")
    if alarms[-1] > allowed:
        raise ValueError(f"too many images without {name} have a probability of 100 %")
    return float(thresholds[(alarms <= allowed).argmax()])


def _count_errors(probabilities: Floats, is_positive: Bools) -> tuple[Floats, Floats, Floats]:
    """Count the errors at each threshold that makes a difference, the lowest first.

    Returns:
        Thresholds, halfway between two neighbouring probabilities, [k]; images with the label below
        it, [k]; images without the label from it on, [k].
    """
    values, places = np.unique(np.nan_to_num(probabilities), return_inverse=True)
    lower, upper = np.concatenate([[0.0], values]), np.append(values, 1.0)
    middle = (lower + upper) / 2
    # there may be no number between two neighbours
    thresholds = np.where(middle > lower, middle, upper)
    # both by the number of neighbours that lie below a threshold
    missed = np.append(0.0, np.cumsum(np.bincount(places, is_positive)))
    spared = np.append(0.0, np.cumsum(np.bincount(places, ~is_positive)))
    # no threshold excludes an image of 100 %
    count = len(thresholds) - int(values[-1] >= 1)
    return thresholds[:count], missed[:count], spared[-1] - spared[:count]


def _measure_group_size(clusters: Ints) -> float:
    """Return the number of images in the group of the mean image; 1 without groups."""
    sizes = np.bincount(clusters)
    return float((sizes**2).sum()) / int(sizes.sum())


def _count_allowed(is_counted: Bools, rule: Rule, clusters: Ints, what: str) -> float:
    """Return how many of some held-out images may be on the wrong side, so that the promised rate
    holds for new ones."""
    # n images and a new one of the same kind
    count = int(is_counted.sum())
    group_size = _measure_group_size(clusters[is_counted])
    risk = 1 - rule.value
    allowed = round(risk * count - rule.value * group_size, 9)
    if allowed < 0:
        needed = int(np.ceil(round(rule.value / risk * group_size, 9)))
        # copies count little, so that other labels may need other numbers
        of_groups = f" in groups of about {group_size:.2g}" if group_size > 1 else ""
        raise ValueError(
            f"{count:,} {what}{of_groups} are too few for {rule.name}={rule.value:g}, {needed:,}"
            " are needed"
        )
    return allowed


def measure_thresholds(
    probabilities: Floats, is_positive: Bools, clusters: Ints, *, threshold: float
) -> list[ThresholdRates]:
    """Measure one label at its threshold, and at those with a sensitivity or specificity of 90 and
    95 % on these images; nothing unless some images have it and others don't.

    The intervals are those of the rates at the threshold; they leave out that a threshold of these
    images would differ on others.

    Args:
        probabilities: Probability of the label, [n].
        is_positive: Which images have it, [n].
        clusters: Number of each image's group, [n].
        threshold: Probability from which the label is predicted.
    """
    count = int(is_positive.sum())
    if count in (0, len(is_positive)):
        return []
    thresholds, missed, alarms = _count_errors(probabilities, is_positive)
    # the threshold that decides comes first
    chosen = [("", threshold)]
    for level in LEVELS:
        # the lowest threshold that reaches a specificity; there may be none
        reached = alarms <= round((1 - level) * (len(is_positive) - count), 9)
        if reached.any():
            chosen.append((f"specificity={level}", float(thresholds[reached.argmax()])))
    for level in LEVELS:
        # the highest threshold that reaches a sensitivity
        reached = missed <= round((1 - level) * count, 9)
        chosen.append((f"sensitivity={level}", float(thresholds[np.flatnonzero(reached)[-1]])))
    rows = []
    for rule, value in chosen:
        is_found = probabilities >= value
        found, left = is_found[is_positive], ~is_found[~is_positive]
        rows.append(
            ThresholdRates(
                rule,
                value,
                float(found.mean()),
                float(left.mean()),
                compute_clustered_interval(found, clusters[is_positive]),
                compute_clustered_interval(left, clusters[~is_positive]),
            )
        )
    return rows
