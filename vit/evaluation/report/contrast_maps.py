"""Maps of why an image of one class is predicted as another, and the patches whose removal changes
the prediction."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from vit.bundle import Bundle
from vit.explanation.capture.reader import ModelReader
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.token_ablation import build_removal, compute_without
from vit.explanation.methods.maps import compute_maps
from vit.explanation.targets import build_target
from vit.runtime.device import copy_to_device

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


def contrast_errors(
    bundle: Bundle,
    pixels: UInt8[np.ndarray, "n H W 3"],
    *,
    labels: Int[np.ndarray, " n"],
    predicted: Int[np.ndarray, " n"],
) -> list[Contrast]:
    """Explain images with wrong predictions.

    Args:
        bundle: The model.
        pixels: The images as the model sees them.
        labels: Their classes.
        predicted: The predicted classes.

    Raises:
        ValueError: The model's attention can't be read.
    """
    contrasts: list[Contrast] = []
    for start in range(0, len(pixels), _BATCH):
        rows = slice(start, start + _BATCH)
        batch = torch.from_numpy(np.ascontiguousarray(pixels[rows]))
        images = bundle.preprocess.normalize(copy_to_device(batch, bundle.device))
        batch_predicted = torch.from_numpy(predicted[rows])
        target = build_target(
            _build_difference(torch.from_numpy(labels[rows]), batch_predicted), bundle.class_names
        )
        forward, _, maps = compute_maps(
            bundle.find_once(ModelReader),
            images,
            methods=CONTRAST_METHODS,
            target=target,
            # a model whose attention can't be read is refused with the first batch
            verify=start == 0,
        )
        # [M, B, rows, columns]
        values = torch.stack([method_maps.values[:, 0] for method_maps in maps]).cpu()
        turned = _turn_answers(
            bundle, images, values.flatten(2), grid=forward.grid, predicted=batch_predicted
        )
        for row, (removed, answer) in enumerate(turned):
            image_maps = dict(zip(CONTRAST_METHODS, values[:, row].numpy(), strict=True))
            contrasts.append(Contrast(image_maps, removed, answer))
    return contrasts


def _build_difference(
    labels: Int[Tensor, " B"], predicted: Int[Tensor, " B"]
) -> Callable[[Tensor], Tensor]:
    """Return a function that maps the logits of a batch to the lead of each image's wrong class."""

    def difference(logits: Tensor) -> Tensor:
        wrong = logits.gather(1, predicted[:, None].to(logits.device))
        right = logits.gather(1, labels[:, None].to(logits.device))
        return (wrong - right)[:, 0]

    return difference


def _turn_answers(
    bundle: Bundle,
    images: Float[Tensor, "B 3 height width"],
    values: Float[Tensor, "M B P"],
    *,
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
    compute_kept = build_removal(
        bundle.find_once(ModelReader), images, grid=grid, batch_size=_BATCH
    )
    logits = compute_without(
        compute_kept, places.to(images.device), removed.flatten(0, 2).to(images.device)
    )
    answers = logits.argmax(dim=1).cpu().reshape(-1, num_images)  # [N · M, B]
    sets = removed.flatten(0, 1)  # [N · M, B, P], the smallest first

    turned: list[tuple[list[int], int | None]] = []
    for image in range(num_images):
        flips = (answers[:, image] != predicted[image]).nonzero()[:, 0]
        if len(flips):
            first = int(flips[0])
            patches = sets[first, image].nonzero()[:, 0].tolist()
            turned.append((patches, int(answers[first, image])))
        else:
            turned.append(([], None))
    return turned


def _list_counts(num_patches: int) -> list[int]:
    """Return numbers of patches to remove: 1, 2, 3 and on in growing steps, up to a quarter."""
    counts = []
    count = 1.0
    while round(count) <= max(num_patches * _MAX_REMOVED, 1):
        counts.append(round(count))
        count = max(count * _STEP, count + 1)
    return counts
