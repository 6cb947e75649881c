"""Why one class is predicted as another, for the report.

For each pair of classes that is confused more than by chance: the most confident errors with their
contrast maps, the patches whose removal changes the prediction, and the nearest training photos of
both classes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from scipy.special import bdtrc
from torch import Tensor

from vit.bundle import Bundle
from vit.evaluation.metrics import ConfusedPair, Scores, count_confusions
from vit.explanation.capture.reader import read_bundle
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.token_ablation import build_removal, compute_without
from vit.explanation.methods.maps import compute_maps
from vit.explanation.render.page import encode_photo, encode_signed_map
from vit.explanation.targets import build_difference
from vit.explanation.training_photos import TrainingPhotos
from vit.prediction.labels import find_classes
from vit.prediction.predictor import Pixels
from vit.prediction.probabilities import Ints
from vit.runtime.device import copy_to_device
from vit.runtime.machine import read_work_clock

if TYPE_CHECKING:
    # A result writes its own report.
    from vit.evaluation.result import EvaluationResult

_MAX_PAIRS = 6
_MAX_ERRORS = 3
# p-value of a pair's errors if errors were spread evenly over the classes
_CHANCE = 0.05
_SIDE = 128

# Both explain the difference of two logits: by what the model computes, and by removing patches.
CONTRAST_METHODS = ("libra-fullgrad", "removal-gradient")
# largest fraction of the patches that is removed
_MAX_REMOVED = 0.25
# The number of removed patches grows by this factor.
_STEP = 1.4
_BATCH = 16


@dataclass(frozen=True)
class Contrast:
    """Why one image has a wrong prediction.

    Attributes:
        maps: Maps by method, [rows, columns]. Positive values are evidence for the predicted class
            and against the label.
        removed: The fewest patches found whose removal changes the prediction; empty if removing a
            quarter of the patches doesn't change it.
        answer: Class that the model predicts without them.
    """

    maps: dict[str, Float[np.ndarray, "rows columns"]]
    removed: list[int]
    answer: int | None


# a pair of classes, and its most confident errors as the template shows them
ExplainedPair = tuple[ConfusedPair, list[dict[str, Any]]]


def explain_confusions(
    result: "EvaluationResult", training_photos: TrainingPhotos, *, seconds: float
) -> list[ExplainedPair]:
    """Explain the pairs of classes that are confused most, in about so many seconds of work, see
    `read_work_clock`.

    Returns:
        The explained pairs; none for a model whose attention can't be read.
    """
    device = result.bundle.device.type
    deadline = read_work_clock(device) + seconds
    pairs = find_confused_pairs(result.scores)
    errors = [_choose_errors(result.scores, pair)[:_MAX_ERRORS].tolist() for pair in pairs]
    # one error of each pair before the second of any
    candidates = [
        (pair, images[place])
        for place in range(_MAX_ERRORS)
        for pair, images in zip(pairs, errors, strict=True)
        if place < len(images)
    ]
    chosen: list[tuple[ConfusedPair, int, Pixels, Contrast]] = []
    for pair, index in candidates:
        start = read_work_clock(device)
        pixels = result.images.read(index, index + 1)
        labels, predicted = np.array([pair.label]), np.array([pair.predicted])
        # the report does without them for a model whose attention can't be read
        try:
            (contrast,) = contrast_errors(
                result.bundle, pixels, labels=labels, predicted=predicted, verify=not chosen
            )
        except ValueError:
            return []
        chosen.append((pair, index, pixels[0], contrast))
        # no error is begun that would end too late
        if 2 * read_work_clock(device) - start > deadline:
            break
    if not chosen:
        return []
    classes = [(pair.label, pair.predicted) for pair, *_ in chosen]
    neighbours = training_photos.find_of_classes([pixels for *_, pixels, _ in chosen], classes)
    # a wrong label explains an error without any map
    suspects = {example.path for example in result.evaluation.examples.label_errors}
    explained: dict[ConfusedPair, list[dict[str, Any]]] = {}
    for (pair, index, pixels, contrast), nearest in zip(chosen, neighbours, strict=True):
        path = result.images.ids[index]
        explained.setdefault(pair, []).append(
            {
                "path": path,
                "probability": float(result.scores.confidence[index]),
                "is_suspect": path in suspects,
                "neighbours": nearest,
                **_draw_contrast(pixels, contrast),
            }
        )
    return list(explained.items())


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
    return {
        "photo": encode_photo(photo, side=_SIDE),
        "maps": [
            (method, encode_signed_map(photo, values, side=_SIDE))
            for method, values in contrast.maps.items()
        ],
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


def contrast_errors(
    bundle: Bundle,
    pixels: UInt8[np.ndarray, "n H W 3"],
    *,
    labels: Int[np.ndarray, " n"],
    predicted: Int[np.ndarray, " n"],
    verify: bool = True,
) -> list[Contrast]:
    """Explain images with wrong predictions.

    Args:
        bundle: The model.
        pixels: The images as the model sees them.
        labels: Their classes.
        predicted: The predicted classes.
        verify: Check with the first batch that the model's attention can be read.

    Raises:
        ValueError: The model's attention can't be read.
    """
    contrasts: list[Contrast] = []
    for start in range(0, len(pixels), _BATCH):
        rows = slice(start, start + _BATCH)
        batch = torch.from_numpy(np.ascontiguousarray(pixels[rows]))
        images = bundle.preprocess.normalize(copy_to_device(batch, bundle.device))
        wrong = torch.from_numpy(predicted[rows])
        right = torch.from_numpy(labels[rows])
        forward, _, maps = compute_maps(
            read_bundle(bundle),
            images,
            methods=CONTRAST_METHODS,
            target=build_difference(bundle.class_names, wrong, right),
            verify=verify and start == 0,
        )
        # [M, B, rows, columns]
        values = torch.stack([method_maps.values[:, 0] for method_maps in maps]).cpu()
        turned = _turn_answers(bundle, images, values.flatten(2), forward.grid, wrong)
        for row, (removed, answer) in enumerate(turned):
            image_maps = dict(zip(CONTRAST_METHODS, values[:, row].numpy(), strict=True))
            contrasts.append(Contrast(image_maps, removed, answer))
    return contrasts


def _turn_answers(
    bundle: Bundle,
    images: Float[Tensor, "B 3 height width"],
    values: Float[Tensor, "M B P"],
    grid: Grid,
    predicted: Int[Tensor, " B"],
) -> list[tuple[list[int], int | None]]:
    """Find for each image the fewest patches whose removal changes the prediction, and the new
    prediction. Patches are removed in the order of either map, the most important first."""
    num_images, num_patches = values.shape[1:]
    counts = _list_counts(num_patches)
    # rank of each patch by each map; 0 is the strongest evidence for the wrong class
    ranks = values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    removed = ranks[None] < torch.tensor(counts)[:, None, None, None]  # [N, M, B, P]
    places = torch.arange(num_images).repeat(len(counts) * len(values))
    compute_kept = build_removal(read_bundle(bundle), images, grid=grid, batch_size=_BATCH)
    logits = compute_without(
        compute_kept, places.to(images.device), removed.flatten(0, 2).to(images.device)
    )
    classes = find_classes(bundle, logits.float().cpu().numpy())
    answers = torch.from_numpy(classes).reshape(-1, num_images)  # [N · M, B]
    sets = removed.flatten(0, 1)  # [N · M, B, P], the smallest first

    turned: list[tuple[list[int], int | None]] = [([], None)] * num_images
    is_turned = answers != predicted
    for image in is_turned.any(dim=0).nonzero()[:, 0].tolist():
        first = int(is_turned[:, image].nonzero()[0])
        patches = sets[first, image].nonzero()[:, 0].tolist()
        turned[image] = (patches, int(answers[first, image]))
    return turned


def _list_counts(num_patches: int) -> list[int]:
    """Return numbers of patches to remove: 1, 2, 3 and on in growing steps, up to a quarter."""
    counts = []
    count = 1.0
    while round(count) <= max(num_patches * _MAX_REMOVED, 1):
        counts.append(round(count))
        count = max(count * _STEP, count + 1)
    return counts
