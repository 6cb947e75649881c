"""The images that maps are measured on."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.evaluation.images import match_classes
from vit.prediction.predictor import Pixels, Predictor, read_from
from vit.runtime.tensors import Images

# an interval over fewer images says nothing
MIN_IMAGES = 8


def select_images(
    bundle: Bundle, dataset: ImageDataset, *, count: int, seed: int = 0
) -> tuple[Images, list[str]]:
    """Choose images whatever the model predicts for them.

    Args:
        bundle: The model.
        dataset: The images; unreadable ones are skipped.
        count: Number of images: the first ones in a random order.
        seed: Seed of that order.

    Returns:
        Model inputs and ids.

    Raises:
        ValueError: Fewer than `MIN_IMAGES` can be read.
    """
    chosen = dict(islice(_read_shuffled(bundle, dataset, seed), count))
    return _prepare(bundle, dataset, chosen, "can be read")


def select_correct_images(
    bundle: Bundle, dataset: ImageDataset, *, count: int, batch_size: int = 32, seed: int = 0
) -> tuple[Images, Int[Tensor, " n"], list[str]]:
    """Choose images that the model predicts correctly: no map can point at evidence for a wrong
    prediction.

    Args:
        bundle, dataset, count, seed: See `select_images`.
        batch_size: Images at a time.

    Returns:
        Model inputs, classes and ids.

    Raises:
        ValueError: Fewer than `MIN_IMAGES` are predicted correctly.
    """
    class_indices = match_classes(
        dataset.labels, source_classes=dataset.class_names, model_classes=bundle.class_names
    )
    labels = class_indices[dataset.labels]
    predictor = Predictor.from_bundle(bundle, batch_size=batch_size, precision="float32")
    images = _read_shuffled(bundle, dataset, seed)
    correct: dict[int, Pixels] = {}
    while len(correct) < count and (batch := dict(islice(images, batch_size))):
        read = read_from(list(batch.values()))
        predicted = predictor.predict(read, count=len(batch)).argmax(axis=1)
        for index, class_index in zip(batch, predicted, strict=True):
            if class_index == labels[index]:
                correct[index] = batch[index]

    chosen = dict(islice(correct.items(), count))
    inputs, ids = _prepare(bundle, dataset, chosen, "are predicted correctly")
    return inputs, torch.from_numpy(labels[list(chosen)]), ids


def _read_shuffled(
    bundle: Bundle, dataset: ImageDataset, seed: int
) -> Iterator[tuple[int, Pixels]]:
    """Read images in a random order; yield index and pixels of those that can be read."""
    for index in np.random.default_rng(seed).permutation(len(dataset)).tolist():
        # unreadable images are skipped
        with suppress(ValueError, OSError):
            yield index, bundle.preprocess.to_uint8(dataset.image(index))


def _prepare(
    bundle: Bundle, dataset: ImageDataset, chosen: dict[int, Pixels], condition: str
) -> tuple[Images, list[str]]:
    """Return model inputs and ids. Raises ValueError for too few images, with their condition."""
    if len(chosen) < MIN_IMAGES:
        raise ValueError(
            f"{len(chosen)} of {len(dataset)} images {condition}; {MIN_IMAGES} are needed"
        )
    pixels = torch.from_numpy(np.stack(list(chosen.values())))
    return bundle.preprocess.normalize(pixels), [dataset.ids[index] for index in chosen]
