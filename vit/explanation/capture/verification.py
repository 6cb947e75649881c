"""Check that a map of the recorded attention is a map of this model.

Maps assume that the tokens are patches row by row, that the attention layers follow one another,
that each has a residual connection, and that nothing else mixes tokens or leads around them. The
checks change one image or its tokens, look at what changes, and refuse a model for which an
assumption is wrong. They need no list of names.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.discovery import run_whole
from vit.explanation.capture.layers import LayerPlace
from vit.explanation.capture.reader import ModelReader
from vit.explanation.capture.tokens import Grid
from vit.model.logits import compute_logits

_INNER_PATCHES = 4  # number of patches that are checked in addition to the corners
# largest change of a token that should not change, as a fraction of the change of the others
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_PRECISION_TOLERANCE = 5e-2
# Largest change of a token far from a changed patch where convolutions overlap, as a fraction of
# the largest: that of norms over a feature map is below 0.02, that of an attention above 0.1.
_FAR_TOLERANCE = 0.05
# number of tokens up to which all rows of a check run in one batch
_TOKENS_AT_ONCE = 1100

OneImage = Float[Tensor, "1 channels height width"]


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
    """Change some patches of the image, including the corners, and its edges.

    Args:
        reader: The model, in evaluation mode.
        image: A normalised image.
        num_prefix: Number of tokens in front of the patches.
        grid: Rows and columns of patches.

    Raises:
        ValueError: The token of a changed patch (with overlapping patches on at least three rows or
            columns, it or a neighbour) isn't the one that changes most, or one that doesn't read it
            changes, or none changes with an edge.
    """
    model = reader.model
    name = type(model).__name__
    rows, columns = grid
    height, width = image.shape[2] // rows, image.shape[3] // columns
    generator = torch.Generator().manual_seed(0)
    inner = torch.randperm(rows * columns, generator=generator)[:_INNER_PATCHES].tolist()
    # corners find an image that is mirrored or turned within the model
    places = list(itertools.product((0, rows - 1), (0, columns - 1)))
    places += [divmod(patch, columns) for patch in inner]
    parts = [
        (slice(row * height, row * height + height), slice(column * width, column * width + width))
        for row, column in places
    ]
    # strips that are narrower than a patch find an image that is cropped within the model
    strip, everything = max(min(height, width) // 8, 1), slice(None)
    for edge in (slice(strip), slice(-strip, None)):
        parts += [(edge, everything), (everything, edge)]
    # noise is visible even if the model clips values
    noise = torch.randn(image[0].shape, generator=generator).to(image)
    is_overlapping: list[bool] = []  # for each convolution

    def check_patches(module: nn.Conv2d, args: tuple[Tensor, ...], patches: Tensor) -> None:
        sides = zip(module.kernel_size, module.stride, strict=True)
        is_overlapping.append(any(kernel > stride for kernel, stride in sides))
        if args[0].shape[1] == image.shape[1] and tuple(patches.shape[-2:]) == grid:
            _check_cover(model, image[0], module, args[0][0], grid)

    entering: list[Tensor] = []

    # the tokens that enter the first block are enough
    def record_and_stop(tokens: Tensor) -> Tensor:
        entering.append(tokens)
        raise _Stop

    changes: list[Float[Tensor, " N"]] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                stack.enter_context(module.register_forward_hook(check_patches))
        # one pair at a time, because all pairs of large images would take much memory
        for part in parts:
            pair = image.detach().repeat(2, 1, 1, 1)
            pair[1, :, *part] += noise[:, *part]
            entering.clear()
            with suppress(_Stop), reader.change_tokens(record_and_stop):
                compute_logits(model, pair)
            changes.append((entering[0][1] - entering[0][0]).norm(dim=1).cpu())

    overlap = any(is_overlapping)
    for (row, column), token_change in zip(places, changes, strict=False):
        if not token_change.any():
            raise ValueError(
                f"no token of {name} changes with the pixels of row {row}, column {column} of "
                f"{rows}×{columns} patches: are they cropped away within the model? Crop before it"
            )
        down = (torch.arange(rows)[:, None] - row).abs().expand(grid).flatten()
        across = (torch.arange(columns) - column).abs().expand(grid).flatten()
        # an image that is resized within the model has pixels of two patches at their border
        reach = max(3, max(grid) // 2) if overlap else 1
        far = token_change[num_prefix:][torch.maximum(down, across) > reach]
        bound = _FAR_TOLERANCE if overlap else _tolerance(image)
        is_mixed = bool(token_change[:num_prefix].any())
        most = int(token_change.argmax()) - num_prefix
        # a convolutional stem spreads a change to the neighbours, which may change more; of two
        # rows or columns each is the other's neighbour, which would tell nothing
        row_reach, column_reach = (int(overlap and side >= 3) for side in grid)
        if not is_mixed and (down[most] > row_reach or across[most] > column_reach):
            raise ValueError(
                f"{name} doesn't have {num_prefix} tokens and then {rows}×{columns} patches, row "
                "by row, so where its tokens lie is unknown"
            )
        if is_mixed or (far > bound * token_change.amax()).any():
            raise ValueError(
                f"the tokens of {name} are mixed before the first attention layer that can be read, "
                "so no map is exact"
            )
    if not all(change.any() for change in changes[len(places) :]):
        raise ValueError(
            f"no token of {name} changes with an edge of the image: does the model crop it? Crop "
            "before it"
        )


def _check_cover(
    model: nn.Module,
    image: Float[Tensor, "channels height width"],
    module: nn.Conv2d,
    pixels: Float[Tensor, "channels H W"],
    grid: Grid,
) -> None:
    """Raise ValueError if the `pixels` that become patches are the image with a border, if some are
    in no patch, or if a patch lies more than half a place from where a map shows it."""
    height, width = image.shape[1:]
    is_image = torch.equal(pixels[:, :height, :width], image)
    is_uneven = is_image and pixels.shape != image.shape
    for axis, cells in enumerate(grid):
        side = pixels.shape[axis + 1]
        kernel, stride = module.kernel_size[axis], module.stride[axis]
        padding = module.padding[axis]
        before = padding if isinstance(padding, int) else 0
        cell = side / cells
        # centres of the first and the last patch, and of the places that show them
        first = (kernel - 1) / 2 - before
        last = first + (cells - 1) * stride
        gaps = (first - (cell - 1) / 2, last - (side - 1 - (cell - 1) / 2))
        is_uneven |= kernel == stride and side % kernel > 0
        is_uneven |= any(abs(gap) > cell / 2 for gap in gaps)
    if is_uneven:
        rows, columns = module.kernel_size
        raise ValueError(
            f"{type(model).__name__} pads or crops images of {height}×{width} pixels to patches "
            f"of {rows}×{columns}, so a map doesn't lie evenly on them; take a size that the "
            "patches divide"
        )


@torch.no_grad()
def check_mixing(reader: ModelReader, image: OneImage, num_tokens: int) -> None:
    """Let all tokens attend to the same half of them, another one in each layer, with equal weights,
    and change the tokens that enter each block. Half of the others attend to themselves, too.

    If the other half changes, each of its tokens changes alone: nothing else mixes tokens, the
    attention has the tokens' order, and each token keeps its own. If the half changes to which all
    attend, all change: the attention is between tokens.

    Args:
        reader: The model, in evaluation mode.
        image: A normalised image.
        num_tokens: Number of its tokens.

    Raises:
        ValueError: Something else changes, so a map of the attention is none of the model.
    """
    layers = reader.places
    generator = torch.Generator().manual_seed(0)
    groups = [torch.randperm(num_tokens, generator=generator) % 4 for _ in layers]
    seen = _change_halves(reader, image, dict(enumerate(groups)))
    for number, (layer, group) in enumerate(zip(layers, groups, strict=True)):
        is_read = group < 2
        arrived = seen[number + 1].float()
        change = (arrived[1:] - arrived[:1]).norm(dim=-1).cpu()
        by_others, by_read = change
        own = torch.where(is_read, by_read, by_others)
        if by_others[is_read].amax() > _tolerance(image) * by_others.amax():
            raise ValueError(
                f"{type(reader.model).__name__} mixes tokens elsewhere than in the attention layers "
                f"that are known, or attends to them in another order, in or after the block of "
                f"{layer.name}: a convolution, an attention of another kind? So no map is exact"
            )
        if change.any() and num_tokens > 3 and not by_others[group == 3].any():
            raise ValueError(
                f"{layer.name} is an attention without a residual connection around it, and maps "
                "take each token to be added to what it attends to; methods for models without "
                "readable attention explain it"
            )
        num_fresh = int((own == 0).sum())
        if num_fresh:
            raise ValueError(
                f"{num_fresh} tokens of {_name_next(layers, number)} don't come from the block "
                "before (prompts of each layer's own?), so their attention doesn't multiply to a map"
            )
        # attention that is multiplied by 0 has no effect, as before training
        is_without = num_tokens > 3 and not by_read[~is_read].any()
        if is_without and _has_effect(reader, image, number, group):
            raise ValueError(
                f"the attention of {layer.name} isn't between the tokens of the block (between "
                "channels?), so no map shows it"
            )


def _has_effect(reader: ModelReader, image: OneImage, number: int, group: Tensor) -> bool:
    """Return whether it matters for a layer's block to which tokens all attend."""
    first, second = (
        _change_halves(reader, image, {number: one})[number + 1][0] for one in (group, 3 - group)
    )
    return not torch.equal(first, second)


def _change_halves(
    reader: ModelReader, image: OneImage, groups: Mapping[int, Tensor]
) -> list[Float[Tensor, "3 N D"]]:
    """Run three copies of an image while the tokens of some layers, by their numbers, attend to
    those of the groups 0 and 1; those of the group 2 attend to themselves, too.

    Returns:
        The copies' tokens as they arrive at each link, before the second's tokens are replaced by
        the first's with noise on those that aren't read, and the third's on those that are.
    """
    layers = reader.build_layers()
    generator = torch.Generator().manual_seed(0)
    arrived: list[Tensor] = []

    def change(link: int, tokens: Tensor) -> Tensor:
        if link == 0:
            for layer in layers:
                layer.begin(tokens)
        arrived.append(tokens)
        if link not in groups:
            return tokens
        one = tokens[0]
        at_read = (groups[link] < 2).to(one.device)[:, None]
        # tokens that are read change alike, because a mean over many would hide their changes
        noise = torch.randn(one.shape, generator=generator).to(one) * one.std()
        return torch.stack([one, one + noise * ~at_read, one + noise[:1] * at_read])

    with ExitStack() as stack:
        stack.enter_context(reader.change_links(change))
        for number, group in groups.items():
            mixing = ((group < 2) / (group < 2).sum()).repeat(len(group), 1)
            mixing[group == 2] = (mixing[group == 2] + torch.eye(len(group))[group == 2]) / 2
            mixing = mixing.to(image.device)
            stack.enter_context(layers[number].watch(lambda call: None, mixing=mixing))
        run_whole(reader.model, image.detach().repeat(3, 1, 1, 1))
    return arrived


@torch.no_grad()
def check_bypass(reader: ModelReader, image: OneImage, num_tokens: int) -> None:
    """Change the pixels and the tokens that enter each block, each in some copies of the image.

    A block must read the tokens of the block before and nothing else: in copies that have the same
    tokens there, the next tokens are the same, whatever pixels and earlier tokens they had. The
    tokens that leave the last block in this way decide the logits.

    Raises:
        ValueError: Something leads around the tokens of a block.
    """
    num_sources = len(reader.places) + 2  # pixels, and each link
    num_copies = next(n for n in itertools.count(2) if math.comb(n, n // 2) >= num_sources)
    # each of two sources changes a copy that the other doesn't change (Sperner 1928)
    codes = itertools.combinations(range(1, num_copies + 1), num_copies // 2)
    changed = [list(code) for _, code in zip(range(num_sources), codes, strict=False)]
    if num_tokens > _TOKENS_AT_ONCE:
        for copy in range(1, num_copies + 1):
            only = [[1] if copy in code else [] for code in changed]
            _follow_changes(reader, image, only, num_copies=1)
    else:
        _follow_changes(reader, image, changed, num_copies=num_copies)


def _follow_changes(
    reader: ModelReader,
    image: OneImage,
    changed: Sequence[list[int]],
    *,
    num_copies: int,
) -> None:
    """Run an image and copies of it, of which each source (the pixels, then each link) changes
    some. Raise ValueError if one changes that the source before didn't change."""
    layers = reader.places
    generator = torch.Generator().manual_seed(0)

    def mark_copies(source: int) -> Tensor:
        """1 for the image and each copy that a source changes, otherwise 0, [1 + copies, 1, 1, 1]."""
        is_changed = [float(copy in changed[source]) for copy in range(1 + num_copies)]
        return torch.tensor(is_changed).to(image)[:, None, None, None]

    noise = torch.randn(image[0].shape, generator=generator).to(image)
    images = image.detach() + noise * mark_copies(0)

    def find_bypass(source: int, tensor: Tensor) -> bool:
        changes: list[float] = (tensor - tensor[:1]).flatten(1).float().norm(dim=1).cpu().tolist()
        kept = [changes[copy] for copy in range(1, 1 + num_copies) if copy not in changed[source]]
        scale = max(*changes, _tolerance(image) * float(tensor[0].float().norm()))
        return max(kept, default=0.0) > _tolerance(image) * scale

    def change_link(link: int, tokens: Tensor) -> Tensor:
        if find_bypass(link, tokens):
            raise ValueError(
                f"{_name_next(layers, link - 1)} reads something other than the tokens that "
                f"{layers[link - 1].name} gave (a skip connection, a second encoder?), so their "
                "attention doesn't multiply to a map"
            )
        noise = torch.randn(tokens.shape[1:], generator=generator).to(tokens)
        return tokens[:1] + noise * tokens[0].std() * mark_copies(link + 1)[..., 0].to(tokens)

    with reader.change_links(change_link):
        logits = run_whole(reader.model, images)
    if find_bypass(-1, logits):
        raise ValueError(
            f"the classifier of {type(reader.model).__name__} reads something other than the tokens "
            f"that {layers[-1].name} gave (tokens of earlier blocks, a second encoder?), so a map "
            "of its attention shows a part of the model"
        )


def _name_next(layers: Sequence[LayerPlace], number: int) -> str:
    return layers[number + 1].name if number + 1 < len(layers) else "the classifier"


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
