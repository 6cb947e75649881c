"""Where the tokens of a vision transformer lie on the image, and how to leave some out of a forward
pass or give it others, without a change to the model."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vit.explanation.capture.layers import find_attention_layers, has_attention

Grid = tuple[int, int]  # (rows, columns) of patches
# the parameters that are tokens of their own, by their names in timm, torchvision and Hugging Face
_PREFIX_PARAMETERS = re.compile(
    "cls_token|class_token|class_embedding|dist(illation)?_token|reg_token|register_tokens"
)
# parts of modules' or parameters' names that tell of positions within the attention
_POSITIONS = re.compile("rope|rel_pos|relative_position")


def count_prefix_tokens(model: nn.Module) -> int:
    """Tokens in front of the patches: class, distillation, registers."""
    # timm and this project say it: the model, or what it wraps
    for module in model.modules():
        prefix = getattr(module, "num_prefix_tokens", None)
        if isinstance(prefix, int):
            return prefix

    # others have a parameter for each
    count = 0
    for name, parameter in model.named_parameters():
        if _PREFIX_PARAMETERS.fullmatch(name.rpartition(".")[2]):
            count += parameter.numel() // parameter.shape[-1]
    return count


@contextmanager
def capture_patch_grids(model: nn.Module) -> Iterator[set[Grid]]:
    """The grids of the convolutions that make patches of pixels: three channels in, side by side.
    One, as a rule; none where patches are made otherwise."""
    grids: set[Grid] = set()

    def keep_grid(module: nn.Module, args: object, patches: Tensor) -> None:
        rows, columns = patches.shape[-2:]
        grids.add((rows, columns))

    handles = []
    for module in model.modules():
        is_convolution = isinstance(module, nn.Conv2d) and module.in_channels == 3
        if is_convolution and module.kernel_size == module.stride:
            handles.append(module.register_forward_hook(keep_grid))
    try:
        yield grids
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replace_blocks(blocks: Sequence[Any], forward: Callable[..., Tensor]) -> Iterator[None]:
    """Let `forward` compute in the place of each of a model's `blocks`."""
    instance_forwards = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = forward
        yield
    finally:
        for block, instance_forward in zip(blocks, instance_forwards, strict=True):
            if instance_forward is None:  # the class's own shows again
                del block.forward
            else:
                block.forward = instance_forward


def can_drop_tokens(model: nn.Module) -> bool:
    """Not where the attention is told the positions of all patches (rotary embeddings, relative
    position biases), and not without attention."""
    if not has_attention(model):
        return False
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return not any(map(_POSITIONS.search, names))


@contextmanager
def change_tokens(model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """What `change` makes of the tokens [B, N, D] before the first block, prefix tokens included,
    enters it instead."""

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(args[0]), *args[1:])

    block = find_attention_layers(model)[0].block
    handle = block.register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()
