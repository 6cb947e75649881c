"""Choose, on held-out images, the probability from which a label or a class is predicted."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from scipy.special import betaincinv

from vit.bundle import Bundle
from vit.evaluation.clusters import compute_design_effect, number_clusters
from vit.evaluation.curves import Errors, count_errors
from vit.evaluation.images import EvaluationSet
from vit.model.model_file import OperatingPoint
from vit.prediction.labels import compute_probabilities
from vit.prediction.probabilities import Bools, Float32s, Floats, Ints
from vit.runtime.arguments import shorten
from vit.runtime.numbers import format_percent

_RATES = ("sensitivity", "specificity", "precision")
_RULE = re.compile(
    r"(?:(?P<label>.+):)?(?P<name>sensitivity|specificity|precision|f1|cost)(?:=(?P<value>.*))?",
    re.DOTALL,
)
_EXAMPLES = "sensitivity=0.95, specificity=0.9, precision=0.8, f1 or cost=10:1"
# A precision is promised with this probability of being wrong. So many thresholds are tested, from
# several places on.
_RISK = 0.1
_NUM_SIZES = 20
_NUM_STARTS = 4


@dataclass(frozen=True)
class Rule:
    """How a threshold is chosen.

    Attributes:
        text: The rule as it was given.
        name: "sensitivity", "specificity", "precision", "f1" or "cost".
        value: The wanted rate, or the cost of a missed one divided by that of a false alarm.
        label: The class or label that it is for; None if none was named.
    """

    text: str
    name: str
    value: float
    label: str | None


def parse_rule(text: str, class_names: Sequence[str], *, is_multilabel: bool = False) -> Rule:
    """Read a rule, such as "sensitivity=0.95", "effusion:cost=10:1" or "f1".

    Args:
        text: The rule.
        class_names: Classes or labels of the model.
        is_multilabel: True for labels. Of more than two classes the rule must name one.

    Raises:
        ValueError: It is none, or names an unknown class or none of several.
    """
    match = _RULE.fullmatch(text)
    label, name, value = match.group("label", "name", "value") if match else (None, "", None)
    known = ", ".join(class_names)
    if match and label is not None and label not in class_names:
        raise ValueError(
            f"--operating-point {text}: {label} is not one of the classes {shorten(known)}"
        )
    if match and label is None and not is_multilabel and len(class_names) > 2:
        raise ValueError(
            f"--operating-point {text} needs the class that is predicted from a threshold on, such as"
            f" {class_names[0]}:{text}; the classes are {shorten(known)}"
        )
    if name == "f1" and value is None:
        return Rule(text, name, 0.0, label)
    if name in _RATES:
        rate = _read_number(value)
        if not 0 < rate < 1:
            raise ValueError(
                f"--operating-point {text}: {name} must be above 0 and below 1, such as {name}=0.95"
            )
        return Rule(text, name, rate, label)
    if name == "cost":
        missed, _, alarm = (value or "").partition(":")
        costs = (_read_number(missed), _read_number(alarm))
        if not all(0 < cost < np.inf for cost in costs):
            raise ValueError(
                f"--operating-point {text}: cost needs the cost of a missed one and that of a false"
                " alarm, such as cost=10:1"
            )
        return Rule(text, name, costs[0] / costs[1], label)
    raise ValueError(f"--operating-point {text} is no rule; write {_EXAMPLES}")


def _read_number(text: str | None) -> float:
    """Return the number that a text is; NaN for another text."""
    try:
        return float(text or "nan")
    except ValueError:
        return np.nan


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
        places = range(len(names)) if rule.label is None else [names.index(rule.label)]
    else:
        place = _find_class(rule, names, validation.labels)
        marks = validation.labels[:, None] == np.arange(len(names))
        places = [place]
    clusters = number_clusters(validation.dataset.groups, len(validation))
    thresholds = {}
    failures = []
    for place in places:
        try:
            thresholds[names[place]] = choose_threshold(
                probabilities[:, place], marks[:, place], rule, clusters, name=names[place]
            )
        except ValueError as error:
            failures.append((names[place], str(error)))
    split = validation.dataset.split
    if not thresholds:
        raise ValueError(
            f"--operating-point {rule.text} on {len(validation):,} images ({split}): {failures[0][1]}"
        )
    sentences = [
        f"the operating point was chosen on {len(validation):,} images ({split})",
        *(f"{name} is predicted from 50 % on: {failure}" for name, failure in failures),
    ]
    point = OperatingPoint(rule=rule.text, thresholds=thresholds, num_images=len(validation))
    return point, sentences


def _find_class(rule: Rule, names: Sequence[str], labels: Ints) -> int:
    """Return the class that a rule is for: the named one, or the rarer one of two."""
    if rule.label is not None:
        return names.index(rule.label)
    return int(np.bincount(labels, minlength=2).argmin())


def choose_threshold(
    probabilities: Floats, is_positive: Bools, rule: Rule, clusters: Ints, *, name: str = "positive"
) -> float:
    """Choose the probability from which a label is predicted.

    - sensitivity, specificity: The mean rate of new images is at least the wanted one. The rank
      among n + 1 images decides (Vovk, Gammerman & Shafer 2005); if images come in groups, an image
      of a new group counts as many times as the mean image has images of its kind in its group
      (Angelopoulos, Bates, Fisch, Lei & Schuster 2024, "Conformal risk control").
    - precision: The lowest threshold whose precision is at least the wanted one with a probability
      of 90 %. From four places on, with a quarter of the risk each, thresholds are tested by a
      binomial bound until one fails (Angelopoulos, Bates, Candès, Jordan & Lei 2021, "Learn then
      test").
    - f1, cost: F1 is largest, or the cost is smallest.

    Args:
        probabilities: Probability of the label, [n].
        is_positive: Which images have it, [n].
        rule: The rule.
        clusters: Number of each image's group, [n].
        name: The label.

    Returns:
        The threshold: halfway between two neighbouring probabilities of these images.

    Raises:
        ValueError: There are too few images, or none of the thresholds keeps the promise.
    """
    errors = count_errors(probabilities, is_positive)
    if not errors.num_positive or not errors.num_negative:
        have = "all of them have" if errors.num_positive else "none of them has"
        raise ValueError(f"{have} {name}; choose on images with and without it")
    missed, alarms = errors.missed, errors.alarms

    if rule.name == "sensitivity":
        allowed = _count_allowed(is_positive, rule, clusters, f"images with {name}")
        chosen = int(np.flatnonzero(missed <= allowed)[-1])
    elif rule.name == "specificity":
        allowed = _count_allowed(~is_positive, rule, clusters, f"images without {name}")
        chosen = int((alarms <= allowed).argmax())
        if alarms[chosen] > allowed:
            raise ValueError(f"too many images without {name} have a probability of 100 %")
    elif rule.name == "precision":
        chosen = _find_precise(rule, errors, probabilities, is_positive, clusters)
    elif rule.name == "f1":
        hits = errors.num_positive - missed
        chosen = int((2 * hits / (hits + alarms + errors.num_positive)).argmax())
    else:
        chosen = int((rule.value * missed + alarms).argmin())
    return float(errors.thresholds[chosen])


def _count_allowed(is_counted: Bools, rule: Rule, clusters: Ints, what: str) -> float:
    """Return how many of some held-out images may be on the wrong side, so that the promised rate
    holds for new ones."""
    sizes = np.bincount(clusters[is_counted])
    count = int(sizes.sum())
    # images of the same kind in the group of the mean image; 1 without groups
    group_size = float((sizes**2).sum()) / count
    risk = 1 - rule.value
    allowed = round(risk * count - rule.value * group_size, 9)
    if allowed < 0:
        needed = int(np.ceil(round(rule.value / risk * group_size, 9)))
        # copies count little, so that other labels may need other numbers
        of_groups = f" in groups of about {group_size:.2g}" if group_size > 1 else ""
        raise ValueError(
            f"{count:,} {what}{of_groups} are too few for {rule.name}={rule.value:g}, {needed:,} are"
            " needed"
        )
    return allowed


def _find_precise(
    rule: Rule, errors: Errors, probabilities: Floats, is_positive: Bools, clusters: Ints
) -> int:
    """Return the lowest threshold whose precision is high enough beyond noise, by its place. See
    `choose_threshold`."""
    risk = _RISK / _NUM_STARTS
    predicted = errors.num_positive - errors.missed + errors.alarms
    # fewer predictions can't show it even if all are right
    fewest = np.log(risk) / np.log(rule.value)
    sizes = np.geomspace(min(fewest, len(is_positive)), len(is_positive), _NUM_SIZES)
    # Candidates by their numbers of predictions alone, so that the labels have no part in it.
    candidates = np.searchsorted(-predicted, -np.ceil(sizes)).tolist()
    best = 0.0

    def is_precise(candidate: int) -> bool:
        nonlocal best
        is_predicted = probabilities >= errors.thresholds[candidate]
        if not is_predicted.any():
            return False
        correct = is_positive[is_predicted]
        effect = compute_design_effect(correct - correct.mean(), clusters[is_predicted], correct)
        num_hits, num_alarms = correct.sum() / effect, (~correct).sum() / effect
        low = float(betaincinv(num_hits, num_alarms + 1, risk)) if num_hits > 0 else 0.0
        best = max(best, low)
        return low >= rule.value

    # the last candidate that holds, as do all between it and one of the starts
    found = [
        list(takewhile(is_precise, candidates[start:]))[-1:]
        for start in range(0, _NUM_SIZES, _NUM_SIZES // _NUM_STARTS)
    ]
    if any(found):
        return int(min(place for places in found for place in places))
    raise ValueError(
        f"no threshold has a precision of {100 * rule.value:g} % beyond noise; up to"
        f" {format_percent(best, len(is_positive))} is certain"
    )
