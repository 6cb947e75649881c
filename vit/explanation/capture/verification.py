"""Check that a map of the recorded attention is a map of this model.

Maps assume that the tokens are patches row by row, that the attention layers follow one another,
that each has a residual connection, and that nothing else mixes tokens or leads around them. The
checks change one image or its tokens, look at what changes, and refuse a model for which an
assumption is wrong. They need no list of names.
"""

import itertools
import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.discovery import ChangeTokens, run_whole
from vit.explanation.capture.layers import find_tolerance
from vit.explanation.capture.reader import ModelReader
from vit.explanation.capture.tokens import Grid, draw_noise
from vit.model.logits import compute_logits
from vit.runtime.tensors import Images

_INNER_PATCHES = 4  # number of patches that are checked in addition to the corners
# Largest change of a token far from a changed patch where convolutions overlap, as a fraction of
# the largest: that of norms over a feature map is below 0.02, that of an attention above 0.1.
_FAR_TOLERANCE = 0.05
# number of tokens up to which all copies of an image run in one batch
_TOKENS_AT_ONCE = 1100

OneImage = Float[Tensor, "1 channels height width"]


class _Stop(Exception):
    """The rest of a forward pass isn't needed."""


@torch.no_grad()
def check_places(reader: ModelReader, image: OneImage, *, num_prefix: int, grid: Grid) -> None:
    """Change some patches of the image, including the corners, and its edges.

    Raises:
        ValueError: The token of a changed patch (with overlapping patches on at least three rows or
            columns, it or a neighbour) isn't the one that changes most, or one that doesn't read it
            changes, or none changes with an edge.
    """
    name = type(reader.model).__name__
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
    noise = draw_noise(image[0].shape, image, generator)
    is_overlapping: list[bool] = []  # for each convolution

    def check_patches(module: nn.Conv2d, args: tuple[Tensor, ...], patches: Tensor) -> None:
        sides = zip(module.kernel_size, module.stride, strict=True)
        is_overlapping.append(any(kernel > stride for kernel, stride in sides))
        if args[0].shape[1] == image.shape[1] and tuple(patches.shape[-2:]) == grid:
            _check_cover(name, image, module, args[0], grid)

    changes: list[Float[Tensor, " N"]] = []

    # the tokens that enter the first block are enough
    def record_and_stop(tokens: Tensor) -> Tensor:
        changes.append((tokens[1] - tokens[0]).norm(dim=1).cpu())
        raise _Stop

    with ExitStack() as stack:
        for module in reader.model.modules():
            if isinstance(module, nn.Conv2d):
                stack.enter_context(module.register_forward_hook(check_patches))
        # one pair at a time, because all pairs of large images would take much memory
        for part in parts:
            pair = image.detach().repeat(2, 1, 1, 1)
            pair[1, :, *part] += noise[:, *part]
            with suppress(_Stop), reader.change_tokens(record_and_stop):
                compute_logits(reader.model, pair)

    if not all(change.any() for change in changes):
        raise ValueError(
            f"no token of {name} changes with a patch or an edge of the image: does the model crop "
            "it? Crop before it"
        )
    overlap = any(is_overlapping)
    # a convolutional stem spreads a change to the neighbours, which may change more; of two rows or
    # columns each is the other's neighbour, which would tell nothing
    row_reach, column_reach = (int(overlap and side >= 3) for side in grid)
    # an image that is resized within the model has pixels of two patches at their border
    reach = max(3, max(grid) // 2) if overlap else 1
    bound = _FAR_TOLERANCE if overlap else find_tolerance(image)
    for (row, column), change in zip(places, changes, strict=False):
        down = (torch.arange(rows)[:, None] - row).abs().expand(grid).flatten()
        across = (torch.arange(columns) - column).abs().expand(grid).flatten()
        far = change[num_prefix:][torch.maximum(down, across) > reach]
        is_mixed = bool(change[:num_prefix].any())
        most = int(change.argmax()) - num_prefix
        if not is_mixed and (down[most] > row_reach or across[most] > column_reach):
            raise ValueError(
                f"{name} doesn't have {num_prefix} tokens and then {rows}×{columns} patches, row "
                "by row, so where its tokens lie is unknown"
            )
        if is_mixed or (far > bound * change.amax()).any():
            raise ValueError(
                f"the tokens of {name} are mixed before the first attention layer that can be read, "
                "so no map is exact"
            )


def _check_cover(
    name: str,
    image: OneImage,
    module: nn.Conv2d,
    pixels: Float[Tensor, "copies channels H W"],
    grid: Grid,
) -> None:
    """Raise ValueError if the `pixels` that become patches are the image with a border, if some are
    in no patch, or if a patch lies more than half a place from where a map shows it."""
    height, width = image.shape[2:]
    # only the model's own functions are counted
    with torch._C.DisableTorchFunction():
        is_image = torch.equal(pixels[:1, :, :height, :width], image)
    is_uneven = is_image and pixels.shape[1:] != image.shape[1:]
    for axis, (side, cells) in enumerate(zip(pixels.shape[2:], grid, strict=True)):
        kernel, stride = module.kernel_size[axis], module.stride[axis]
        padding = module.padding[axis]
        before = padding if isinstance(padding, int) else 0
        # centres of the first and the last patch, and of the places that show them
        first = (kernel - 1) / 2 - before
        last = first + (cells - 1) * stride
        cell = side / cells
        gaps = (first - (cell - 1) / 2, last - (side - 1 - (cell - 1) / 2))
        is_uneven |= kernel == stride and side % kernel > 0
        is_uneven |= any(abs(gap) > cell / 2 for gap in gaps)
    if is_uneven:
        rows, columns = module.kernel_size
        raise ValueError(
            f"{name} pads or crops images of {height}×{width} pixels to patches of {rows}×{columns}"
            ", so a map doesn't lie evenly on them; take a size that the patches divide"
        )


def _follow(
    reader: ModelReader,
    images: Images,
    change: ChangeTokens,
    mixing: Mapping[int, Tensor] | None = None,
) -> list[Float[Tensor, "B ..."]]:
    """Run copies of an image, and measure what arrives at each link, before it is changed, and the
    logits: the norm of each token of the first copy, and of its changes in the others."""
    arrived = []

    def measure(tensor: Tensor) -> None:
        # norms alone, because the tokens of all links would take much memory
        changes = torch.cat([tensor[:1], tensor[1:] - tensor[:1]])
        arrived.append(changes.float().norm(dim=-1).cpu())

    def note(link: int, tokens: Tensor) -> Tensor | None:
        measure(tokens)
        return change(link, tokens)

    with reader.watch(note, mixing=mixing):
        measure(run_whole(reader.model, images))
    return arrived


@torch.no_grad()
def check_mixing(reader: ModelReader, image: OneImage, num_tokens: int) -> None:
    """Let all tokens attend to the same half of them, another one in each layer, with equal weights,
    and change the tokens that enter each block. Half of the others attend to themselves, too.

    If the other half changes, each of its tokens changes alone: nothing else mixes tokens, the
    attention has the tokens' order, and each token keeps its own. If the half changes to which all
    attend, all change: the attention is between tokens.

    Raises:
        ValueError: Something else changes, so a map of the attention is none of the model.
    """
    generator = torch.Generator().manual_seed(0)
    groups = [torch.randperm(num_tokens, generator=generator) % 4 for _ in reader.places]
    seen = _change_halves(reader, image, dict(enumerate(groups)))
    for number, (name, group) in enumerate(zip(reader.places, groups, strict=True)):
        is_read = group < 2
        _, by_others, by_read = seen[number + 1]
        if by_others[is_read].amax() > find_tolerance(image) * by_others.amax():
            raise ValueError(
                f"{type(reader.model).__name__} mixes tokens elsewhere than in the attention layers "
                f"that are known, or attends to them in another order, in or after the block of "
                f"{name}: a convolution, an attention of another kind? So no map is exact"
            )
        num_fresh = int((torch.where(is_read, by_read, by_others) == 0).sum())
        if num_fresh:
            raise ValueError(
                f"{num_fresh} of {num_tokens} tokens after {name} don't contain the tokens before "
                "it (an attention without a residual connection, prompts of each layer's own?), so "
                "its attention isn't that of a map"
            )
        # attention that is multiplied by 0 has no effect, as before training
        if num_tokens > 3 and not by_read[~is_read].any():
            first, second = (
                _change_halves(reader, image, {number: one})[number + 1][0]
                for one in (group, 3 - group)
            )
            if not torch.equal(first, second):
                raise ValueError(
                    f"the attention of {name} isn't between the tokens of the block (between "
                    "channels?), so no map shows it"
                )


def _change_halves(
    reader: ModelReader, image: OneImage, groups: Mapping[int, Tensor]
) -> list[Float[Tensor, "3 _"]]:
    """Follow three copies of an image while the tokens of some layers, by their numbers, attend to
    those of the groups 0 and 1; those of the group 2 attend to themselves, too. At each link the
    second's tokens are replaced by the first's with noise on those that aren't read, and the third's
    by the first's with noise on those that are."""
    generator = torch.Generator().manual_seed(0)
    mixing = {}
    for number, group in groups.items():
        weights = ((group < 2) / (group < 2).sum()).repeat(len(group), 1)
        weights[group == 2] = (weights[group == 2] + torch.eye(len(group))[group == 2]) / 2
        mixing[number] = weights.to(image.device)

    def change(link: int, tokens: Tensor) -> Tensor | None:
        if link not in groups:
            return None
        one = tokens[0]
        at_read = (groups[link] < 2).to(one.device)[:, None]
        # tokens that are read change alike, because a mean over many would hide their changes
        noise = draw_noise(one.shape, one, generator) * one.std()
        return torch.stack([one, one + noise * ~at_read, one + noise[:1] * at_read])

    return _follow(reader, image.detach().repeat(3, 1, 1, 1), change, mixing)[:-1]


@torch.no_grad()
def check_bypass(reader: ModelReader, image: OneImage, num_tokens: int) -> None:
    """Change the pixels and the tokens that enter each block, each in some copies of the image.

    A block must read the tokens of the block before and nothing else: in copies that have the same
    tokens there, the next tokens are the same, whatever pixels and earlier tokens they had. The
    tokens that leave the last block in this way decide the logits.

    Raises:
        ValueError: Something leads around the tokens of a block.
    """
    readers = [*reader.places, "the classifier", "the classifier"]
    num_copies = next(n for n in itertools.count(2) if math.comb(n, n // 2) >= len(readers))
    # each of two sources changes a copy that the other doesn't change (Sperner 1928)
    codes = itertools.combinations(range(num_copies), num_copies // 2)
    # copies of the image that the pixels, and then the tokens of each link, change
    marks = torch.tensor([[copy in code for copy in range(num_copies)] for code in codes])
    tolerance = find_tolerance(image)
    at_once = num_copies if num_tokens <= _TOKENS_AT_ONCE else 1
    for part in torch.split(marks, at_once, dim=1):
        generator = torch.Generator().manual_seed(0)
        change = partial(_add_noise, generator, torch.nn.functional.pad(part, (1, 0)))
        images = change(-1, image.detach(), scale=1.0)
        for number, arrived in enumerate(_follow(reader, images, change)):
            size, *changes = arrived.reshape(len(arrived), -1).norm(dim=1)
            scale = max(*changes, tolerance * size)
            is_wrong = torch.stack(changes) > tolerance * scale
            if is_wrong[~part[number]].any():
                raise ValueError(
                    f"{readers[number]} of {type(reader.model).__name__} reads something other than "
                    f"the tokens of the block before (a skip connection, tokens of earlier blocks, "
                    "a second encoder?), so a map of its attention shows a part of the model"
                )


def _add_noise(
    generator: torch.Generator,
    is_changed: Tensor,
    link: int,
    tensor: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Repeat the first of some copies, with noise on those that a link changes."""
    one = tensor[:1]
    scales = is_changed[link + 1].to(one) * (one.std() if scale is None else scale)
    noise = draw_noise(one.shape[1:], one, generator)
    return one + noise * scales.reshape(-1, *(1,) * (one.ndim - 1))


@torch.no_grad()
def check_repeatable(model: nn.Module, image: OneImage, logits: Float[Tensor, "1 C"]) -> None:
    """Raise ValueError if a second pass doesn't give the same logits."""
    again = compute_logits(model, image.detach())
    tolerance = 10 * find_tolerance(image)  # one image and a batch are rounded differently
    if (again - logits).abs().max() > tolerance * logits.abs().max():
        raise ValueError(
            f"two passes of {type(model).__name__} over one image give different logits (dropout "
            "or a random mask in evaluation mode?), so a map of one pass explains no other"
        )
