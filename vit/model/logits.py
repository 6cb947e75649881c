"""From images to logits, for models of this project, timm, torchvision and Hugging Face."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn


def compute_logits(model: nn.Module, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
    """The model's logits in float32, under any autocast, also where an output object holds them. A separate head
    (`forward_head`) runs in float32: logits rounded to bfloat16 tie, and ties change top-1 by tenths of a percent."""
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        output: Any = model(images)
        logits = cast(Tensor, getattr(output, "logits", output))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 stays
    read = getattr(model, "num_read_tokens", None)  # of this project's models: the last block skips other tokens
    options = {} if read is None else {"read": read}
    features = cast(Any, model).forward_features(images, **options)
    with torch.autocast(images.device.type, enabled=False):
        return cast(
            Tensor, cast(Any, model).forward_head(features.to(torch.promote_types(features.dtype, torch.float32)))
        )
