"""Pooled features of images, from one forward pass and from then on from the cache."""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vit.data.dataset import ImageDataset
from vit.evaluation.prediction import Pixels, Predictor
from vit.model.block_features import (
    Readout,
    compute_block_features,
    count_channels,
    list_readouts,
)
from vit.model.model_file import hash_weights
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import default_cache_dir, write_atomically
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress

# raise it when the features or their files change
_FORMAT = 1
# of the tensor in a file
_NAME = "features"
# the arguments of our model that no feature depends on
_NEUTRAL = ("num_classes", "global_pool", "drop_path_rate")

# (number of blocks, pooling) → the images' features
Features = Mapping[Readout, Float[Tensor, "n D"]]


def compute_features(
    predictor: Predictor,
    dataset: ImageDataset,
    *,
    cache_dir: Path | None = None,
    progress: bool = True,
) -> Features:
    """The pooled features of images after each block of a model.

    They are computed once and kept in the cache, under a name that changes with the weights, the
    preprocessing, the precision and the images.

    Args:
        predictor: the model, with the conditions under which it runs.
        dataset: the images; unless they are decoded, each is read when its batch comes.
        cache_dir: the cache; None is $VIT_CACHE or ~/.cache/vit.
        progress: whether a progress bar is shown.

    Returns:
        By number of blocks and pooling ("token": the class token, "avg": the mean of the patches),
        float32 [n, D] on the CPU. Of a model that isn't ours under (0, "pre_logits") what its last
        linear layer reads.

    Raises:
        ValueError: an image can't be read, or the model has no pooled features.
        OSError: an image can't be read, or the cache can't be written.
    """
    folder = cache_dir or default_cache_dir()
    key = _cache_key(predictor, dataset)
    path = folder / f"{dataset.name}-{dataset.split}-features-{key}.safetensors"
    readouts = list_readouts(predictor.model)
    shape = (len(dataset), len(readouts), count_channels(predictor.model))
    values = _load(path, shape)
    process = current_process()
    # all processes compute them, or none
    if process.any_rank(values is None):
        values = _compute(predictor, dataset, shape, shown=progress and process.is_main)
        if process.is_main:
            _save(path, values)
    assert values is not None
    return {readout: values[:, place] for place, readout in enumerate(readouts)}


def _compute(
    predictor: Predictor, dataset: ImageDataset, shape: tuple[int, int, int], *, shown: bool
) -> Float[Tensor, "n R D"]:
    preprocess = predictor.preprocess

    def read(start: int, stop: int) -> Pixels:
        if dataset.pixels is not None:
            return preprocess.crop(dataset.pixels[start:stop])
        dataset.reader.fetch(range(start, stop))
        images = [preprocess.to_uint8(dataset.image(index)) for index in range(start, stop)]
        return np.stack(images)

    title = f"features of {dataset.name} {dataset.split}"
    with show_progress(title, len(dataset), shown=shown) as advance:
        return predictor.compute(
            partial(compute_block_features, predictor.model),
            read,
            shape=shape,
            on_progress=advance,
        )


def _cache_key(predictor: Predictor, dataset: ImageDataset) -> str:
    """16 hexadecimal digits that change with whatever the features depend on."""
    model = predictor.model
    architecture = getattr(model, "architecture", {})
    weights = model.state_dict()
    if isinstance(model, VisionTransformer):
        # the head reads the features, and another number of classes has another head
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
    # of decoded images the pixels, whatever becomes of their files' names and times
    images = dataset.cache_key()
    if dataset.hashes is not None:
        images = hashlib.sha256(dataset.digests.tobytes()).hexdigest()
    conditions = [
        _FORMAT,
        type(model).__qualname__,
        {name: value for name, value in architecture.items() if name not in _NEUTRAL},
        hash_weights(weights),
        predictor.preprocess.to_dict(),
        [predictor.precision, predictor.device.type],
        images,
    ]
    text = json.dumps(conditions, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load(path: Path, shape: tuple[int, int, int]) -> Tensor | None:
    """The features in a file; None where there is none, or one that is damaged."""
    try:
        values = load_file(path)[_NAME]
    except (OSError, LookupError, SafetensorError):
        return None
    is_intact = values.shape == shape and bool(values.isfinite().all())
    return values if is_intact else None


def _save(path: Path, values: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: save_file({_NAME: values}, temporary))
