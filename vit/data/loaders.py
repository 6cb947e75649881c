"""Batches whose order and every draw are functions of (seed, epoch, sample)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vit.data.augment import Augment
from vit.data.draws import Draws
from vit.data.images import Preprocess
from vit.data.stores import Store


class Batch(NamedTuple):
    """What a step takes."""

    images: Float[Tensor, "B 3 H W"]  # normalised
    targets: Tensor  # int64 [B], or float32 [B, C] when samples are mixed
    labels: Int64[Tensor, " B"]
    sample_ids: Int64[Tensor, " B"]  # index in the store or source


class ResidentLoader:
    """Batches of a store that is held whole on the device as uint8.

    `batch_size` counts the samples of all ranks; a rank takes its contiguous part of every batch.
    """

    def __init__(
        self,
        store: Store,
        *,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        preprocess: Preprocess,
        augment: Augment | None,
        shuffle: bool,
        drop_last: bool,
        num_classes: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        assert store.images is not None
        self.images = torch.from_numpy(store.images.copy()).to(device)
        self.labels = torch.from_numpy(store.labels).to(device)
        self.batch_size, self.seed, self.preprocess, self.augment = batch_size, seed, preprocess, augment
        self.shuffle, self.drop_last, self.num_classes = shuffle, drop_last, num_classes
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        """Steps an epoch."""
        n = len(self.labels)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def epoch(
        self, epoch: int, *, start_step: int = 0, image_size: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """The batches of an epoch from `start_step` on."""
        draws = Draws(self.seed, epoch)
        n = len(self.labels)
        order = (draws.permutation(n) if self.shuffle else torch.arange(n)).to(self.labels.device)
        for step in range(start_step, len(self)):
            ids = order[step * self.batch_size : (step + 1) * self.batch_size]
            ids = ids.tensor_split(self.world_size)[self.rank]
            pixels = self._pixels(draws, ids)
            images = self.preprocess.normalize(pixels)
            if self.augment and self.augment.cutout:
                images = _cutout(images, draws, ids, self.augment.cutout)
            if image_size is not None and image_size != tuple(images.shape[-2:]):
                images = torch.nn.functional.interpolate(images, image_size, mode="bilinear", antialias=True)
            labels = self.labels[ids]
            yield Batch(images, labels, labels, ids)

    def _pixels(self, draws: Draws, ids: Int64[Tensor, " B"]) -> Tensor:
        """Gather [B, H, W, 3] uint8 pixels, cut and flipped by index arithmetic."""
        (height, width), full = self.preprocess.image_size, self.images.shape[1:3]
        rows = torch.arange(height, device=ids.device) + (full[0] - height) // 2
        columns = torch.arange(width, device=ids.device) + (full[1] - width) // 2
        rows, columns = rows.expand(len(ids), -1), columns.expand(len(ids), -1)
        if self.augment and self.augment.crop_padding:
            padding = self.augment.crop_padding
            span = 2 * padding + 1
            rows = rows + (draws.integers("crop y", ids, below=span) - padding)[:, None]
            columns = columns + (draws.integers("crop x", ids, below=span) - padding)[:, None]
            rows, columns = _reflect(rows, full[0]), _reflect(columns, full[1])
        if self.augment and self.augment.flip != "none":
            flipped = draws.bits("flip", ids) < 0
            columns = torch.where(flipped[:, None], columns.flip(1), columns)
        return self.images[ids[:, None, None], rows[:, :, None], columns[:, None, :]]


def _reflect(index: Tensor, size: int) -> Tensor:
    """Fold indices a little outside 0 … size - 1 back in, without repeating the edge."""
    index = index.abs()
    return torch.minimum(index, 2 * (size - 1) - index)


def _cutout(images: Tensor, draws: Draws, ids: Tensor, side: int) -> Tensor:
    """Set a square of each image to the mean: 0 after normalisation (DeVries & Taylor 2017)."""
    height, width = images.shape[-2:]
    top = draws.integers("cutout y", ids, below=height) - side // 2
    left = draws.integers("cutout x", ids, below=width) - side // 2
    rows = torch.arange(height, device=ids.device) - top[:, None]
    columns = torch.arange(width, device=ids.device) - left[:, None]
    inside = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return images.masked_fill(inside[:, None], 0.0)
