"""Features of the images of a data set: pooled, after each block, or all tokens. The latter two are
computed once and kept in the cache."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.model.logits import (
    Readout,
    compute_block_features,
    count_channels,
    list_readouts,
)
from vit.model.model_file import hash_weights
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.predictor import BatchPredictor, Pixels
from vit.prediction.probabilities import Float32s, Ints
from vit.runtime.device import Precision
from vit.runtime.files import default_cache_dir, open_cached, read_arrays, write_arrays
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress

# Raise it when the features or their files change.
_FORMAT = 1
# arguments of our model that no feature depends on
_NEUTRAL = ("num_classes", "global_pool", "drop_path_rate")

# (number of blocks, pooling) → features of the images
Features = Mapping[Readout, Float[Tensor, "n D"]]


def compute_features(
    predictor: BatchPredictor,
    dataset: ImageDataset,
    *,
    cache_dir: Path | None = None,
) -> Features:
    """Compute the pooled features of images after each block, or read them from the cache.

    Their name in the cache changes with the weights, the preprocessing, the precision and the
    images.

    Args:
        predictor: The model, with the conditions under which it runs.
        dataset: The images. If they aren't decoded, each is read with its batch.
        cache_dir: The cache; None: $VIT_CACHE or ~/.cache/vit.

    Returns:
        Features by number of blocks and pooling ("token": the class token, "avg": the mean of the
        patches), float32 [n, D] on the CPU. For a model that isn't ours, (0, "pre_logits") is the
        input of its last linear layer.

    Raises:
        ValueError: An image can't be read, or the model has no pooled features.
        OSError: An image can't be read, or the cache can't be written.
    """
    model = predictor.model
    weights, shape = _describe_features(model)
    values = _compute_once(
        "features",
        predictor,
        dataset,
        partial(compute_block_features, model),
        weights=weights,
        shape=shape,
        cache_dir=cache_dir,
    )
    readouts = list_readouts(model)
    return {readout: values[:, place] for place, readout in enumerate(readouts)}


def _describe_features(model: nn.Module) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Return the weights that the features depend on, and the shape of those of one image."""
    weights = model.state_dict()
    if isinstance(model, VisionTransformer):
        # the features don't depend on the head, which changes with the number of classes
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
    return weights, (len(list_readouts(model)), count_channels(model))


def count_token_bytes(model: VisionTransformer, precision: Precision, *, mirrored: bool) -> int:
    """Return the size in bytes of the tokens of one image from `compute_tokens`."""
    dtype: torch.dtype = getattr(torch, precision)
    return math.prod(_token_shape(model, mirrored)) * dtype.itemsize


def compute_tokens(
    predictor: BatchPredictor,
    dataset: ImageDataset,
    *,
    mirrored: bool,
    cache_dir: Path | None = None,
) -> Float[Tensor, "n V N D"]:
    """Compute the tokens of images after the frozen blocks of a model, or read them from the cache.

    Args:
        predictor: Our model, with the conditions under which it runs.
        dataset: The images, decoded.
        mirrored: Compute two views, the image and its mirror image, instead of one.
        cache_dir: See `compute_features`.

    Returns:
        Outputs of `VisionTransformer.forward_frozen` on the CPU, in the predictor's precision.
    """
    model = predictor.model
    assert isinstance(model, VisionTransformer)

    def compute_batch(images: Tensor) -> Tensor:
        views = [model.forward_frozen(images)]
        if mirrored:
            views.append(model.forward_frozen(images.flip(-1)))
        return torch.stack(views, dim=1)

    # in a resumed run the other blocks are trained already
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    state = model.state_dict()
    return _compute_once(
        "tokens",
        predictor,
        dataset,
        compute_batch,
        weights={name: value for name, value in state.items() if name not in trained},
        shape=_token_shape(model, mirrored),
        dtype=getattr(torch, predictor.precision),
        cache_dir=cache_dir,
    )


def _token_shape(model: VisionTransformer, mirrored: bool) -> tuple[int, int, int]:
    num_tokens = model.num_prefix_tokens + math.prod(model.grid_size)
    return 1 + mirrored, num_tokens, model.embed_dim


def _compute_once(
    name: str,
    predictor: BatchPredictor,
    dataset: ImageDataset,
    function: Callable[[Tensor], Tensor],
    *,
    weights: dict[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    cache_dir: Path | None,
) -> Tensor:
    """Return the results of a function of the model for all images, from the cache if possible.

    Args:
        name: Name of what is computed.
        function: Maps normalised images to their results.
        weights: Weights of the model that the results depend on.
        shape: Shape of the result for one image.
    """
    key = _cache_key(predictor, dataset, weights, shape)
    folder = cache_dir or default_cache_dir()
    path = folder / f"{dataset.name}-{dataset.split}-{name}-{key}.npz"
    # bytes, because numpy has no bfloat16
    values = open_cached(path, lambda: torch.from_numpy(read_arrays(path)[name]).view(dtype))
    process = current_process()
    # either all processes compute them or none
    if process.any_rank(values is None):
        title = f"{name} of {dataset.name} {dataset.split}"
        with show_progress(title, len(dataset), shown=process.is_main) as advance:
            values = predictor.compute(
                function,
                partial(read_dataset, dataset, predictor.preprocess),
                shape=(len(dataset), *shape),
                dtype=dtype,
                on_progress=advance,
            )
        if process.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(path, {name: values.view(torch.uint8).numpy()})
    assert values is not None
    return values


def compute_readable_features(bundle: Bundle, dataset: ImageDataset) -> tuple[Float32s, Ints]:
    """Compute the pooled features that the head reads, of those images that can be read.

    Returns:
        Features [n, D], and the indices of these n images.
    """
    is_readable = np.ones(len(dataset), dtype=bool)

    def read(start: int, stop: int) -> Pixels:
        if dataset.pixels is not None:
            return read_dataset(dataset, bundle.preprocess, start, stop)
        # a file may have gone since training; its row stays black and is dropped below
        pixels = np.zeros((stop - start, *bundle.preprocess.image_size, 3), dtype=np.uint8)
        for index in range(start, stop):
            try:
                pixels[index - start] = bundle.preprocess.to_uint8(dataset.image(index))
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


def _cache_key(
    predictor: BatchPredictor,
    dataset: ImageDataset,
    weights: dict[str, Tensor],
    shape: tuple[int, ...],
) -> str:
    """Return 16 hexadecimal digits that change with everything that the values depend on."""
    model = predictor.model
    architecture = getattr(model, "architecture", {})
    # decoded images are known by their pixels, even if their files are renamed or touched
    images = hashlib.sha256(dataset.reader.cache_key()).hexdigest()
    if dataset.hashes is not None:
        images = hashlib.sha256(dataset.digests.tobytes()).hexdigest()
    conditions = [
        _FORMAT,
        type(model).__qualname__,
        {name: value for name, value in architecture.items() if name not in _NEUTRAL},
        hash_weights(weights),
        shape,
        predictor.preprocess.to_dict(),
        [predictor.precision, predictor.device.type],
        images,
    ]
    text = json.dumps(conditions, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
