"""Why images of one class are taken for another: which patches speak for the wrong class rather
than the right one, and which turn the answer when they are left out."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from vit.bundle import Bundle
from vit.explanation.capture.tokens import Grid
from vit.explanation.faithfulness.token_ablation import build_removal, compute_without
from vit.explanation.methods.registry import compute_maps
from vit.explanation.targets import build_target
from vit.runtime.device import copy_to_device

# of the difference of two logits: what the model computes with, and what leaving patches out does
CONTRAST_METHODS = ("libra-fullgrad", "removal-gradient")
# of the patches, that are left out at most
_MAX_REMOVED = 0.25
# steps of their number, each so many times the last
_STEP = 1.4
_BATCH = 16


@dataclass(frozen=True)
class Contrast:
    """Why one image has a wrong answer.

    Args:
        maps: by method, [rows, columns]: above zero speaks for the predicted class and against the
            label.
        removed: patches without which the answer is another, as few as were found; empty where a
            quarter of the patches doesn't suffice.
        answer: the class that the model predicts without them.
    """

    maps: dict[str, Float[np.ndarray, "rows columns"]]
    removed: list[int]
    answer: int | None


def contrast_errors(
    bundle: Bundle, pixels: UInt8[np.ndarray, "n H W 3"], *, label: int, predicted: int
) -> list[Contrast]:
    """Explain images of class `label` that are predicted as `predicted`.

    Args:
        bundle: the model.
        pixels: as the model sees them.
        label: their class.
        predicted: the model's answer.

    Raises:
        ValueError: for a model whose attention can't be read.
    """
    device = next(bundle.model.parameters()).device

    def difference(logits: Tensor) -> Tensor:
        return logits[:, predicted] - logits[:, label]

    target, choose_targets = build_target(difference, bundle.class_names)
    contrasts = []
    for start in range(0, len(pixels), _BATCH):
        batch = torch.from_numpy(np.ascontiguousarray(pixels[start : start + _BATCH]))
        images = bundle.preprocess.normalize(copy_to_device(batch, device))
        forward, _, maps = compute_maps(
            bundle.model,
            images,
            methods=CONTRAST_METHODS,
            choose_targets=choose_targets,
            target=target,
        )
        values = torch.stack([of_method.values[:, 0] for of_method in maps]).cpu()  # [M, B, …]
        removed, answers = _turn_answers(
            bundle, images, values.flatten(2), grid=forward.grid, predicted=predicted
        )
        for row in range(len(images)):
            of_image = values[:, row].numpy()
            contrasts.append(
                Contrast(
                    maps=dict(zip(CONTRAST_METHODS, of_image, strict=True)),
                    removed=removed[row],
                    answer=answers[row],
                )
            )
    return contrasts


def _turn_answers(
    bundle: Bundle,
    images: Tensor,
    values: Float[Tensor, "M B P"],
    *,
    grid: Grid,
    predicted: int,
) -> tuple[list[list[int]], list[int | None]]:
    """The fewest patches of each image, from the most important on by either map, without which the
    model answers otherwise; and what it answers then."""
    num_images, num_patches = values.shape[1:]
    counts = _list_counts(num_patches)
    # rank of each patch by each map, 0 for the one that speaks most for the wrong class
    ranks = values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    removed: Bool[Tensor, "N M B P"] = ranks[None] < torch.tensor(counts)[:, None, None, None]
    places = torch.arange(num_images).repeat(len(counts) * len(values))
    compute_kept = build_removal(bundle.model, images, grid=grid, batch_size=_BATCH)
    logits = compute_without(
        compute_kept, places.to(images.device), removed.flatten(0, 2).to(images.device)
    )
    answers = logits.argmax(dim=1).cpu().reshape(-1, num_images)  # [N · M, B]
    sets = removed.flatten(0, 1)  # [N · M, B, P], the smallest first

    fewest: list[list[int]] = []
    turned: list[int | None] = []
    for image in range(num_images):
        flips = (answers[:, image] != predicted).nonzero()[:, 0]
        if len(flips):
            first = int(flips[0])
            fewest.append(sets[first, image].nonzero()[:, 0].tolist())
            turned.append(int(answers[first, image]))
        else:
            fewest.append([])
            turned.append(None)
    return fewest, turned


def _list_counts(num_patches: int) -> list[int]:
    """Numbers of patches to leave out: 1, 2, 3 and on in growing steps to a quarter of them."""
    counts = []
    count = 1.0
    while round(count) <= max(num_patches * _MAX_REMOVED, 1):
        counts.append(round(count))
        count = max(count * _STEP, count + 1)
    return counts
