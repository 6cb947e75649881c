"""Which of the evaluated images were in training."""

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
    """Evaluated images that were in training: metrics on them don't measure generalisation."""

    # the same pixels
    exact: int
    # a similar perceptual hash: recoded, rescaled, mirrored or much alike
    near: int
    # up to 20 of them, exact ones first
    examples: list[str]
    # top-1 of the other images; null where there are none
    top1_without: float | None


def find_training_hashes(bundle: Bundle) -> NDArray[np.uint64] | None:
    """Hashes of the images that a model was trained on, uint64 [2, n]; None where they are unknown.

    A model file holds them where all images were decoded before training. Those of images that were
    decoded as training went are computed here, once: the cache keeps them.
    """
    if bundle.training_hashes is not None:
        return np.stack(bundle.training_hashes)
    trained_on = bundle.config.get("data", {})
    if trained_on.get("pipeline") != "workers":
        return None
    try:
        splits = open_for_model(None, trained_on=trained_on)
        train = splits.split("train")
    # they were passed from Python, or are no longer there
    except (ValueError, OSError):
        return None
    # it would take as long as an epoch
    if train.reader.is_remote:
        return None
    decoded = decode_dataset(
        train,
        size=None,
        cache_dir=splits.cache_dir,
        # the training has judged that
        max_unreadable_fraction=1.0,
        progress=current_process().is_main,
    )
    return decoded.hashes


def count_duplicates(
    images: EvaluationSet, training_hashes: NDArray[np.uint64], *, is_correct: NDArray[np.bool_]
) -> TrainTestOverlap:
    """Look for `images` among those in training.

    Args:
        images: of which some may have been in training.
        training_hashes: of the images in training, uint64 [2, n].
        is_correct: whether the prediction of each of `images` is its label, bool [n].
    """
    # they are decoded
    assert images.dataset.hashes is not None
    duplicates = find_duplicates(images.dataset.hashes, training_hashes)
    indices = [*duplicates.exact[:, 0].tolist(), *duplicates.near[:, 0].tolist()]
    names = [images.ids[index] for index in indices[:_MAX_DUPLICATE_NAMES]]
    others = np.delete(is_correct, indices)
    return TrainTestOverlap(
        exact=len(duplicates.exact),
        near=len(duplicates.near),
        examples=names,
        top1_without=float(others.mean()) if len(others) else None,
    )
