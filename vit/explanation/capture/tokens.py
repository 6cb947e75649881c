"""Find where the tokens of a vision transformer are on the image."""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from vit.runtime.tensors import Images

Grid = tuple[int, int]  # (rows, columns) of patches
# names that timm, torchvision and Hugging Face give to parameters that are tokens
_PREFIX_PARAMETERS = re.compile(
    "cls_token|class_token|class_embedding|dist(illation)?_token|reg_token|register_tokens"
)


def draw_noise(
    shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draw normally distributed numbers, the same ones at each call without a generator, with the
    type and device of `like`."""
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like)


def count_prefix_tokens(model: nn.Module) -> int:
    """Count the tokens in front of the patches: class, distillation, registers."""
    # models of timm and of this project have it as an attribute; wrappers contain such a model
    for module in model.modules():
        prefix = getattr(module, "num_prefix_tokens", None)
        if isinstance(prefix, int):
            return prefix
    # other models have a parameter for each token
    return sum(
        parameter.numel() // parameter.shape[-1]
        for name, parameter in model.named_parameters()
        if _PREFIX_PARAMETERS.fullmatch(name.rpartition(".")[2])
    )


@contextmanager
def capture_patch_grids(model: nn.Module, channels: int) -> Iterator[set[Grid]]:
    """Record the grids of the convolutions that make patches from pixels: they have as many input
    `channels` as images and don't overlap. Most models have one; a model without has none."""
    grids: set[Grid] = set()

    def keep_grid(module: nn.Module, args: object, patches: Tensor) -> None:
        rows, columns = patches.shape[-2:]
        grids.add((rows, columns))

    with ExitStack() as stack:
        for module in model.modules():
            is_convolution = isinstance(module, nn.Conv2d) and module.in_channels == channels
            # patches do not overlap, so each token has one place on the grid
            if is_convolution and module.kernel_size == module.stride:
                stack.enter_context(module.register_forward_hook(keep_grid))
        yield grids


def find_places(
    model: nn.Module, images: Images, shapes: set[tuple[int, int]], patch_grids: set[Grid]
) -> tuple[int, Grid]:
    """Find the number of prefix tokens and the grid of the patches; `check_places` looks whether
    it is right.

    Args:
        model: The model.
        images: Images that it has seen.
        shapes: Batch and number of tokens of each attention layer.
        patch_grids: Grids of convolutions, of which one is the grid if there are any.

    Raises:
        ValueError: The patches don't tile the images.
    """
    name = type(model).__name__
    # hierarchical models give each layer another number of tokens, windows another batch
    batch, num_tokens = next(iter(shapes))
    if len(shapes) > 1 or batch != len(images):
        raise ValueError(
            f"{name} attends within windows, in branches or between fewer and fewer patches, so no "
            "attention between all of its input patches exists"
        )

    # all other tokens are prefix tokens, also prompts next to the class token (Jia et al. 2022,
    # visual prompt tuning), which no model counts
    for grid in patch_grids:
        if math.prod(grid) <= num_tokens:
            return num_tokens - math.prod(grid), grid
    if patch_grids:
        rows, columns = min(patch_grids, key=math.prod)
        raise ValueError(
            f"{name} cuts images into {rows}×{columns} patches and attends between {num_tokens} "
            "tokens (are patches masked or merged?), so some patches have no place in a map"
        )

    # without a convolution, patches are taken to be squares, and prefix tokens may have any name
    for prefix in (count_prefix_tokens(model), *range(num_tokens)):
        squares = tile_squares(num_tokens - prefix, images)
        if squares is not None:
            return prefix, squares
    height, width = images.shape[-2:]
    raise ValueError(f"{num_tokens} tokens do not tile an input of {height}×{width} pixels")


def tile_squares(count: int, images: Images) -> Grid | None:
    """Return rows and columns of so many squares that tile the images, if they can."""
    height, width = images.shape[-2:]
    rows = max(round(math.sqrt(max(count, 0) * height / width)), 1)
    columns = count // rows
    if rows * columns == count > 0 and rows * width == columns * height:
        return rows, columns
    return None
