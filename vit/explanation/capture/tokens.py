"""Leave tokens out of a forward pass of a vision transformer, or give it others, without a change to the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from vit.explanation.capture.capture import find_attention_layers
from vit.explanation.capture.layers import RotaryLayer
from vit.explanation.capture.readout import count_prefix_tokens


def can_drop_tokens(model: nn.Module) -> bool:
    """Not for rotary models, whose blocks are told the positions of all patches."""
    return not isinstance(find_attention_layers(model)[0], RotaryLayer)


@contextmanager
def keep_tokens(model: nn.Module, kept: Int[Tensor, "B kept"]) -> Iterator[None]:
    """Only the patches `kept` (indices from 0, row by row) and the prefix tokens enter the encoder. Raises ValueError
    where `can_drop_tokens` says no."""
    if not can_drop_tokens(model):
        name = type(model).__name__
        raise ValueError(f"{name} has rotary positions, so its tokens cannot be left out; use fill='mean'")
    num_prefix = count_prefix_tokens(model)

    def select(tokens: Tensor) -> Tensor:
        index = (kept + num_prefix).unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
        return torch.cat([tokens[:, :num_prefix], tokens.gather(1, index)], dim=1)

    with change_tokens(model, select):
        yield


@contextmanager
def change_tokens(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What `change` makes of the tokens [B, N, D] before the first block, prefix tokens included, enters it instead."""

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(args[0]), *args[1:])

    handle = find_attention_layers(model)[0].block.register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()
