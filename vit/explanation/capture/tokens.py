"""Where the tokens of a vision transformer lie on the image, and how to leave some out of a forward pass or give it
others, without a change to the model."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.explanation.capture.capture import find_attention_layers
from vit.model.logits import compute_logits

Grid = tuple[int, int]  # (rows, columns) of patches
# the parameters that are tokens of their own, by their names in timm, torchvision and Hugging Face
_PREFIX_PARAMETERS = re.compile("cls_token|class_token|class_embedding|dist(illation)?_token|reg_token|register_tokens")
# parts of modules' or parameters' names that tell of positions within the attention
_POSITIONS = ("rope", "rel_pos", "relative_position")


def count_prefix_tokens(model: nn.Module) -> int:
    """Tokens in front of the patches: class, distillation, registers."""
    for module in model.modules():  # the model, or what it wraps
        prefix = getattr(module, "num_prefix_tokens", None)
        if isinstance(prefix, int):
            return prefix
    named = [(name.rpartition(".")[2], parameter) for name, parameter in model.named_parameters()]
    return sum(p.numel() // p.shape[-1] for name, p in named if _PREFIX_PARAMETERS.fullmatch(name))


def find_grid(model: nn.Module, size: tuple[int, int], num_patches: int) -> Grid:
    """(rows, columns) of patches on an input of `size` (height, width). Raises ValueError where so many patches don't
    tile it."""
    height, width = size
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple) and (height // patch[0]) * (width // patch[1]) == num_patches:
        return height // patch[0], width // patch[1]
    rows = max(round(math.sqrt(max(num_patches, 0) * height / width)), 1)  # square patches
    if num_patches < 1 or rows * (num_patches // rows) != num_patches:
        raise ValueError(f"{num_patches} patches do not tile an input of {height}×{width} pixels")
    return rows, num_patches // rows


@contextmanager
def replace_blocks(blocks: Sequence[Any], forward: Callable[..., Tensor]) -> Iterator[None]:
    """Let `forward` compute in the place of each of a model's `blocks`."""
    own = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = forward
        yield
    finally:
        for block, method in zip(blocks, own, strict=True):
            if method is None:
                del block.forward
            else:
                block.forward = method


@torch.no_grad()
def check_places(model: nn.Module, image: Float[Tensor, "1 3 height width"], *, num_prefix: int, grid: Grid) -> None:
    """Change one patch in each corner of the image and raise ValueError unless its token changes most."""
    (rows, columns), kept = grid, list[Tensor]()
    height, width = image.shape[2] // rows, image.shape[3] // columns
    corners = [(row, column) for row in (0, rows - 1) for column in (0, columns - 1)]
    changed = image.detach().repeat(len(corners) + 1, 1, 1, 1)
    for number, (row, column) in enumerate(corners):
        changed[number, :, row * height : (row + 1) * height, column * width : (column + 1) * width] += 1

    def keep(tokens: Tensor, *args: Any, **options: Any) -> Tensor:
        kept.append(tokens)
        return tokens

    with replace_blocks([layer.block for layer in find_attention_layers(model)], keep):
        compute_logits(model, changed)
    difference = (kept[0][:-1] - kept[0][-1:]).norm(dim=2)  # [corners, N]
    expected = [num_prefix + row * columns + column for row, column in corners]
    if difference.any() and difference.argmax(dim=1).tolist() != expected:
        order = f"{num_prefix} tokens and then {rows}×{columns} patches, row by row"
        raise ValueError(f"{type(model).__name__} doesn't have {order}, so where its tokens lie is unknown")


def can_drop_tokens(model: nn.Module) -> bool:
    """Not where the attention is told the positions of all patches: rotary embeddings, relative position biases."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return not any(part in name for name in names for part in _POSITIONS)


@contextmanager
def keep_tokens(model: nn.Module, kept: Int[Tensor, "B kept"]) -> Iterator[None]:
    """Only the patches `kept` (indices from 0, row by row) and the prefix tokens enter the encoder. Raises ValueError
    where `can_drop_tokens` says no."""
    if not can_drop_tokens(model):
        positions = "rotary positions or a relative position bias"
        raise ValueError(f"{type(model).__name__} has {positions}, so its tokens cannot be left out; use fill='mean'")
    num_prefix = count_prefix_tokens(model)

    def select(tokens: Tensor) -> Tensor:
        index = (kept + num_prefix).unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
        return torch.cat([tokens[:, :num_prefix], tokens.gather(1, index)], dim=1)

    with change_tokens(model, select):
        yield


@contextmanager
def change_tokens(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What `change` makes of the tokens [B, N, D] before the first block, prefix tokens included, enters it instead.
    Raises ValueError where their number changes in a model whose blocks take more than tokens."""

    def replace(
        module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens, others = change(args[0]), (*args[1:], *options.values())
        if tokens.shape[1] != args[0].shape[1] and any(isinstance(other, Tensor) for other in others):
            kind = type(module).__name__
            raise ValueError(f"{kind} takes more than the tokens, so they cannot be left out; use fill='mean'")
        return (tokens, *args[1:]), options

    block = find_attention_layers(model)[0].block
    handle = block.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
