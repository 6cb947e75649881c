"""From images to logits, for models of this project, timm, torchvision and Hugging Face."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn


def compute_logits(model: nn.Module, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "_ classes"]:
    """The model's logits in float32, under any autocast, also where an output object holds them. A separate head
    (`forward_head`) runs in float32: logits rounded to bfloat16 tie, and ties change top-1 by tenths of a percent.
    Raises ValueError for a model that gives something else."""
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        output: Any = model(images)
        logits = getattr(output, "logits", output)
        if not (isinstance(logits, Tensor) and logits.ndim == 2):
            raise ValueError(f"{type(model).__name__} gives no logits [images, classes]; take it with a classifier")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 stays
    read = getattr(model, "num_read_tokens", None)  # of this project's models: the last block skips other tokens
    options = {} if read is None else {"read": read}
    features = cast(Any, model).forward_features(images, **options)
    with torch.autocast(images.device.type, enabled=False):
        if isinstance(features, Tensor):
            features = features.to(torch.promote_types(features.dtype, torch.float32))
        return cast(Tensor, cast(Any, model).forward_head(features))
