"""The tokens of the training images after a model's frozen blocks, computed once: the steps then cost
the other blocks alone."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.config import Config
from vit.data.loader import choose_pipeline
from vit.data.transforms import Transform
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.features import compute_tokens, count_token_bytes
from vit.runtime.processes import current_process
from vit.training.data import TrainingData, set_pipeline
from vit.training.validation import build_predictor


def keep_tokens(
    config: Config,
    model: nn.Module,
    data: TrainingData,
    *,
    device: torch.device,
    transform: Transform | None = None,
) -> tuple[TrainingData, Float[Tensor, "n V N D"] | None]:
    """The tokens of the training images, where the configuration and the memory have them kept.

    Args:
        config: Of the run, as it was before a pipeline was chosen.
        model: Of the run, on its device, its blocks frozen.
        data: Of the run.
        device: The model's.
        transform: Of one image, passed from Python.

    Returns:
        The data, with the pipeline "tokens" where tokens are kept; and these, or None.

    Raises:
        ValueError: The configuration asks for tokens of a model or images that have none.
    """
    pipeline = config.data.pipeline
    if not isinstance(model, VisionTransformer) or transform is not None:
        if pipeline == "tokens":
            raise ValueError("data.pipeline=tokens is for vit's own models, and images as they are")
        return data, None
    is_chosen = pipeline == "auto" and config.keeps_tokens and data.train.pixels is not None
    if pipeline != "tokens" and not is_chosen:
        return data, None

    mirrored = config.augment.flip != "none"
    predictor = build_predictor(data, model, device=device)
    image_bytes = count_token_bytes(model, predictor.precision, mirrored=mirrored)
    chosen, reason = choose_pipeline(len(data.train) * image_bytes, device=device, what="tokens")
    # the free memory of several devices differs
    does_not_fit = current_process().any_rank(chosen != "resident")
    if pipeline == "auto" and does_not_fit:
        return data, None
    tokens = compute_tokens(
        predictor, data.train, mirrored=mirrored, cache_dir=data.splits.cache_dir
    )
    config = set_pipeline(data.config, "tokens")
    return replace(data, config=config, pipeline_reason=reason), tokens
