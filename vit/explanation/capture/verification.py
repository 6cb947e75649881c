"""Check that a map of the recorded attention is a map of this model.

Maps assume that the tokens are patches row by row, that the attention layers follow one another,
and that nothing else mixes tokens. The checks change one image, look at what happens to the tokens,
and refuse a model for which an assumption is wrong.
"""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vit.explanation.capture.layers import AttentionLayer, first_output
from vit.explanation.capture.pooling import has_known_pooling
from vit.explanation.capture.reader import ModelReader
from vit.explanation.capture.tokens import Grid
from vit.model.logits import compute_logits

_INNER_PATCHES = 4  # number of patches that are checked in addition to the corners
# largest change of a token that should not change, as a fraction of the change of the others
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_PRECISION_TOLERANCE = 5e-2

OneImage = Float[Tensor, "1 3 height width"]


class _Stop(Exception):
    """The rest of a forward pass isn't needed."""


@torch.no_grad()
def check_places(
    reader: ModelReader,
    image: OneImage,
    *,
    num_prefix: int,
    grid: Grid,
) -> None:
    """Change some patches of the image, including the corners.

    Args:
        reader: The model, in evaluation mode.
        image: A normalised image.
        num_prefix: Number of tokens in front of the patches.
        grid: Rows and columns of patches.

    Raises:
        ValueError: The token of a changed patch (with overlapping patches on at least three rows or
            columns, it or a neighbour) isn't the one that changes most, or a prefix token changes.
    """
    model = reader.model
    rows, columns = grid
    height = image.shape[2] // rows
    width = image.shape[3] // columns
    generator = torch.Generator().manual_seed(0)
    inner = torch.randperm(rows * columns, generator=generator)[:_INNER_PATCHES].tolist()
    # corners find an image that is mirrored or turned within the model
    places = list(itertools.product((0, rows - 1), (0, columns - 1)))
    places += [divmod(patch, columns) for patch in inner]

    # noise is visible even if the model clips values
    noise = torch.randn(3, height, width, generator=generator).to(image)

    entering: list[Tensor] = []
    changes: list[Tensor] = []  # for each place, the changes of the tokens [N]
    # for each convolution whose patches don't overlap, whether its input is the image
    reads_pixels: list[bool] = []

    # the tokens that enter the first block are enough
    def record_and_stop(tokens: Tensor) -> Tensor:
        entering.append(tokens)
        raise _Stop

    def check_patches(module: nn.Conv2d, args: tuple[Tensor, ...], patches: Tensor) -> None:
        if module.kernel_size == module.stride and tuple(patches.shape[-2:]) == grid:
            _check_cover(model, image[0], pixels=args[0][0], patch_size=module.kernel_size)
            reads_pixels.append(args[0].shape[1] == image.shape[1])

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                stack.callback(module.register_forward_hook(check_patches).remove)
        # one pair at a time, because all pairs of large images would take much memory
        for row, column in places:
            pair = image.detach().repeat(2, 1, 1, 1)
            patch = pair[1, :, row * height :, column * width :]
            patch[:, :height, :width] += noise
            entering.clear()
            with suppress(_Stop), reader.change_tokens(record_and_stop):
                compute_logits(model, pair)
            changes.append((entering[0][1] - entering[0][0]).norm(dim=1).cpu())

    name = type(model).__name__
    is_even = any(reads_pixels)
    for (row, column), token_change in zip(places, changes, strict=True):
        if not token_change.any():
            raise ValueError(
                f"no token of {name} changes with the pixels of row {row}, column {column} of "
                f"{rows}×{columns} patches: are they cropped away within the model? Crop before it"
            )
        if token_change[:num_prefix].any():
            raise ValueError(
                f"the tokens of {name} are mixed before the first attention layer that can be read, "
                "so no map is exact"
            )
        most = int(token_change.argmax()) - num_prefix
        # a convolutional stem spreads a change to the neighbours, which may change more; of two
        # rows or columns each is the other's neighbour, which would tell nothing
        row_reach, column_reach = (0 if is_even or side < 3 else 1 for side in grid)
        if abs(most // columns - row) > row_reach or abs(most % columns - column) > column_reach:
            raise ValueError(
                f"{name} doesn't have {num_prefix} tokens and then {rows}×{columns} patches, row "
                "by row, so where its tokens lie is unknown"
            )


def _check_cover(
    model: nn.Module,
    image: Float[Tensor, "3 height width"],
    *,
    pixels: Float[Tensor, "C H W"],
    patch_size: tuple[int, ...],
) -> None:
    """Raise ValueError if the `pixels` that become patches are the image with a border, or if some
    pixels are in no patch. The patches then don't divide the image evenly."""
    height, width = image.shape[1:]
    is_image = pixels.shape[0] == len(image) and torch.equal(pixels[:, :height, :width], image)
    has_border = is_image and pixels.shape != image.shape
    has_rest = any(side % size for side, size in zip(pixels.shape[1:], patch_size, strict=True))
    if has_border or has_rest:
        raise ValueError(
            f"{type(model).__name__} pads or crops images of {height}×{width} pixels to patches "
            f"of {patch_size[0]}×{patch_size[1]}, so a map doesn't lie evenly on them; take a "
            "size that the patches divide"
        )


def check_chain(
    model: nn.Module,
    image: OneImage,
    layers: Sequence[AttentionLayer],
    *,
    has_residuals: bool,
) -> None:
    """Change half of the tokens that enter the first block, with the attention switched off.

    Args:
        model: The model, in evaluation mode.
        image: A normalised image.
        layers: The model's attention layers, in order, after a forward pass.
        has_residuals: The blocks add the attention to their input, which is checked.

    Raises:
        ValueError: The other half changes, so something else than attention mixes tokens; or a
            block doesn't read the output of the one before, or doesn't add to its input.
    """
    generator = torch.Generator().manual_seed(0)
    is_changed = torch.rand(layers[0].num_tokens, generator=generator) < 0.5
    changes, unlinked = _follow_change(model, image, layers, is_changed=is_changed)

    # between two blocks there may be a new tensor, if it depends on the output of the one before
    everything = torch.ones_like(is_changed)
    for number in unlinked:
        later, _ = _follow_change(model, image, layers, is_changed=everything, start=number - 1)
        if number not in later or not later[number].any():
            raise ValueError(
                f"{layers[number].name} doesn't read what {layers[number - 1].name} gave (are "
                "there two encoders?), so their attention doesn't multiply to a map"
            )
        num_fresh = int((later[number] == 0).sum())
        if num_fresh > 0:
            raise ValueError(
                f"{num_fresh} tokens of {layers[number].name} don't come from the block before "
                "(prompts of each layer's own?), so their attention doesn't multiply to a map"
            )

    if has_residuals:
        _check_residuals(model, image, layers)
    for number, change in sorted(changes.items()):
        changed = is_changed[: len(change)]
        mixed = change[~changed].amax() if not changed.all() else change.new_zeros(())
        if mixed > _tolerance(image) * change.amax():
            after = layers[number - 1].name
            raise ValueError(
                f"{type(model).__name__} mixes tokens elsewhere than in the attention layers that "
                f"are known, in or after the block of {after}: a convolution, another order, an "
                "attention of another kind? So no map is exact"
            )


def _check_residuals(model: nn.Module, image: OneImage, layers: Sequence[AttentionLayer]) -> None:
    """Raise ValueError if a block's tokens depend on its input through the attention alone."""
    everything = torch.ones(layers[0].num_tokens, dtype=torch.bool)
    changes, _ = _follow_change(model, image, layers, is_changed=everything, own_weight=0.0)
    for number, change in sorted(changes.items()):
        if (change == 0).any():
            raise ValueError(
                f"{layers[number - 1].name} is an attention without a residual connection around "
                "it, and maps take each token to be added to what it attends to; methods for models "
                "without readable attention explain it"
            )


@torch.no_grad()
def _follow_change(
    model: nn.Module,
    image: OneImage,
    layers: Sequence[AttentionLayer],
    *,
    is_changed: Bool[Tensor, " N"],
    start: int = 0,
    own_weight: float = 1.0,
) -> tuple[dict[int, Float[Tensor, " N"]], list[int]]:
    """Run two copies of the image with attention of each token to itself alone, and add noise to
    some tokens of the second copy before block `start`.

    Returns:
        How much each token differs between the copies before each later block and after the last,
        by the block's number; and the blocks whose input isn't the output of the one before.
    """
    generator = torch.Generator().manual_seed(0)
    changes: dict[int, Tensor] = {}
    unlinked = []
    left: dict[int, Tensor] = {}  # result of the last block, by its number

    def keep_change(number: int, tokens: Tensor) -> None:
        changes[number] = (tokens[1] - tokens[0]).float().norm(dim=-1).cpu()

    def on_entry(number: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens: Tensor = args[0]
        order = layers[number].place.order
        if number > start:
            keep_change(number, order(tokens))
            if left.get(number - 1) is not tokens:
                unlinked.append(number)
        elif number == start:
            one = order(tokens)[0]
            noise = torch.randn(one.shape, generator=generator) * is_changed[:, None]
            tokens = order(torch.stack([one, one + one.std() * noise.to(one)]))
        return (tokens, *args[1:])

    def on_exit(number: int, module: nn.Module, args: Any, result: Any) -> None:
        left.clear()
        left[number] = first_output(result)
        if number == len(layers) - 1:
            keep_change(len(layers), layers[number].place.order(left[number]))

    pair = image.detach().repeat(2, 1, 1, 1)
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            # without attention, nothing in a block may mix tokens
            stack.enter_context(layer.without_mixing(own_weight))
            handles = [
                layer.block.register_forward_pre_hook(partial(on_entry, number)),
                layer.block.register_forward_hook(partial(on_exit, number)),
            ]
            for handle in handles:
                stack.callback(handle.remove)
        known_model: Any = model
        if has_known_pooling(model):
            keep_change(len(layers), known_model.forward_features(pair))
        else:
            compute_logits(model, pair)
    return changes, unlinked


def _tolerance(image: OneImage) -> float:
    is_rounded = torch.is_autocast_enabled(image.device.type)
    dtype = torch.bfloat16 if is_rounded else image.dtype
    return _TOLERANCE.get(dtype, _HALF_PRECISION_TOLERANCE)


@torch.no_grad()
def check_repeatable(model: nn.Module, image: OneImage, logits: Float[Tensor, "1 C"]) -> None:
    """Raise ValueError if a second pass doesn't give the same logits."""
    again = compute_logits(model, image.detach())
    tolerance = 10 * _tolerance(image)  # one image and a batch are rounded differently
    if (again - logits).abs().max() > tolerance * logits.abs().max():
        raise ValueError(
            f"two passes of {type(model).__name__} over one image give different logits (dropout "
            "or a random mask in evaluation mode?), so a map of one pass explains no other"
        )


@torch.enable_grad()
def check_gradient(model: nn.Module, image: OneImage) -> None:
    """Raise ValueError if the logits have no gradient at the pixels."""
    pixels = image.detach().requires_grad_()
    logits = compute_logits(model, pixels)
    gradient = None
    if logits.requires_grad:
        # the weights may have gradients where the pixels have none
        (gradient,) = torch.autograd.grad(logits.sum(), pixels, allow_unused=True)
    if gradient is None:
        raise ValueError(
            f"no gradient leads from the logits of {type(model).__name__} to the pixels, and its maps"
            " need one; explain a quantised model before it is quantised"
        )
