"""The probability of a class without some of the patches.

A patch is removed by dropping its token after the position embedding. Painted images would look
unlike the training images (Jain et al. 2022, "Missingness bias in model debugging"): painting with
the mean colour is for comparison and for models that need all of their tokens.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vit.explanation.capture.discovery import Grid
from vit.explanation.capture.reader import ModelReader, read_model
from vit.model.logits import compute_logits
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import Precision, autocast
from vit.runtime.tensors import Images, Tokens

Fill = Literal["auto", "mean"]
# from numbers of images, and the patches of each that are kept, to logits
ComputeKept = Callable[[Int[Tensor, " R"], Int[Tensor, "R kept"]], Float[Tensor, "R C"]]


@torch.no_grad()
def build_removal(
    model: nn.Module | ModelReader,
    images: Images,
    *,
    grid: Grid,
    fill: Fill = "auto",
    precision: Precision = "float32",
    batch_size: int = 64,
) -> ComputeKept:
    """Build a function from numbers [R] of images, and the patches of each that are kept [R, kept],
    to logits [R, C].

    Args:
        model: A classifier whose capture is verified.
        images: Normalised images, on the model's device.
        fill: "auto" drops the tokens of the other patches if the model allows it; otherwise, and
            for "mean", their pixels get the image's mean colour.
        batch_size: Whole images at a time; with fewer tokens, more images in proportion.
    """
    reader = read_model(model, images)
    num_patches = grid[0] * grid[1]
    drops_tokens = fill == "auto" and reader.can_drop_tokens
    recorded: list[Tensor] = []

    def record_tokens(tokens: Tensor) -> Tensor:
        recorded.append(tokens)
        return tokens

    # the tokens before the first block
    if drops_tokens:
        with reader.change_tokens(record_tokens), autocast(images.device, precision):
            for batch in torch.split(images, batch_size):
                compute_logits(reader.model, batch)
    image_tokens = torch.cat(recorded) if recorded else None
    background = images.mean(dim=(-1, -2), keepdim=True)

    def compute_rows(rows: Int[Tensor, " r"], kept: Int[Tensor, "r kept"]) -> Float[Tensor, "r C"]:
        if image_tokens is not None:
            num_prefix_tokens = image_tokens.shape[1] - num_patches
            patches = image_tokens[rows[:, None], num_prefix_tokens + kept]
            tokens = torch.cat([image_tokens[rows, :num_prefix_tokens], patches], dim=1)
            return _classify_tokens(reader, tokens, images[rows])
        # the others show the mean colour
        mask = torch.zeros(len(rows), num_patches, device=images.device).scatter_(1, kept, 1.0)
        mask = F.interpolate(mask.reshape(-1, 1, *grid), size=images.shape[-2:], mode="nearest")
        return compute_logits(reader.model, images[rows] * mask + background[rows] * (1 - mask))

    @torch.no_grad()
    def compute_kept(
        numbers: Int[Tensor, " R"], kept: Int[Tensor, "R kept"]
    ) -> Float[Tensor, "R C"]:
        rows_at_once = batch_size
        if image_tokens is not None:
            # as many tokens at a time as a batch of whole images has
            num_tokens = image_tokens.shape[1] - num_patches + kept.shape[1]
            rows_at_once = batch_size * image_tokens.shape[1] // num_tokens
        parts = (torch.split(tensor, rows_at_once) for tensor in (numbers, kept))
        with autocast(images.device, precision):
            return torch.cat(list(map(compute_rows, *parts)))

    return compute_kept


def _classify_tokens(reader: ModelReader, tokens: Tokens, images: Images) -> Float[Tensor, "r C"]:
    """Compute logits from the tokens before the first block."""
    model = reader.model
    if not isinstance(model, VisionTransformer):
        with reader.change_tokens(lambda embedded_again: tokens):
            return compute_logits(model, images)
    # a convolutional stem may cost as much as the blocks, so it doesn't run again
    for block in model.blocks:
        tokens = block(tokens)
    with torch.autocast(images.device.type, enabled=False):
        return model.forward_head(model.norm(tokens).float())
