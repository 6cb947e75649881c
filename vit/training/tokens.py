"""The tokens of the training images after a model's frozen blocks, computed once. The steps then
pass only the other blocks."""

import math
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.config import Config
from vit.data.loader import fits_in_memory
from vit.data.workers import Transform
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.features import read_dataset
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

    Returns:
        The data and None; or the data with the pipeline "tokens", and the tokens.

    Raises:
        ValueError: The configuration asks for tokens of a model or of images that have none.
    """
    wanted = config.data.pipeline
    is_ours = isinstance(model, VisionTransformer) and transform is None
    is_possible = is_ours and config.keeps_tokens
    if wanted == "tokens" and not is_possible:
        raise ValueError(
            "data.pipeline=tokens needs frozen blocks of a model of vit (model.freeze: a number),"
            " no augmentation but augment.flip, and one image size (train.image_sizes: null)"
        )
    is_chosen = is_possible and wanted == "auto" and data.train.pixels is not None
    if not isinstance(model, VisionTransformer) or not (wanted == "tokens" or is_chosen):
        return data, None

    mirrored = config.augment.flip != "none"
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
