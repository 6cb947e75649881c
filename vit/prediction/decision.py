"""Probabilities of classes or labels, and what a model predicts by them: the most probable class,
or the labels of at least 50 %. An operating point in the model file sets other thresholds."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
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


def find_classes(names: Sequence[str], model_classes: Sequence[str]) -> list[int]:
    """Return the place of each class in a model. A name also matches a list of synonyms that it
    begins: "tench" matches "tench, Tinca tinca", as timm spells it. Raises ValueError for classes
    that the model doesn't know."""
    synonyms = [name.partition(",")[0] for name in model_classes]
    counts = Counter(synonyms)
    places = {name: place for place, name in enumerate(synonyms) if counts[name] == 1}
    places |= {name: place for place, name in enumerate(model_classes)}
    unknown = [name for name in names if name not in places]
    if unknown:
        hint = ""
        if model_classes[0] == "class 0":
            hint = "; name its classes, in order, by vit.load_bundle(model, class_names=…)"
        raise ValueError(
            f"the model doesn't know {shorten(', '.join(map(repr, unknown)))}; it knows"
            f" {shorten(', '.join(map(repr, model_classes)))}{hint}"
        )
    return [places[name] for name in names]


def restrict(bundle: Bundle, classes: Sequence[str]) -> tuple[Bundle, list[int]]:
    """Return a model as one of some of its classes, in its order, and the places of their logits;
    without names, all of them. Thresholds of prediction sets and of one class against the rest hold
    for all classes only, and are left out. Raises ValueError for unknown classes, and for a single
    one whose probability would be 1."""
    if not classes:
        return bundle, list(range(len(bundle.class_names)))
    places = sorted(set(find_classes(classes, bundle.class_names)))
    metadata = bundle.metadata
    if not bundle.is_multilabel:
        if len(places) == 1:
            raise ValueError(f"{classes[0]} alone always has a probability of 1; name two classes")
        metadata = {**metadata, "conformal": {}, "operating_point": {}}
    names = tuple(bundle.class_names[place] for place in places)
    return replace(bundle, class_names=names, metadata=metadata), places


def describe_restriction(bundle: Bundle) -> str:
    """Return a sentence on a model that `restrict` returned."""
    text = f"only these can be predicted: {shorten(', '.join(bundle.class_names))}"
    if bundle.is_multilabel:
        return text
    return f"{text}; they share the probability, without prediction sets or an operating point"


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
