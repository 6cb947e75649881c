"""Forward passes of some of an image's patches, as plainly as they can be written."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vit.explanation.capture.tokens import change_tokens, count_prefix_tokens


@contextmanager
def keep_tokens(model: nn.Module, patches: Tensor) -> Iterator[None]:
    """Only these `patches` [B, kept] (indices from 0, row by row) and the prefix tokens enter the
    encoder."""
    # of one whole image; with prompts there are more than the model's parameters say
    num_prefix = count_prefix_tokens(model)

    def select(tokens: Tensor) -> Tensor:
        index = (patches + num_prefix).unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
        return torch.cat([tokens[:, :num_prefix], tokens.gather(1, index)], dim=1)

    with change_tokens(model, select):
        yield
