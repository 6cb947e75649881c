"""The tokens of the training images after a model's frozen blocks, computed once. The steps then
pass only the other blocks."""

import math
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.config import AugmentConfig, Config
from vit.data.loader import fits_in_memory
from vit.data.workers import Transform
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.batch_predictor import read_dataset
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress
from vit.training.data import TrainingData
from vit.training.validation import build_predictor


def keep_tokens(
    config: Config,
    model: nn.Module,
    data: TrainingData,
    *,
    device: torch.device,
    transform: Transform | None = None,
) -> tuple[TrainingData, Float[Tensor, "n V N D"] | None]:
    """Compute the tokens of the training images, if the configuration and the memory allow it.
    Returns the data, whose pipeline is then "tokens", and the tokens or None."""
    wanted = config.data.pipeline
    augment = config.augment
    mirrored = augment.flip != "none"
    # The frozen blocks compute the same tokens of an image in every epoch.
    flips_alone = augment == AugmentConfig(flip=augment.flip, mix_until=augment.mix_until)
    has_one_size = transform is None and flips_alone and not config.train.image_sizes
    is_frozen = config.model.freeze not in (0, "none", "backbone")
    if not isinstance(model, VisionTransformer) or not (is_frozen and has_one_size):
        if wanted == "tokens":
            raise ValueError(
                "data.pipeline=tokens needs frozen blocks of a model of vit (model.freeze: a"
                " number), no augmentation but augment.flip, and one image size"
                " (train.image_sizes: null)"
            )
        return data, None
    if wanted != "tokens" and (wanted != "auto" or data.train.pixels is None):
        return data, None

    predictor = build_predictor(data, model, device=device)
    dtype: torch.dtype = getattr(torch, predictor.precision)
    num_tokens = model.num_prefix_tokens + math.prod(model.grid_size)
    shape = (len(data.train), 1 + mirrored, num_tokens, model.embed_dim)
    size = math.prod(shape) * dtype.itemsize
    # All processes decide alike; the free memory of their devices differs.
    does_not_fit = current_process().any_rank(not fits_in_memory(size, device))
    if wanted == "auto" and does_not_fit:
        return data, None

    def compute_batch(images: Tensor) -> Tensor:
        views = [images, images.flip(-1)] if mirrored else [images]
        return torch.stack(list(map(model.forward_frozen, views)), dim=1)

    is_main = current_process().is_main
    with show_progress("tokens of the training images", len(data.train), shown=is_main) as advance:
        tokens = predictor.compute(
            compute_batch,
            partial(read_dataset, data.train, data.preprocess),
            shape=shape,
            dtype=dtype,
            on_progress=advance,
        )
    return replace(data, config=data.config.with_data(pipeline="tokens")), tokens
