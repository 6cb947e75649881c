"""Pooled features and tokens of images, from one forward pass and from then on from the cache."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vit.data.dataset import ImageDataset
from vit.model.block_features import (
    Readout,
    compute_block_features,
    count_channels,
    list_readouts,
)
from vit.model.model_file import hash_weights
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.predictor import Pixels, Predictor
from vit.runtime.device import Precision
from vit.runtime.files import default_cache_dir, write_atomically
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress

# raise it when the features or their files change
_FORMAT = 1
# the arguments of our model that none of them depends on
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
    model = predictor.model
    readouts = list_readouts(model)
    weights = model.state_dict()
    if isinstance(model, VisionTransformer):
        # the head reads the features, and another number of classes has another head
        weights = {name: value for name, value in weights.items() if not name.startswith("head")}
    values = _compute_once(
        "features",
        predictor,
        dataset,
        partial(compute_block_features, model),
        weights=weights,
        shape=(len(readouts), count_channels(model)),
        cache_dir=cache_dir,
        progress=progress,
    )
    return {readout: values[:, place] for place, readout in enumerate(readouts)}


def count_token_bytes(model: VisionTransformer, precision: Precision, *, mirrored: bool) -> int:
    """Of what `compute_tokens` gives of an image."""
    dtype: torch.dtype = getattr(torch, precision)
    return math.prod(_token_shape(model, mirrored)) * dtype.itemsize


def compute_tokens(
    predictor: Predictor,
    dataset: ImageDataset,
    *,
    mirrored: bool,
    cache_dir: Path | None = None,
) -> Float[Tensor, "n V N D"]:
    """The tokens of images after the frozen blocks of a model, as
    `VisionTransformer.forward_frozen` gives them: computed once and kept in the cache.

    Args:
        predictor: our model, with the conditions under which it runs.
        dataset: the images, decoded.
        mirrored: whether there are two views, the image and its mirror image, not the image alone.
        cache_dir: as of `compute_features`.

    Returns:
        On the CPU, in the precision of the predictor.
    """
    model = predictor.model
    assert isinstance(model, VisionTransformer)

    def compute_batch(images: Tensor) -> Tensor:
        views = [model.forward_frozen(images)]
        if mirrored:
            views.append(model.forward_frozen(images.flip(-1)))
        return torch.stack(views, dim=1)

    # of a resumed run the other blocks are trained already
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
    predictor: Predictor,
    dataset: ImageDataset,
    function: Callable[[Tensor], Tensor],
    *,
    weights: dict[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    cache_dir: Path | None,
    progress: bool = True,
) -> Tensor:
    """What a function of the model gives of all images, from the cache where it was computed before.

    Args:
        name: of what is computed.
        weights: of the model, that it depends on.
        shape: of what it gives of an image.
    """
    folder = cache_dir or default_cache_dir()
    key = _cache_key(predictor, dataset, weights, shape)
    path = folder / f"{dataset.name}-{dataset.split}-{name}-{key}.safetensors"
    shape = (len(dataset), *shape)
    values = _load(path, name, shape)
    process = current_process()
    # all processes compute them, or none
    if process.any_rank(values is None):
        title = f"{name} of {dataset.name} {dataset.split}"
        with show_progress(title, len(dataset), shown=progress and process.is_main) as advance:
            values = predictor.compute(
                function,
                partial(_read, predictor, dataset),
                shape=shape,
                dtype=dtype,
                on_progress=advance,
            )
        if process.is_main:
            _save(path, name, values)
    assert values is not None
    return values


def _read(predictor: Predictor, dataset: ImageDataset, start: int, stop: int) -> Pixels:
    preprocess = predictor.preprocess
    if dataset.pixels is not None:
        return preprocess.crop(dataset.pixels[start:stop])
    dataset.reader.fetch(range(start, stop))
    images = [preprocess.to_uint8(dataset.image(index)) for index in range(start, stop)]
    return np.stack(images)


def _cache_key(
    predictor: Predictor,
    dataset: ImageDataset,
    weights: dict[str, Tensor],
    shape: tuple[int, ...],
) -> str:
    """16 hexadecimal digits that change with whatever the values depend on."""
    model = predictor.model
    architecture = getattr(model, "architecture", {})
    # of decoded images the pixels, whatever becomes of their files' names and times
    images = dataset.cache_key()
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


def _load(path: Path, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The values in a file; None where there is none, or one that is damaged."""
    try:
        values = load_file(path)[name]
    except (OSError, LookupError, SafetensorError):
        return None
    is_intact = values.shape == shape and bool(values.isfinite().all())
    return values if is_intact else None


def _save(path: Path, name: str, values: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: save_file({name: values}, temporary))
