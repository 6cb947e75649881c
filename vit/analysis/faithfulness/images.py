"""The images that maps are measured on."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.evaluation.images import match_classes
from vit.prediction.predictor import Pixels, Predictor, read_from

# an interval over fewer images says nothing
MIN_CORRECT_IMAGES = 8


def select_images(
    dataset: ImageDataset, preprocess: Preprocess, *, count: int, seed: int = 0
) -> tuple[Float[Tensor, "n 3 H W"], list[str]]:
    """Choose images whatever the model predicts for them.

    Args:
        dataset: The images; unreadable ones are skipped.
        preprocess: The preprocessing of the model.
        count: Number of images: the first ones in a random order.
        seed: Seed of that order.

    Returns:
        Model inputs and ids.

    Raises:
        ValueError: Fewer than `MIN_CORRECT_IMAGES` can be read.
    """
    chosen = dict(islice(_read_shuffled(dataset, preprocess, seed), count))
    if len(chosen) < MIN_CORRECT_IMAGES:
        raise ValueError(
            f"{len(chosen)} of {len(dataset)} images can be read; {MIN_CORRECT_IMAGES} are needed"
        )
    pixels = torch.from_numpy(np.stack(list(chosen.values())))
    return preprocess.normalize(pixels), [dataset.ids[index] for index in chosen]


def select_correct_images(
    bundle: Bundle, dataset: ImageDataset, *, count: int, batch_size: int = 32, seed: int = 0
) -> tuple[Float[Tensor, "n 3 H W"], Int[Tensor, " n"], list[str]]:
    """Choose images that the model predicts correctly: no map can point at evidence for a wrong
    prediction.

    Args:
        bundle: The model, on its device.
        dataset: The images; unreadable ones are skipped.
        count: Number of images: the first ones in a random order.
        batch_size: Images at a time.
        seed: Seed of that order.

    Returns:
        Model inputs, classes and ids.

    Raises:
        ValueError: Fewer than `MIN_CORRECT_IMAGES` are predicted correctly.
    """
    class_indices = match_classes(
        dataset.labels, source_classes=dataset.class_names, model_classes=bundle.class_names
    )
    labels = class_indices[dataset.labels]
    predictor = Predictor.from_bundle(bundle, batch_size=batch_size, precision="float32")
    images = _read_shuffled(dataset, bundle.preprocess, seed)
    correct: dict[int, Pixels] = {}
    while len(correct) < count and (batch := list(islice(images, batch_size))):
        read = read_from([pixels for _, pixels in batch])
        predicted = predictor.predict(read, count=len(batch)).argmax(axis=1)
        for (index, pixels), class_index in zip(batch, predicted, strict=True):
            if class_index == labels[index]:
                correct[index] = pixels

    chosen = list(correct)[:count]
    if len(chosen) < MIN_CORRECT_IMAGES:
        raise ValueError(
            f"the model predicts {len(chosen)} of {len(dataset)} images correctly;"
            f" {MIN_CORRECT_IMAGES} are needed"
        )
    inputs = torch.from_numpy(np.stack([correct[index] for index in chosen]))
    ids = [dataset.ids[index] for index in chosen]
    return bundle.preprocess.normalize(inputs), torch.from_numpy(labels[chosen]), ids


def _read_shuffled(
    dataset: ImageDataset, preprocess: Preprocess, seed: int
) -> Iterator[tuple[int, Pixels]]:
    """Read images in a random order; yield index and pixels of those that can be read."""
    for index in np.random.default_rng(seed).permutation(len(dataset)).tolist():
        # unreadable images are skipped
        with suppress(ValueError, OSError):
            yield index, preprocess.to_uint8(dataset.image(index))
