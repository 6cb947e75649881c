"""Why one class is taken for another, in a report: for each pair that is confused more than chance
the most confident errors with their contrast maps, the patches that turn the answer, and the
nearest training photos of both classes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from scipy.special import bdtrc

from vit.evaluation.metrics import Scores
from vit.evaluation.report.contrast_maps import CONTRAST_METHODS, Contrast, contrast_errors
from vit.evaluation.result import EvaluationResult
from vit.explanation.render.page import encode_photo, encode_relative_map
from vit.explanation.training_photos import TrainingPhotos
from vit.prediction.predictor import Pixels
from vit.prediction.probabilities import Ints

_MAX_PAIRS = 6
_MAX_ERRORS = 3
# how rare a pair's errors must be among errors that are spread evenly over the classes
_CHANCE = 0.05
# of all pairs together, at the speed that was measured; an error takes about so many forward passes
_MAX_SECONDS = 15.0
_PASSES_AN_ERROR = 40
_SIDE = 128


@dataclass
class ConfusedPair:
    """A class that is taken for another."""

    label: int
    predicted: int
    count: int
    # of the template
    errors: list[dict[str, Any]] = field(default_factory=list)


def explain_confusions(
    result: EvaluationResult, training_photos: TrainingPhotos
) -> tuple[list[ConfusedPair], str | None]:
    """The pairs with what the template shows of them, and why there are none."""
    pairs = find_confused_pairs(result.scores)
    num_affordable = int(_MAX_SECONDS * result.evaluation.cost.images_per_second / _PASSES_AN_ERROR)
    errors_a_pair = min(_MAX_ERRORS, num_affordable // max(len(pairs), 1))
    if not errors_a_pair:
        # on a slow machine the most frequent alone
        errors_a_pair = 1
        pairs = pairs[: max(num_affordable, 1)]
    suspects = {example.path for example in result.evaluation.examples.label_errors}
    chosen = [
        (pair, index)
        for pair in pairs
        for index in _choose_errors(result.scores, pair)[:errors_a_pair].tolist()
    ]
    if not chosen:
        return [], None
    pixels = np.concatenate([result.images.read(index, index + 1) for _, index in chosen])
    try:
        contrasts = contrast_errors(
            result.bundle,
            pixels,
            labels=np.array([pair.label for pair, _ in chosen]),
            predicted=np.array([pair.predicted for pair, _ in chosen]),
        )
    except ValueError as error:
        return [], str(error)
    neighbours = training_photos.find_of_classes(
        list(pixels), [(pair.label, pair.predicted) for pair, _ in chosen]
    )
    for row, (pair, index) in enumerate(chosen):
        path = result.images.ids[index]
        contrast = contrasts[row]
        photo = Image.fromarray(pixels[row])
        pair.errors.append(
            {
                "path": path,
                "probability": float(result.scores.confidence[index]),
                "is_suspect": path in suspects,
                "photo": encode_photo(photo, side=_SIDE),
                "maps": [
                    (
                        method,
                        encode_relative_map(photo, contrast.maps[method], signed=True, side=_SIDE),
                    )
                    for method in CONTRAST_METHODS
                ],
                "num_removed": len(contrast.removed),
                "removed": _draw_removed(pixels[row], contrast),
                "answer": contrast.answer,
                "neighbours": neighbours[row],
            }
        )
    return pairs, None


def find_confused_pairs(scores: Scores) -> list[ConfusedPair]:
    """Pairs of label and prediction, the most frequent first, that are more frequent than if the
    errors of the label were spread evenly over the other classes (binomial test); of two classes
    both."""
    is_wrong = scores.labels != scores.predicted
    labels = scores.labels[is_wrong]
    num_errors = np.bincount(labels, minlength=scores.num_classes)
    # of many classes the whole matrix would not fit into memory
    cells, counts = np.unique(
        labels * scores.num_classes + scores.predicted[is_wrong], return_counts=True
    )
    num_others = scores.num_classes - 1
    pairs = []
    for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
        label, predicted = divmod(cell, scores.num_classes)
        chance = bdtrc(count - 1, int(num_errors[label]), 1 / max(num_others, 1))
        if num_others == 1 or (count > 1 and chance <= _CHANCE):
            pairs.append(ConfusedPair(label, predicted, count))
    return sorted(pairs, key=lambda pair: -pair.count)[:_MAX_PAIRS]


def _choose_errors(scores: Scores, pair: ConfusedPair) -> Ints:
    """The images of a pair, the most confident first."""
    is_error = (scores.labels == pair.label) & (scores.predicted == pair.predicted)
    indices = np.flatnonzero(is_error)
    return np.asarray(indices[np.argsort(-scores.confidence[indices], kind="stable")])


def _draw_removed(pixels: Pixels, contrast: Contrast) -> str | None:
    """The photo without the patches that turn the answer."""
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
