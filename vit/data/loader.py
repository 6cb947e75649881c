"""Batches whose order and random numbers are functions of (seed, epoch, sample).

So a run that stops in mid-epoch goes on at `start_step` with the batches it would have had, and
neither the number of workers nor of processes changes a sample's augmentation.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vit.data.augment import Augmentation
from vit.data.dataset import ImageDataset
from vit.data.image_ops import augment_images, mix_batch
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.data.workers import Decoder, DecodingWorkers, Steps, Transform
from vit.runtime.device import copy_to_device, count_bytes
from vit.runtime.processes import Process

# part of the free memory that decoded pixels may take
_MAX_MEMORY_FRACTION = 0.4
# decoded images that are copied to a device at a time
_COPIED = 1024


class Batch(NamedTuple):
    """The images and labels of a training step, on the training device."""

    # normalised, or their tokens
    images: Float[Tensor, "B 3 H W"] | Float[Tensor, "B N D"]
    # int64 [B]; float32 [B, C] if samples are mixed or may have several labels
    targets: Tensor
    # int64 [B], or float32 [B, C] if samples may have several labels
    labels: Tensor
    # index of each image in the dataset
    sample_ids: Int64[Tensor, " B"]


@dataclass(kw_only=True, eq=False)
class TrainLoader:
    """Shuffled, augmented batches of one size; the images that don't fill a batch are left out.

    The pixels of a decoded dataset lie on the device, or where they are mapped. Workers decode the
    full-size images of another one. Raises ValueError if the batch size doesn't fit the dataset,
    the processes or mixup's pairs.
    """

    dataset: ImageDataset = field(kw_only=False)
    # images in a step, over all processes, of which each takes a contiguous part
    batch_size: int
    # seed of the order and of the augmentation
    seed: int
    device: torch.device
    preprocess: Preprocess
    process: Process = field(default_factory=Process)
    augmentation: Augmentation = field(default_factory=Augmentation)
    # decoded pixels are copied to the device at once, instead of those of each batch
    is_resident: bool = True
    # the user's function of each full-size image, before all augmentation
    transform: Transform | None = None
    # tokens that a model's frozen blocks made of each image and, unless the flip is "none", of its
    # mirror image: batches are of them, have one size, and aren't mixed
    tokens: Float[Tensor, "n V N D"] | None = None
    # processes that decode; None is `count_workers`, 0 decodes in this process
    workers: int | None = None
    max_unreadable_fraction: float = 0.05

    def __post_init__(self) -> None:
        # mixup and cutmix pair samples
        multiple = self.process.world_size * (1 + self.augmentation.is_mixing)
        if not 0 < self.batch_size <= len(self.dataset) or self.batch_size % multiple:
            text = f"a multiple of {multiple} and at most the {len(self.dataset)} images"
            reason = "; mixup and cutmix mix pairs" if self.augmentation.is_mixing else ""
            raise ValueError(f"batch_size {self.batch_size} must be {text}{reason}")
        self._labels = torch.from_numpy(self.dataset.labels)
        if self.dataset.is_multilabel:
            self._labels = self._labels.float()
        if self.tokens is not None:
            self.tokens = self.tokens.to(self.device)
        self._workers: DecodingWorkers | None = None
        # the part of the augmentation that is left for the device
        self._device_augmentation = self.augmentation
        pixels = self.dataset.pixels
        if pixels is None:
            decoder = Decoder(self.dataset, self.preprocess, self.augmentation, self.transform)
            self._workers = DecodingWorkers(decoder, self.workers, self.max_unreadable_fraction)
            if decoder.cuts_parts:
                self._device_augmentation = replace(self.augmentation, resized_crop_scale=None)
            return
        self._pixels = torch.from_numpy(pixels.stored)
        # row of each sample in them
        self._rows = torch.from_numpy(pixels.rows)
        if self.is_resident and self.device.type != "cpu":
            shape = (len(pixels), *self._pixels.shape[1:])
            resident = torch.empty(shape, dtype=torch.uint8, device=self.device)
            # in parts, because the host's memory may be the smaller one
            for place, rows in zip(
                torch.split(resident, _COPIED), torch.split(self._rows, _COPIED), strict=True
            ):
                place.copy_(self._pixels[rows])
            self._pixels = resident
            self._rows = torch.arange(len(pixels))

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self._labels) // self.batch_size

    def epoch(
        self,
        epoch: int,
        *,
        start_step: int = 0,
        image_size: tuple[int, int] | None = None,
        mix: bool = True,
    ) -> Iterator[Batch]:
        """The batches of an epoch, from `start_step` on; `image_size` is that of a schedule."""
        size = image_size or self.preprocess.image_size
        samples = self._sample(epoch, start_step)
        if self.tokens is not None:
            yield from map(self._take_tokens, samples)
            return
        if self._workers is not None:
            read = self._workers.decode(samples)
        elif self._pixels.device.type == self.device.type:
            read = ((rng, None) for rng in samples)
        else:
            read = self._gather(samples)
        with closing(read) as steps:
            for rng, pixels in steps:
                yield self._augment_batch(rng, pixels, size, mix=mix)

    def close(self) -> None:
        """End the processes that decode images; the next epoch starts new ones."""
        if self._workers is not None:
            self._workers.close()

    def _sample(self, epoch: int, start_step: int) -> Iterator[StatelessRandom]:
        """The samples of this process in each batch of an epoch."""
        ids = torch.arange(len(self._labels))
        order = StatelessRandom(self.seed, epoch, ids).permutation()
        # contiguous parts of each batch: any number of processes trains on the same batches
        batches = order[: len(self) * self.batch_size].view(len(self), self.process.world_size, -1)
        for sample_ids in batches[start_step:, self.process.rank]:
            yield StatelessRandom(self.seed, epoch, sample_ids)

    def _gather(self, samples: Iterator[StatelessRandom]) -> Steps:
        """Yield the samples and the mapped pixels of each batch. A thread reads them one batch
        ahead, into memory from which a GPU copies while it computes."""

        def start(rng: StatelessRandom) -> tuple[StatelessRandom, Future[Tensor]]:
            shape = (len(rng.sample_ids), *self._pixels.shape[1:])
            is_pinned = self.device.type != "mps"
            batch = torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
            rows = self._rows[rng.sample_ids]
            return rng, pool.submit(torch.index_select, self._pixels, 0, rows, out=batch)

        with ThreadPoolExecutor(1) as pool:
            # the first of a pair is taken when the second one has been started
            for started, _ in pairwise(chain(map(start, samples), [None])):
                assert started is not None
                yield started[0], started[1].result()

    def _augment_batch(
        self, rng: StatelessRandom, pixels: Tensor | None, size: tuple[int, int], *, mix: bool
    ) -> Batch:
        """Sample on the host, copy all that the device needs at once, and compute there."""
        index = rng.sample_ids
        rows = torch.arange(len(index))
        if pixels is None:
            rows = self._rows[index]
        params = self._device_augmentation.sample(rng, self.preprocess, size, mix=mix)
        host = (params, index, rows, self._labels[index], pixels)
        params, index, rows, labels, pixels = copy_to_device(host, self.device)
        if pixels is None:
            pixels = self._pixels
        images = augment_images(pixels, rows, params, preprocess=self.preprocess, size=size)
        targets = labels
        if params.own_weight is not None and params.mixed_boxes is not None:
            images, targets = mix_batch(
                images,
                labels,
                params.own_weight,
                params.mixed_boxes,
                num_classes=len(self.dataset.class_names),
            )
        return Batch(images, targets, labels, index)

    def _take_tokens(self, rng: StatelessRandom) -> Batch:
        assert self.tokens is not None
        is_flipped = self.augmentation.sample_flips(rng)
        host = (rng.sample_ids, is_flipped.long(), self._labels[rng.sample_ids])
        index, view, labels = copy_to_device(host, self.device)
        return Batch(self.tokens[index, view].float(), labels, labels, index)


def fits_in_memory(num_bytes: int, device: torch.device) -> bool:
    """Return whether so many bytes of decoded images fit in the free memory of a device."""
    free = _count_free_memory() if device.type == "cpu" else count_bytes(device)[0]
    return num_bytes <= _MAX_MEMORY_FRACTION * free


def _count_free_memory() -> int:
    """Return the available bytes of the system, or of the container's limit."""
    # takes a tenth of a second to import
    import psutil

    free = int(psutil.virtual_memory().available)
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        # no such limit, or "max"
        return free
    return min(free, limit - used)
