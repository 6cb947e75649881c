"""Images to evaluate on, with their labels as the model's classes, and which of them were in
training."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vit.bundle import Bundle
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset, printable
from vit.data.duplicates import find_duplicates
from vit.data.images import Preprocess
from vit.data.open import DatasetSplits, open_for_model, open_passed
from vit.prediction.predictor import Pixels, Predictor
from vit.prediction.probabilities import Ints
from vit.runtime.arguments import check_kind, shorten
from vit.runtime.processes import current_process

# below which an interval says nothing
MIN_CORRECT_IMAGES = 8
_MAX_DUPLICATE_NAMES = 20


@dataclass(frozen=True)
class EvaluationSet:
    """Decoded images to evaluate on."""

    dataset: ImageDataset
    # the dataset's, as text that any file can hold
    ids: tuple[str, ...]
    # indices of the model's classes
    labels: Ints
    preprocess: Preprocess
    # of the data set, for readers
    title: str = ""
    # of the data set that the model was trained on, where the images are of it: listed already
    splits: DatasetSplits | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, start: int, stop: int) -> Pixels:
        """Images start … stop-1 as the model sees them, uint8 [B, H, W, 3]."""
        # only a scan has none
        assert self.dataset.pixels is not None
        return self.preprocess.crop(self.dataset.pixels[start:stop])


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


def load_images(
    dataset: DatasetSplits,
    split: str | None,
    *,
    preprocess: Preprocess,
    class_names: Sequence[str],
    progress: bool,
) -> EvaluationSet:
    """Decode a split, and match its classes with the model's.

    Args:
        dataset: where the images are.
        split: name; None for the default one.
        preprocess: the model's.
        class_names: the model's.
        progress: show a progress bar.

    Raises:
        ValueError: a class of the data is not one of the model's.
    """
    source = dataset.split(split)
    # before the decoding, which takes minutes: foreign classes are refused
    class_indices = match_classes(
        source.labels, source_classes=source.class_names, model_classes=class_names
    )
    decoded = decode_dataset(
        source,
        size=preprocess.resize_size,
        interpolation=preprocess.interpolation,
        cache_dir=dataset.cache_dir,
        progress=progress,
        check_cache=dataset.check_cache,
    )
    return EvaluationSet(
        dataset=decoded,
        ids=tuple(printable(name) for name in decoded.ids),
        labels=class_indices[decoded.labels],
        preprocess=preprocess,
        title=printable(dataset.title),
    )


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


def match_classes(
    labels: Ints, *, source_classes: Sequence[str], model_classes: Sequence[str]
) -> Ints:
    """For each class of the source the index of the model's class of that name, -1 without one.

    A name also fits a list of synonyms that it begins ("tench" fits "tench, Tinca tinca", timm's
    spelling).

    Raises:
        ValueError: names the classes that occur among the labels and that the model doesn't know.
    """
    first_words = [name.partition(",")[0] for name in model_classes]
    counts = Counter(first_words)
    index = {word: position for position, word in enumerate(first_words) if counts[word] == 1}
    index |= {name: position for position, name in enumerate(model_classes)}
    occurring = [source_classes[label] for label in np.unique(labels)]
    unknown = [name for name in occurring if name not in index]
    if unknown:
        unknown_names = shorten(", ".join(map(repr, unknown)))
        known_names = shorten(", ".join(map(repr, model_classes)))
        raise ValueError(
            f"the model doesn't know {unknown_names} of this data; it knows {known_names}"
        )
    return np.array([index.get(name, -1) for name in source_classes], dtype=np.int64)


def select_images(
    dataset: ImageDataset, preprocess: Preprocess, *, count: int, seed: int = 0
) -> tuple[Float[Tensor, "n 3 H W"], list[str]]:
    """Choose images, whatever a model says of them.

    Args:
        dataset: the images; unreadable ones are passed over.
        preprocess: of the model.
        count: number of images, the first ones in an order shuffled with `seed`.
        seed: of the order.

    Returns:
        Model inputs and ids.

    Raises:
        ValueError: fewer than `MIN_CORRECT_IMAGES` can be read.
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
    """Choose images that the model predicts correctly: a wrong prediction has no evidence that a
    map could point at.

    Args:
        bundle: the model, on its device.
        dataset: the images; unreadable ones are passed over.
        count: number of images, the first ones in an order shuffled with `seed`.
        batch_size: images a forward pass.
        seed: of the order.

    Returns:
        Model inputs, classes and ids.

    Raises:
        ValueError: fewer than `MIN_CORRECT_IMAGES` are predicted correctly.
    """
    class_indices = match_classes(
        dataset.labels, source_classes=dataset.class_names, model_classes=bundle.class_names
    )
    labels = class_indices[dataset.labels]
    predictor = Predictor.from_bundle(bundle, batch_size=batch_size, precision="float32")
    images = _read_shuffled(dataset, bundle.preprocess, seed)
    correct: dict[int, Pixels] = {}
    while len(correct) < count and (batch := list(islice(images, batch_size))):
        predicted = predictor.predict_images([pixels for _, pixels in batch]).argmax(axis=1)
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
    """The index and the pixels of each image that can be read, in an order shuffled with `seed`."""
    for index in np.random.default_rng(seed).permutation(len(dataset)).tolist():
        # an unreadable one
        with suppress(ValueError, OSError):
            yield index, preprocess.to_uint8(dataset.image(index))


def check_data(data: str | Path | None, dataset: Any) -> None:
    """Check the arguments `data` and `dataset` of a public function, before its model is loaded.

    Raises:
        ValueError: Both are given, or `data` is neither a name nor a path.
    """
    if data is None:
        return
    expected = "a name or path; pass images from Python as dataset=…"
    check_kind(data, (str, Path), name="data", expected=expected)
    if dataset is not None:
        raise ValueError("data names images and dataset passes others; give one of them")


def open_data(
    bundle: Bundle,
    data: str | Path | None,
    root: str | Path | None,
    dataset: Any,
    class_names: Sequence[str] | None,
) -> DatasetSplits:
    """Open the images that a model is measured on: those that the user passes or names, otherwise
    those that it was trained on."""
    if dataset is not None:
        return open_passed(dataset, class_names=class_names, model_classes=bundle.class_names)
    if data is None and bundle.passed_images is not None:
        return bundle.passed_images
    return open_for_model(data, root=root, trained_on=bundle.config.get("data", {}))
