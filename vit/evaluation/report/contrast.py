"""Why a prediction is wrong: the evidence that decided, the patches whose removal turns the answer,
and the nearest training photos."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vit.bundle import Bundle
from vit.evaluation.metrics import Scores
from vit.explanation.capture.reader import read_bundle
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.token_ablation import build_removal, compute_without
from vit.explanation.methods.maps import compute_maps
from vit.explanation.targets import LABEL, build_difference
from vit.prediction.decision import compute_probabilities, decide_classes, decide_labels
from vit.prediction.predictor import Pixels
from vit.runtime.device import copy_to_device

# explains the difference of two logits, or one, by what the model computes
METHOD = "libra-fullgrad"
# pixels
SIDE = 128
# largest fraction of the patches that is removed
_MAX_REMOVED = 0.25
# The number of removed patches grows by this factor.
_STEP = 1.4
_BATCH = 16


class Mistake(NamedTuple):
    """A wrong prediction of one image.

    Attributes:
        index: Number of the image.
        place: Its class; or the label that is missed or falsely found.
        predicted: Class that is predicted; or the label.
        is_missed: False for a label that is falsely found.
    """

    index: int  # type: ignore[assignment]  # NamedTuple's own method of this name isn't used
    place: int
    predicted: int
    is_missed: bool = True


@dataclass(frozen=True)
class Contrast:
    """Why one image has a wrong prediction.

    Attributes:
        values: Evidence for the wrong answer and against the right one, [rows, columns].
        removed: The fewest patches found whose removal changes the answer; empty if removing a
            quarter of the patches doesn't change it.
        answer: Class that the model predicts without them; None for a label.
    """

    values: Float[np.ndarray, "rows columns"]
    removed: list[int]
    answer: int | None


def choose_mistakes(scores: Scores, count: int) -> list[Mistake]:
    """Choose up to `count` of the clearest mistakes: the most confident wrong classes; or of each
    label in turn an image where it is missed and one where it is falsely found, the clearest
    first."""
    if not scores.is_multilabel:
        # among equally confident ones, the first comes first
        surest_first = np.argsort(-scores.confidence, kind="stable")
        chosen = surest_first[~scores.correct[surest_first]][:count]
        return [
            Mistake(index, int(scores.labels[index]), int(scores.predicted[index]))
            for index in chosen.tolist()
        ]
    ranked: list[tuple[int, Mistake]] = []
    for place in range(scores.num_classes):
        has_label, is_found = scores.mark(place)
        # missed ones have the least probability first, falsely found ones the most
        order = np.argsort(scores.probabilities[:, place], kind="stable")
        is_wrong = (has_label != is_found)[order]
        for is_missed, indices in ((True, order[is_wrong]), (False, order[is_wrong][::-1])):
            chosen = indices[has_label[indices] == is_missed][:count]
            ranked += [
                (rank, Mistake(index, place, place, is_missed))
                for rank, index in enumerate(chosen.tolist())
            ]
    # the clearest of each label before the second of any
    ranked.sort(key=lambda pair: pair[0])
    return [mistake for _, mistake in ranked[:count]]


def whiten(photo: Pixels, contrast: Contrast) -> Pixels:
    """Return the photo with the removed patches in white."""
    rows, columns = contrast.values.shape
    height, width = photo.shape[0] // rows, photo.shape[1] // columns
    without = photo.copy()
    for patch in contrast.removed:
        top, left = patch // columns * height, patch % columns * width
        without[top : top + height, left : left + width] = 255
    return without


def explain_mistakes(
    bundle: Bundle, mistakes: Sequence[Mistake], pixels: Sequence[Pixels]
) -> list[Contrast]:
    """Explain mistakes.

    Args:
        bundle: The model.
        mistakes: The mistakes.
        pixels: Their images as the model sees them, [H, W, 3] each.

    Raises:
        ValueError: The model's attention can't be read.
    """
    contrasts: list[Contrast] = []
    for start in range(0, len(pixels), _BATCH):
        part = mistakes[start : start + _BATCH]
        batch = torch.from_numpy(np.stack(pixels[start : start + _BATCH]))
        images = bundle.preprocess.normalize(copy_to_device(batch, bundle.device))
        places = torch.tensor([mistake.place for mistake in part])
        predicted = torch.tensor([mistake.predicted for mistake in part])
        target = build_difference(bundle.class_names, predicted, places)
        if bundle.is_multilabel:
            target = LABEL.with_classes(places)
        forward, _, (maps,) = compute_maps(
            read_bundle(bundle), images, methods=[METHOD], target=target, verify=start == 0
        )
        values = maps.values[:, 0].cpu()  # [B, rows, columns]
        if bundle.is_multilabel:
            # where a label is missed, the evidence against it was wrong
            signs = torch.tensor([1 - 2 * each.is_missed for each in part])
            values = values * signs[:, None, None]
        turned = _turn_answers(bundle, images, values.flatten(1), forward.grid, part)
        contrasts += [
            Contrast(map_.numpy(), *each) for map_, each in zip(values, turned, strict=True)
        ]
    return contrasts


def _turn_answers(
    bundle: Bundle,
    images: Float[Tensor, "B 3 height width"],
    values: Float[Tensor, "B P"],
    grid: Grid,
    mistakes: Sequence[Mistake],
) -> list[tuple[list[int], int | None]]:
    """Find for each image the fewest patches whose removal changes the answer, and the new class.
    Patches are removed in the order of the map, the most important first; each answer without them
    is that of a forward pass."""
    num_images, num_patches = values.shape
    counts = torch.tensor(_list_counts(num_patches))
    # rank of each patch; 0 is the strongest evidence for the wrong answer
    ranks = values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    removed: Bool[Tensor, "N B P"] = ranks[None] < counts[:, None, None]
    places: Int[Tensor, " NB"] = torch.arange(num_images).repeat(len(counts))
    compute_kept = build_removal(read_bundle(bundle), images, grid=grid, batch_size=_BATCH)
    logits = compute_without(
        compute_kept, places.to(images.device), removed.flatten(0, 1).to(images.device)
    )
    found = logits.float().cpu().numpy()
    probabilities = compute_probabilities(bundle, found)
    if bundle.is_multilabel:
        answers = decide_labels(bundle, probabilities).astype(np.int64)
    else:
        answers = decide_classes(bundle, probabilities)
    answers = answers.reshape(len(counts), num_images, -1)
    turned: list[tuple[list[int], int | None]] = []
    for row, mistake in enumerate(mistakes):
        answer = answers[:, row, 0]
        is_turned = answer != mistake.predicted
        if bundle.is_multilabel:
            is_turned = answers[:, row, mistake.place] == mistake.is_missed
        if not is_turned.any():
            turned.append(([], None))
            continue
        first = int(is_turned.argmax())
        patches = removed[first, row].nonzero()[:, 0].tolist()
        turned.append((patches, None if bundle.is_multilabel else int(answer[first])))
    return turned


def _list_counts(num_patches: int) -> list[int]:
    """Return numbers of patches to remove: 1, 2, 3 and on in growing steps, up to a quarter."""
    counts = []
    count = 1.0
    while round(count) <= max(num_patches * _MAX_REMOVED, 1):
        counts.append(round(count))
        count = max(count * _STEP, count + 1)
    return counts
