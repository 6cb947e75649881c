"""A forward pass that some of the patches alone enter: what other ways to leave patches out are compared
with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Tensor, nn

from vit.explanation.capture.reader import read_model


@contextmanager
def keep_tokens(model: nn.Module, patches: Int[Tensor, "B kept"], images: Tensor) -> Iterator[None]:
    """Only these `patches` (indices from 0, row by row) and the prefix tokens enter the encoder."""
    reader = read_model(model, images)
    num_prefix, _ = reader.find_patches()

    def select(tokens: Tensor) -> Tensor:
        index = (patches + num_prefix).unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
        return torch.cat([tokens[:, :num_prefix], tokens.gather(1, index)], dim=1)

    with reader.change_tokens(select):
        yield
