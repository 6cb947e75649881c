"""Pooled features of the images of a data set: after each block, kept in the cache, or those that the
head reads."""

import hashlib
import json
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.model.logits import Readout, compute_block_features, count_features, list_readouts
from vit.model.model_file import hash_weights
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.predictor import BatchPredictor, Pixels
from vit.prediction.probabilities import Float32s, Ints
from vit.runtime.files import default_cache_dir, open_cached, read_arrays, write_arrays
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress

# Raise it when the features or their files change.
_FORMAT = 1
# arguments of our model that no feature depends on
_NEUTRAL = ("num_classes", "global_pool", "drop_path_rate")

# (number of blocks, pooling) → features of the images
Features = Mapping[Readout, Float[Tensor, "n D"]]


def compute_features(predictor: BatchPredictor, dataset: ImageDataset) -> Features:
    """Compute the pooled features of images after each block, or read them from the cache, where
    their name changes with the weights, the preprocessing, the precision and the images.

    Returns:
        Features by number of blocks and pooling ("token": the class token, "avg": the mean of the
        patches), float32 [n, D] on the CPU. For a model of timm, (0, "pre_logits") is the input of
        its classifier.

    Raises:
        ValueError, OSError: An image can't be read, or the model has no pooled features.
    """
    model = predictor.model
    readouts = list_readouts(model)
    shape = (len(readouts), count_features(model))
    name = f"{dataset.name}-{dataset.split}-features-{_cache_key(predictor, dataset, shape)}.npz"
    path = default_cache_dir() / name
    values = open_cached(
        path, lambda: torch.from_numpy(read_arrays(path)["features"]).view(torch.float32)
    )
    process = current_process()
    # either all processes compute them or none
    if process.any_rank(values is None):
        title = f"features of {dataset.name} {dataset.split}"
        with show_progress(title, len(dataset), shown=process.is_main) as advance:
            values = predictor.compute(
                partial(compute_block_features, model),
                partial(read_dataset, dataset, predictor.preprocess),
                shape=(len(dataset), *shape),
                on_progress=advance,
            )
        if process.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(path, {"features": values.view(torch.uint8).numpy()})
    assert values is not None
    return {readout: values[:, place] for place, readout in enumerate(readouts)}


def _cache_key(predictor: BatchPredictor, dataset: ImageDataset, shape: tuple[int, int]) -> str:
    """Return 16 hexadecimal digits that change with everything that the features depend on."""
    model = predictor.model
    weights, architecture = model.state_dict(), {}
    if isinstance(model, VisionTransformer):
        # the head and the number of classes may change
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
        architecture = {
            name: value for name, value in model.architecture.items() if name not in _NEUTRAL
        }
    # decoded images are known by their pixels, even if their files are renamed or touched
    images = dataset.reader.cache_key()
    if dataset.hashes is not None:
        images = dataset.digests.tobytes()
    conditions = [
        _FORMAT,
        type(model).__qualname__,
        architecture,
        hash_weights(weights),
        shape,
        predictor.preprocess.to_dict(),
        [predictor.precision, predictor.device.type],
        hashlib.sha256(images).hexdigest(),
    ]
    text = json.dumps(conditions, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compute_readable_features(bundle: Bundle, dataset: ImageDataset) -> tuple[Float32s, Ints]:
    """Compute the pooled features that the head reads, [n, D], of those images that can be read, and
    return their indices, too."""
    is_readable = np.ones(len(dataset), dtype=bool)

    def read(start: int, stop: int) -> Pixels:
        # a file may have gone since training; its row stays black and is dropped below
        pixels = np.zeros((stop - start, *bundle.preprocess.image_size, 3), dtype=np.uint8)
        for index in range(start, stop):
            try:
                pixels[index - start] = read_dataset(dataset, bundle.preprocess, index, index + 1)
            except (OSError, ValueError):
                is_readable[index] = False
        return pixels

    predictor = BatchPredictor.from_bundle(bundle)
    _, features = predictor.predict_with_features(read, count=len(dataset))
    return features[is_readable], np.flatnonzero(is_readable)


def read_dataset(dataset: ImageDataset, preprocess: Preprocess, start: int, stop: int) -> Pixels:
    """Return images start … stop-1 as the model sees them, uint8 [B, H, W, 3]."""
    if dataset.pixels is not None:
        return preprocess.crop(dataset.pixels[start:stop])
    images = [preprocess.to_uint8(dataset.image(index)) for index in range(start, stop)]
    return np.stack(images)
