"""Find where the tokens of a vision transformer are on the image."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

Grid = tuple[int, int]  # (rows, columns) of patches
# names that timm, torchvision and Hugging Face give to parameters that are tokens
_PREFIX_PARAMETERS = re.compile(
    "cls_token|class_token|class_embedding|dist(illation)?_token|reg_token|register_tokens"
)


def count_prefix_tokens(model: nn.Module) -> int:
    """Count the tokens in front of the patches: class, distillation, registers."""
    # models of timm and of this project have it as an attribute; wrappers contain such a model
    for module in model.modules():
        prefix = getattr(module, "num_prefix_tokens", None)
        if isinstance(prefix, int):
            return prefix

    # other models have a parameter for each token
    count = 0
    for name, parameter in model.named_parameters():
        if _PREFIX_PARAMETERS.fullmatch(name.rpartition(".")[2]):
            count += parameter.numel() // parameter.shape[-1]
    return count


@contextmanager
def capture_patch_grids(model: nn.Module) -> Iterator[set[Grid]]:
    """Record the grids of the convolutions that make patches from pixels: they have three input
    channels and don't overlap. Most models have one; a model without has none."""
    grids: set[Grid] = set()

    def keep_grid(module: nn.Module, args: object, patches: Tensor) -> None:
        rows, columns = patches.shape[-2:]
        grids.add((rows, columns))

    with ExitStack() as stack:
        for module in model.modules():
            is_convolution = isinstance(module, nn.Conv2d) and module.in_channels == 3
            # patches do not overlap, so each token has one place on the grid
            if is_convolution and module.kernel_size == module.stride:
                stack.enter_context(module.register_forward_hook(keep_grid))
        yield grids
