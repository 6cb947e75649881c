"""Probabilities of classes, or of labels where an image may have several."""

import numpy as np

from vit.bundle import Bundle
from vit.prediction.decision import decide_classes, decide_labels
from vit.prediction.probabilities import (
    Float32s,
    Floats,
    Ints,
    compute_sigmoid,
    compute_softmax,
)


def compute_probabilities(bundle: Bundle, logits: Float32s) -> Floats:
    """Compute the probability of each class, or of each label of its own, float64 [n, C].

    Args:
        bundle: The model, whose temperature divides the logits.
        logits: [n, C].
    """
    scaled = logits.astype(np.float64) / bundle.temperature
    return compute_sigmoid(scaled) if bundle.is_multilabel else compute_softmax(scaled)


def find_labels(bundle: Bundle, probabilities: Floats) -> list[str] | None:
    """Return the labels that an image is predicted to have, the most probable first; None for a
    model of one class an image.

    Args:
        bundle: The model.
        probabilities: Probability of each label, [C].
    """
    if not bundle.is_multilabel:
        return None
    (is_found,) = decide_labels(bundle, probabilities[None])
    order = np.argsort(-probabilities, kind="stable").tolist()
    return [bundle.class_names[place] for place in order if is_found[place]]


def find_classes(bundle: Bundle, logits: Float32s) -> Ints:
    """Return the class that is predicted for each image, [n].

    Args:
        bundle: A model of one class an image.
        logits: [n, C].
    """
    if not bundle.operating_point:
        # the softmax may round two logits to the same probability
        classes: Ints = logits.argmax(axis=1)
        return classes
    return decide_classes(bundle, compute_probabilities(bundle, logits))
