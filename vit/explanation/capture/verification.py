"""Check that a map of the recorded attention is a map of this model.

Maps assume that the tokens are patches row by row, that the attention layers follow one another,
that each has a residual connection, and that nothing else mixes tokens or leads around them. The
checks change one image or its tokens, and refuse a model in which something else changes.
"""

import itertools
import math
from contextlib import suppress
from operator import gt

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.explanation.capture.discovery import (
    OnLayer,
    OnTokens,
    draw_noise,
    hook_modules,
    run_whole,
)
from vit.explanation.capture.reader import FEW_TOKENS, MANY_TOKENS, ModelReader
from vit.explanation.capture.watch import AttentionLayer, find_tolerance
from vit.model.logits import compute_logits
from vit.runtime.tensors import Images

_INNER_PATCHES = 4  # number of patches that are checked in addition to the corners
# Largest change of a token far from a changed patch where convolutions overlap, as a fraction of
# the largest: that of norms over a feature map is below 0.02, that of an attention above 0.1.
_FAR_TOLERANCE = 0.05

OneImage = Float[Tensor, "1 channels height width"]


class _Stop(Exception):
    """The rest of a forward pass isn't needed."""


@torch.no_grad()
def check_attention(reader: ModelReader, image: OneImage) -> None:
    """Raise ValueError if the attention of a model, which may be read right, makes no map of it."""
    num_tokens = reader.attention.num_tokens[0]
    if num_tokens > MANY_TOKENS and reader.can_drop_tokens:
        num_tokens = FEW_TOKENS
    _check_patches(reader, image)
    _check_bypass(reader, image, num_tokens)
    _check_mixing(reader, image, num_tokens)


def _check_patches(reader: ModelReader, image: OneImage) -> None:
    """Change some patches of the image, including the corners, each in a copy of it. Raise
    ValueError if another token than that of a changed patch changes; with overlapping patches on at
    least three rows or columns, a neighbour may change most."""
    num_prefix, grid = reader.find_patches()
    rows, columns = grid
    generator = torch.Generator().manual_seed(0)
    inner = torch.randperm(rows * columns, generator=generator)[:_INNER_PATCHES].tolist()
    # corners find an image that is mirrored or turned within the model
    changed = list(itertools.product((0, rows - 1), (0, columns - 1)))
    changed += [divmod(patch, columns) for patch in inner]
    # noise is visible even if the model clips values
    noise = draw_noise(image[0].shape, image, generator)
    overlaps: list[bool] = []  # for each convolution
    is_wrong = False

    def on_convolution(module: nn.Conv2d, args: tuple[Tensor, ...], patches: Tensor) -> None:
        nonlocal is_wrong
        overlaps.append(any(map(gt, module.kernel_size, module.stride)))
        if args[0].shape[1] == image.shape[1] and tuple(patches.shape[-2:]) == grid:
            is_wrong |= not _is_centred(module)

    changes: list[Float[Tensor, " N"]] = []

    # the tokens that enter the first block are enough
    def record_and_stop(tokens: Tensor) -> Tensor:
        changes.append((tokens[1] - tokens[0]).norm(dim=1).cpu())
        raise _Stop

    height, width = image.shape[2] // rows, image.shape[3] // columns
    with hook_modules(reader.model, on_convolution, nn.Conv2d):
        # one pair at a time, because all pairs of large images would take much memory
        for row, column in changed:
            top, left = row * height, column * width
            patch = (..., slice(top, top + height), slice(left, left + width))
            pair = image.repeat(2, 1, 1, 1)
            pair[1][patch] += noise[patch]
            with suppress(_Stop), reader.change_tokens(record_and_stop):
                compute_logits(reader.model, pair)

    bound, far, reach = find_tolerance(image), 0, torch.zeros(2)
    if any(overlaps):
        # a convolutional stem spreads a change to the neighbours, which may change more; of two
        # rows or columns each is the other's neighbour, which would tell nothing
        bound, far = _FAR_TOLERANCE, max(3, max(grid) // 2)
        reach = torch.tensor([side >= 3 for side in grid])
    patches = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))  # [P, 2]
    for one, change in zip(changed, changes, strict=True):
        distance = (patches - torch.tensor(one)).abs()
        most = int(change.argmax()) - num_prefix
        is_wrong |= most < 0 or bool((distance[most] > reach).any())
        others = change[num_prefix:][distance.amax(dim=1) > far]
        is_wrong |= bool(change[:num_prefix].any() or (others > bound * change.amax()).any())
    if is_wrong:
        raise ValueError(
            f"the tokens of {type(reader.model).__name__} are not one for each of {rows}×{columns} "
            f"patches, row by row after {num_prefix} others, before the first attention layer that "
            "can be read (another attention before it, a crop or border in the model, another "
            "order?), so no map is exact"
        )


def _is_centred(convolution: nn.Conv2d) -> bool:
    """Return whether patches are about where a map shows them: larger ones need a border."""
    borders = convolution.padding if isinstance(convolution.padding, tuple) else (0, 0)
    sides = zip(convolution.kernel_size, convolution.stride, borders, strict=True)
    return all(abs(kernel - stride - 2 * border) <= stride for kernel, stride, border in sides)


def _follow(
    reader: ModelReader, images: Images, num_tokens: int, on_tokens: OnTokens, on_layer: OnLayer
) -> list[Float[Tensor, "B ..."]]:
    """Run copies of an image with the first `num_tokens` tokens, and measure what arrives at each
    link, and the logits: the norm of each token of the first copy, and of its changes in the
    others."""
    arrived = []

    def measure(tensor: Tensor) -> None:
        # norms alone, because the tokens of all links would take much memory
        changes = torch.cat([tensor[:1], tensor[1:] - tensor[:1]])
        arrived.append(changes.float().norm(dim=-1).cpu())

    def note(link: int, tokens: Tensor) -> Tensor | None:
        tokens = tokens[:, :num_tokens]
        measure(tokens)
        return on_tokens(link, tokens)

    with reader.watch(note, on_layer):
        measure(run_whole(reader.model, images))
    return arrived


def _check_mixing(reader: ModelReader, image: OneImage, num_tokens: int) -> None:
    """Let all tokens attend to the same half of them, another one in each layer, with equal weights,
    and change the tokens that enter each block. Half of the others attend to themselves, too.

    If the other half changes, each of its tokens must change alone: nothing else mixes tokens, and
    the attention has their order. If the half changes to which all attend, all must change: the
    attention is between tokens. Otherwise raise ValueError.
    """
    generator = torch.Generator().manual_seed(0)
    groups = [
        torch.randperm(num_tokens, generator=generator) % 4
        for _ in range(reader.attention.num_layers)
    ]
    generator = torch.Generator().manual_seed(0)

    def change(link: int, tokens: Tensor) -> Tensor | None:
        if link == len(groups):
            return None
        one = tokens[0]
        is_read = (groups[link] < 2).to(one.device)[:, None]
        # tokens that are read change alike, because a mean over many would hide their changes
        noise = draw_noise(one.shape, one, generator) * one.std()
        return torch.stack([one, one + noise * ~is_read, one + noise[:1] * is_read])

    def attend(number: int, layer: AttentionLayer) -> Tensor | None:
        if number == len(groups):
            return None
        group = groups[number].to(layer.value.device)
        mean = layer.value[:, :, group < 2].mean(dim=2, keepdim=True)
        return torch.where((group == 2)[:, None], (mean + layer.value) / 2, mean)

    seen = _follow(reader, image.repeat(3, 1, 1, 1), num_tokens, change, attend)
    for number, (group, arrived) in enumerate(zip(groups, seen[1:-1], strict=True), start=1):
        is_read = group < 2
        _, by_others, by_read = arrived
        problem = ""
        if by_others[is_read].amax() > find_tolerance(image) * by_others.amax():
            problem = (
                "mixes tokens elsewhere than in the attention that is known, or attends to them in "
                "another order (a convolution, another attention?)"
            )
        elif not torch.where(is_read, by_read, by_others).all():
            problem = (
                "doesn't keep the tokens before it (an attention without a residual connection, "
                "prompts of its own?)"
            )
        elif num_tokens > 3 and not by_read[~is_read].any():
            problem = (
                "doesn't mix its tokens (attention between channels, or multiplied by 0 as before "
                "training?)"
            )
        if problem:
            raise ValueError(
                f"the block of attention layer {number} of {type(reader.model).__name__} {problem}, "
                "so no map is exact"
            )


def _check_bypass(reader: ModelReader, image: OneImage, num_tokens: int) -> None:
    """Change the pixels and the tokens that enter each block, each in some copies of the image.

    Copies that have the same tokens before a block must have the same ones after it, whatever
    pixels and earlier tokens they had. The tokens that leave the last block decide the logits in
    this way. Otherwise raise ValueError.
    """
    num_layers = reader.attention.num_layers
    readers = [f"attention layer {number}" for number in range(1, num_layers + 1)]
    readers += 2 * ["the classifier"]
    num_copies = next(n for n in itertools.count(2) if math.comb(n, n // 2) >= len(readers))
    # each of two sources changes a copy that the other doesn't change (Sperner 1928)
    codes = itertools.combinations(range(num_copies), num_copies // 2)
    # copies of the image that the pixels, and then the tokens of each link, change
    marks = torch.tensor([[copy in code for copy in range(num_copies)] for code in codes])
    tolerance = find_tolerance(image)
    # a batch of all copies would take much memory
    for part in torch.split(marks, num_copies if num_tokens <= MANY_TOKENS else 1, dim=1):
        arrived = _follow_copies(reader, image, num_tokens, part)
        for name, is_marked, norms in zip(readers, part, arrived, strict=False):
            size, *changes = norms.reshape(len(norms), -1).norm(dim=1)
            scale = max(*changes, tolerance * size)
            if (torch.stack(changes) > tolerance * scale)[~is_marked].any():
                raise ValueError(
                    f"{name} of {type(reader.model).__name__} reads something other than the tokens "
                    "of the block before (a skip connection, tokens of earlier blocks, a second "
                    "encoder?), so a map of its attention shows a part of the model"
                )


def _follow_copies(
    reader: ModelReader, image: OneImage, num_tokens: int, marks: Tensor
) -> list[Float[Tensor, "B ..."]]:
    """Follow an image and copies with noise on the pixels or the tokens of a link, if marked."""
    generator = torch.Generator().manual_seed(0)

    def add_noise(tensor: Tensor, is_changed: Tensor, scale: float | Tensor) -> Tensor:
        one = tensor[:1]
        scales = torch.nn.functional.pad(is_changed, (1, 0)).to(one) * scale
        noise = draw_noise(one.shape[1:], one, generator)
        return one + noise * scales.reshape(-1, *(1,) * (one.ndim - 1))

    def change(link: int, tokens: Tensor) -> Tensor:
        return add_noise(tokens, marks[link + 1], tokens[:1].std())

    images = add_noise(image, marks[0], 1.0)
    return _follow(reader, images, num_tokens, change, lambda number, layer: None)
