"""Why a prediction is wrong: the evidence that decided, and the patches whose removal turns the
answer."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vit.bundle import Bundle
from vit.evaluation.metrics import Scores
from vit.explanation.capture.forward import Forward
from vit.explanation.methods.maps import compute_maps
from vit.explanation.patch_removal import build_removal
from vit.explanation.targets import LABEL, build_difference
from vit.prediction.batch_predictor import Pixels
from vit.prediction.decision import (
    compute_probabilities,
    decide_classes,
    decide_labels,
    read_thresholds,
)
from vit.runtime.device import copy_to_device

# explains the difference of two logits, or one, by what the model computes
METHOD = "libra-fullgrad"
# pixels
SIDE = 128
# largest fraction of the patches that is removed
_MAX_REMOVED = 0.25
# numbers of patches that are removed in turn; each takes forward passes
_NUM_COUNTS = 7
_BATCH = 16


class Mistake(NamedTuple):
    """A wrong prediction of the image with this number: its class and the predicted one; or twice
    the label that is missed, or falsely found."""

    image: int
    place: int
    predicted: int
    is_missed: bool


class Contrast(NamedTuple):
    """Why one image has a wrong prediction: the evidence for it and against the right one, the
    fewest patches found whose removal changes the answer, none if a quarter of them doesn't, and
    the class that the model predicts without them, None for a label."""

    values: Float[np.ndarray, "rows columns"]
    removed: list[int]
    answer: int | None

    def describe(self, class_names: Sequence[str]) -> str:
        """Say which patches change the answer."""
        if not self.removed:
            return "Removing up to a quarter of the patches does not change the prediction."
        answer = "the answer is right"
        if self.answer is not None:
            answer = f"it is predicted as {class_names[self.answer]}"
        count = len(self.removed)
        return f"without {count} patch{'es' * (count > 1)} {answer}"


def choose_mistakes(scores: Scores, count: int) -> list[Mistake]:
    """Choose up to `count` of the clearest mistakes: the most confident wrong classes; or the
    labels whose probability is farthest from the truth, one of each label in turn."""
    if scores.is_multilabel:
        images, places = np.nonzero(scores.labels != scores.predicted)
        predicted, is_missed = places, scores.labels[images, places]
        clarity = np.abs(scores.labels - scores.probabilities)[images, places]
        # how many mistakes of the same label are clearer
        ordered, by_label = np.sort(places), np.lexsort((-clarity, places))
        turns = (np.arange(len(places)) - ordered.searchsorted(ordered))[by_label.argsort()]
    else:
        images = np.flatnonzero(~scores.correct)
        places, predicted = scores.labels[images], scores.predicted[images]
        clarity, is_missed = scores.confidence[images], np.ones(len(images), bool)
        turns = np.zeros(len(images), int)
    chosen = np.lexsort((-clarity, turns))[:count]
    columns = (column[chosen].tolist() for column in (images, places, predicted, is_missed))
    return [Mistake(*row) for row in zip(*columns, strict=True)]


def whiten(photo: Pixels, contrast: Contrast) -> Pixels:
    """Return the photo with the removed patches in white."""
    rows, columns = contrast.values.shape
    is_removed = np.isin(np.arange(rows * columns), contrast.removed).reshape(rows, columns)
    patch = np.ones((photo.shape[0] // rows, photo.shape[1] // columns), dtype=bool)
    return np.where(np.kron(is_removed, patch)[:, :, None], np.uint8(255), photo)


def explain_mistakes(
    bundle: Bundle, mistakes: Sequence[Mistake], pixels: Sequence[Pixels]
) -> list[Contrast]:
    """Explain mistakes of a model in images as it sees them, [H, W, 3] each. Raises ValueError if
    its attention can't be read."""
    contrasts: list[Contrast] = []
    for start in range(0, len(pixels), _BATCH):
        part = mistakes[start : start + _BATCH]
        batch = torch.from_numpy(np.stack(pixels[start : start + _BATCH]))
        images = bundle.preprocess.normalize(copy_to_device(batch, bundle.device))
        _, places, predicted, is_missed = map(torch.tensor, zip(*part, strict=True))
        target = build_difference(bundle.class_names, predicted, places)
        if bundle.is_multilabel:
            target = LABEL.with_classes(places)
        forward, _, (maps,) = compute_maps(bundle.model, images, methods=[METHOD], target=target)
        values = maps[:, 0].cpu()  # [B, rows, columns]
        if bundle.is_multilabel:
            # where a label is missed, the evidence against it was wrong
            values = values * (1 - 2 * is_missed.int())[:, None, None]
        contrasts += _turn_answers(bundle, forward, values, part)
    return contrasts


def _turn_answers(
    bundle: Bundle,
    forward: Forward,
    values: Float[Tensor, "B rows columns"],
    mistakes: Sequence[Mistake],
) -> list[Contrast]:
    """Find for each image the fewest patches whose removal changes the answer, and the new class.
    Patches are removed in the order of the map, the most important first; each answer without them
    is that of a forward pass."""
    order = values.flatten(1).argsort(dim=-1, descending=True, stable=True)
    # growing, up to the largest number
    steps = np.geomspace(1, max(order.shape[1] * _MAX_REMOVED, 1), _NUM_COUNTS)
    counts = np.unique(steps.round()).astype(int).tolist()
    images = forward.images.detach()
    compute_kept = build_removal(forward.reader, images, grid=forward.grid, batch_size=_BATCH)
    rows = torch.arange(len(images), device=images.device)
    # without the strongest evidence for the wrong answer, and more and more of it
    logits = [
        compute_kept(rows, order[:, count:].sort(dim=1).values.to(images.device))
        for count in counts
    ]
    found = torch.cat(logits).float().cpu().numpy()
    _, places, predicted, is_missed = map(np.array, zip(*mistakes, strict=True))
    probabilities = compute_probabilities(bundle, found)
    if bundle.is_multilabel:
        decided = decide_labels(bundle, probabilities)
        answers = decided[np.arange(len(found)), np.tile(places, len(counts))]
        is_turned = answers.reshape(len(counts), -1) == is_missed
    else:
        answers = decide_classes(read_thresholds(bundle), probabilities)
        is_turned = answers.reshape(len(counts), -1) != predicted
    contrasts = []
    for row, first in enumerate(is_turned.argmax(axis=0).tolist()):
        patches, answer = [], None
        if is_turned[first, row]:
            patches = sorted(order[row, : counts[first]].tolist())
            if not bundle.is_multilabel:
                answer = int(answers[first * len(images) + row])
        contrasts.append(Contrast(values[row].numpy(), patches, answer))
    return contrasts
