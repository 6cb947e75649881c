"""Evaluated images that were in training."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.bundle import Bundle
from vit.data.cache import decode_dataset
from vit.data.duplicates import find_duplicates
from vit.data.open import open_for_model
from vit.evaluation.images import EvaluationSet
from vit.runtime.processes import current_process

_MAX_DUPLICATE_NAMES = 20


@dataclass(frozen=True)
class TrainTestOverlap:
    """Evaluated images that were in training: metrics on them don't measure generalisation.

    Attributes:
        exact: Number of images with the same pixels as one in training.
        near: Number of images with a similar perceptual hash: recoded, resized, mirrored or much
            alike.
        examples: Up to 20 of them, exact ones first.
        top1_without: Accuracy on the other images, 0 to 1; null if there are none.
    """

    exact: int
    near: int
    examples: list[str]
    top1_without: float | None


def find_overlap(
    bundle: Bundle, images: EvaluationSet, *, is_correct: NDArray[np.bool_]
) -> TrainTestOverlap | None:
    """Look for images that were in training; None if it isn't known which ones were.

    Args:
        bundle: The model.
        images: The evaluated images.
        is_correct: True for each of them that is predicted correctly, [n].
    """
    training_hashes = find_training_hashes(bundle)
    if training_hashes is None:
        return None
    assert images.dataset.hashes is not None
    exact, near = find_duplicates(images.dataset.hashes, training_hashes)
    indices = [*exact[:, 0].tolist(), *near[:, 0].tolist()]
    # the accuracy on images that the model has not seen
    others = np.delete(is_correct, indices)
    return TrainTestOverlap(
        exact=len(exact),
        near=len(near),
        examples=[images.ids[index] for index in indices[:_MAX_DUPLICATE_NAMES]],
        top1_without=float(others.mean()) if len(others) else None,
    )


def find_training_hashes(bundle: Bundle) -> NDArray[np.uint64] | None:
    """Return hashes of the images that a model was trained on, uint64 [2, n]; None if unknown.

    A model file holds them if all images were decoded before training. Otherwise they are computed
    here once, and the cache keeps them.
    """
    if bundle.training_hashes is not None:
        return np.stack(bundle.training_hashes)
    trained_on = bundle.config.get("data", {})
    if trained_on.get("pipeline") != "workers":
        return None
    try:
        splits = open_for_model(None, trained_on=trained_on)
        train = splits.split("train")
    # the images were passed from Python or are gone
    except (ValueError, OSError):
        return None
    # a download would take as long as an epoch
    if train.reader.is_remote:
        return None
    decoded = decode_dataset(
        train,
        size=None,
        cache_dir=splits.cache_dir,
        # training has already accepted the unreadable images
        max_unreadable_fraction=1.0,
        progress=current_process().is_main,
    )
    return decoded.hashes
