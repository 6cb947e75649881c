"""Batches whose order and random numbers are functions of (seed, epoch, sample).

So a run that stops in mid-epoch goes on at `start_step` with the batches it would have had, and
neither the number of workers nor of processes changes a sample's augmentation.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from vit.data.augment import Augmentation, color_and_normalize, mix_batch
from vit.data.crop import crop_and_flip
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.data.workers import Decoder, DecodingWorkers, Steps, Transform
from vit.runtime.device import copy_to_device, count_bytes
from vit.runtime.machine import count_free_memory
from vit.runtime.processes import Process

# part of the free memory that decoded pixels may take
_MAX_MEMORY_FRACTION = 0.4


class Batch(NamedTuple):
    """The images and labels of a training step, on the training device.

    Attributes:
        images: Normalised images, or their tokens.
        targets: int64 [B]; float32 [B, C] if samples are mixed or may have several labels.
        labels: int64 [B], or float32 [B, C] if samples may have several labels.
        sample_ids: Index of each image in the dataset.
    """

    images: Float[Tensor, "B 3 H W"] | Float[Tensor, "B N D"]
    targets: Tensor
    labels: Tensor
    sample_ids: Int64[Tensor, " B"]


@dataclass(kw_only=True, eq=False)
class TrainLoader:
    """Shuffled, augmented batches of one size; the images that don't fill a batch are left out.

    The pixels of a decoded dataset lie on the device, or where they are mapped. Workers decode the
    full-size images of another one.

    Args:
        dataset: The images.
        batch_size: Images in a step, over all processes.
        seed: Seed of the order and of the augmentation.
        device: Device of the batches.
        preprocess: Preprocessing of the model.
        process: This process, which takes a contiguous part of every batch.
        augmentation: Augmentation, by default none.
        is_resident: Copy decoded pixels to the device at once, instead of those of each batch.
        transform: The user's transform of each full-size image, before all augmentation.
        workers: Processes that decode; None is `count_workers`, 0 decodes in this process.
        max_unreadable_fraction: Fraction of the images that may be unreadable.

    Raises:
        ValueError: The batch size doesn't fit the dataset, the processes or mixup's pairs.
    """

    dataset: ImageDataset = field(kw_only=False)
    batch_size: int
    seed: int
    device: torch.device
    preprocess: Preprocess
    process: Process = field(default_factory=Process)
    augmentation: Augmentation = field(default_factory=Augmentation)
    is_resident: bool = True
    transform: Transform | None = None
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
        self._workers: DecodingWorkers | None = None
        # the pixels of all images
        self._pixels: Tensor | None = None
        # the part of the augmentation that is left for the device
        self._device_augmentation = self.augmentation
        if self.dataset.pixels is not None:
            assert self.dataset.pixels.shape[1:3] == self.preprocess.resize_size
            self._pixels = torch.from_numpy(self.dataset.pixels)
            if self.is_resident:
                self._pixels = self._pixels.to(self.device)
            return
        crop = self.augmentation.crop
        decoder = Decoder(
            dataset=self.dataset, preprocess=self.preprocess, crop=crop, transform=self.transform
        )
        self._workers = DecodingWorkers(
            decoder,
            workers=self.workers,
            max_unreadable_fraction=self.max_unreadable_fraction,
        )
        if decoder.cuts_parts:
            self._device_augmentation = replace(self.augmentation, crop=replace(crop, scale=None))

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
        """The batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start_step: Number of the first step, for an epoch that was begun before.
            image_size: Height and width of the images; by default the model's input size.
            mix: Apply mixup and cutmix, if they are set.
        """
        size = image_size or self.preprocess.image_size
        samples = self._sample(epoch, start_step)
        with closing(self._read(samples)) as steps:
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

    def _read(self, samples: Iterator[StatelessRandom]) -> Steps:
        """Yield the samples of each step, and their pixels unless these are on the device."""
        if self._workers is not None:
            yield from self._workers.decode(samples)
        elif self._pixels is not None and self._pixels.device.type != self.device.type:
            yield from gather(self._pixels, samples, pinned=self.device.type != "mps")
        else:
            yield from ((rng, None) for rng in samples)

    def _augment_batch(
        self, rng: StatelessRandom, pixels: Tensor | None, size: tuple[int, int], *, mix: bool
    ) -> Batch:
        """Sample on the host, copy all that the device needs at once, and compute there."""
        index = rng.sample_ids
        labels = self._labels[index]
        stored = self._pixels if pixels is None else pixels
        assert stored is not None
        params = self._device_augmentation.sample(
            rng,
            stored_size=(stored.shape[1], stored.shape[2]),
            size=size,
            full_height=self.preprocess.image_size[0],
            mix=mix,
        )
        params, index, labels, pixels = copy_to_device((params, index, labels, pixels), self.device)

        # resident pixels are looked up by the sample's index, others lie in the batch's order
        rows = index
        if pixels is not None:
            stored = pixels
            rows = torch.arange(len(index), device=self.device)
        # a resized crop is scaled to the schedule's size at once, other crops afterwards
        crop_size = self.preprocess.image_size if params.crop.boxes is None else size
        cropped = crop_and_flip(stored, rows, params.crop, size=crop_size)
        images = color_and_normalize(cropped, params, preprocess=self.preprocess, size=size)
        targets = labels
        if params.mix is not None:
            num_classes = len(self.dataset.class_names)
            images, targets = mix_batch(images, labels, params.mix, num_classes=num_classes)
        return Batch(images, targets, labels, index)


@dataclass(kw_only=True, eq=False)
class TokenLoader(TrainLoader):
    """Shuffled batches of tokens that a model's frozen blocks made of the images, or of their
    mirror images for samples that are flipped.

    Args:
        tokens: Tokens of each image and, unless the flip is "none", of its mirror image.
    """

    tokens: Float[Tensor, "n V N D"]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens = self.tokens.to(self.device)

    def _read(self, samples: Iterator[StatelessRandom]) -> Steps:
        yield from ((rng, None) for rng in samples)

    def _augment_batch(
        self, rng: StatelessRandom, pixels: Tensor | None, size: tuple[int, int], *, mix: bool
    ) -> Batch:
        is_flipped = self.augmentation.crop.sample_flips(rng)
        host = (rng.sample_ids, is_flipped.long(), self._labels[rng.sample_ids])
        index, view, labels = copy_to_device(host, self.device)
        return Batch(self.tokens[index, view].float(), labels, labels, index)


def gather(
    pixels: UInt8[Tensor, "n H W 3"], samples: Iterator[StatelessRandom], *, pinned: bool
) -> Steps:
    """Yield the samples and the pixels of each batch. A thread reads them one batch ahead; if
    `pinned`, into memory from which a GPU copies while it computes."""

    def start(rng: StatelessRandom) -> Future[Tensor]:
        shape = (len(rng.sample_ids), *pixels.shape[1:])
        batch = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        return pool.submit(torch.index_select, pixels, 0, rng.sample_ids, out=batch)

    with ThreadPoolExecutor(1) as pool:
        reading: tuple[StatelessRandom, Future[Tensor]] | None = None
        for rng in samples:
            following = rng, start(rng)
            if reading is not None:
                yield reading[0], reading[1].result()
            reading = following
        if reading is not None:
            yield reading[0], reading[1].result()


def fits_in_memory(num_bytes: int, device: torch.device) -> bool:
    """Return whether so many bytes of decoded images fit in the free memory of a device."""
    free = count_free_memory() if device.type == "cpu" else count_bytes(device)[0]
    return num_bytes <= _MAX_MEMORY_FRACTION * free
