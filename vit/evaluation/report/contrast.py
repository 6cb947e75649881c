"""Why one class is predicted as another, for the report.

For each pair of classes that is confused more than by chance: the most confident errors with their
contrast maps, the patches whose removal changes the prediction, and the nearest training photos of
both classes.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from scipy.special import bdtrc

from vit.evaluation.confusion import ConfusedPair, count_confusions
from vit.evaluation.metrics import Scores
from vit.evaluation.report.contrast_maps import CONTRAST_METHODS, Contrast, contrast_errors
from vit.evaluation.result import EvaluationResult
from vit.explanation.render.page import encode_photo, encode_relative_map
from vit.explanation.training_photos import TrainingPhotos
from vit.prediction.predictor import Pixels
from vit.prediction.probabilities import Ints

_MAX_PAIRS = 6
_MAX_ERRORS = 3
# p-value of a pair's errors if errors were spread evenly over the classes
_CHANCE = 0.05
# Seconds for all pairs together; an error takes about as long as forty forward passes.
_MAX_SECONDS = 15.0
_PASSES_AN_ERROR = 40
_SIDE = 128


@dataclass
class ExplainedPair:
    """A pair of classes with its most confident errors, as the template shows them."""

    pair: ConfusedPair
    errors: list[dict[str, Any]] = field(default_factory=list)


def explain_confusions(
    result: EvaluationResult, training_photos: TrainingPhotos
) -> tuple[list[ExplainedPair], str | None]:
    """Return the explained pairs, or why there are none."""
    pairs = [ExplainedPair(pair) for pair in find_confused_pairs(result.scores)]
    num_affordable = int(_MAX_SECONDS * result.evaluation.cost.images_per_second / _PASSES_AN_ERROR)
    errors_a_pair = min(_MAX_ERRORS, num_affordable // max(len(pairs), 1))
    if not errors_a_pair:
        # on a slow machine, one error of the most frequent pairs
        errors_a_pair = 1
        pairs = pairs[: max(num_affordable, 1)]
    chosen = [
        (explained, index)
        for explained in pairs
        for index in _choose_errors(result.scores, explained.pair)[:errors_a_pair].tolist()
    ]
    if not chosen:
        return [], None
    pixels = np.concatenate([result.images.read(index, index + 1) for _, index in chosen])
    classes = [(explained.pair.label, explained.pair.predicted) for explained, _ in chosen]
    labels, predicted = np.array(classes).T
    # the report does without them for a model whose attention can't be read
    try:
        contrasts = contrast_errors(result.bundle, pixels, labels=labels, predicted=predicted)
    except ValueError as error:
        return [], str(error)
    neighbours = training_photos.find_of_classes(list(pixels), classes)
    # a wrong label explains an error without any map
    suspects = {example.path for example in result.evaluation.examples.label_errors}
    for row, (explained, index) in enumerate(chosen):
        path = result.images.ids[index]
        explained.errors.append(
            {
                "path": path,
                "probability": float(result.scores.confidence[index]),
                "is_suspect": path in suspects,
                "neighbours": neighbours[row],
                **_draw_contrast(pixels[row], contrasts[row]),
            }
        )
    return pairs, None


def find_confused_pairs(scores: Scores) -> list[ConfusedPair]:
    """Return the most frequent pairs that are more frequent than if the errors of the label were
    spread evenly over the other classes (binomial test); with two classes, both pairs."""
    num_classes = scores.num_classes
    is_wrong = scores.labels != scores.predicted
    num_errors = np.bincount(scores.labels[is_wrong], minlength=num_classes)
    pairs = []
    for pair in count_confusions(scores.labels, scores.predicted, num_classes=num_classes):
        chance = bdtrc(pair.count - 1, int(num_errors[pair.label]), 1 / max(num_classes - 1, 1))
        if num_classes == 2 or (pair.count > 1 and chance <= _CHANCE):
            pairs.append(pair)
    return pairs[:_MAX_PAIRS]


def _choose_errors(scores: Scores, pair: ConfusedPair) -> Ints:
    """Return the images of a pair, the most confident first."""
    is_error = (scores.labels == pair.label) & (scores.predicted == pair.predicted)
    indices = np.flatnonzero(is_error)
    return np.asarray(indices[np.argsort(-scores.confidence[indices], kind="stable")])


def _draw_contrast(pixels: Pixels, contrast: Contrast) -> dict[str, Any]:
    """Return the photo, its maps, and the photo without the patches, as the template shows them."""
    photo = Image.fromarray(pixels)
    maps = [
        (method, encode_relative_map(photo, contrast.maps[method], signed=True, side=_SIDE))
        for method in CONTRAST_METHODS
    ]
    return {
        "photo": encode_photo(photo, side=_SIDE),
        "maps": maps,
        "num_removed": len(contrast.removed),
        "removed": _draw_removed(pixels, contrast),
        "answer": contrast.answer,
    }


def _draw_removed(pixels: Pixels, contrast: Contrast) -> str | None:
    """Return the photo with the removed patches in white."""
    if not contrast.removed:
        return None
    rows, columns = next(iter(contrast.maps.values())).shape
    height = pixels.shape[0] // rows
    width = pixels.shape[1] // columns
    without = pixels.copy()
    for patch in contrast.removed:
        top = patch // columns * height
        left = patch % columns * width
        without[top : top + height, left : left + width] = 255
    return encode_photo(Image.fromarray(without), side=_SIDE)
