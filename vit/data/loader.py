"""Batches whose order and random numbers are functions of (seed, epoch, sample).

So a run that stops in mid-epoch goes on at `start_step` with the batches it would have had, and
neither the number of workers nor of processes changes a sample's augmentation.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vit.data.augment import Augmentation, color_and_normalize, mix_batch
from vit.data.crop import crop_and_flip
from vit.data.dataset import ImageDataset
from vit.data.gather import MAX_MEMORY_FRACTION, gather
from vit.data.preprocess import Preprocess
from vit.data.random import SampleIds, StatelessRandom
from vit.data.workers import Decoding, DecodingWorkers, Steps
from vit.runtime.device import copy_to_device, count_bytes
from vit.runtime.machine import count_free_memory
from vit.runtime.processes import Process


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


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The order of the samples in an epoch, and their division into batches.

    Args:
        batch_size: Images in a step, over all processes.
        seed: Seed of the order and of the augmentation.
        process: This process, which takes a contiguous part of every batch.
    """

    batch_size: int
    seed: int
    process: Process = field(default_factory=Process)

    def list_batches(self, count: int, epoch: int, start_step: int) -> Iterator[SampleIds]:
        """The sample ids of this process in each batch of an epoch of `count` images, from
        `start_step` on."""
        num_steps = count // self.batch_size
        order = StatelessRandom(self.seed, epoch, torch.arange(count)).permutation()
        # contiguous parts of each batch: any number of processes trains on the same batches
        parts = order[: num_steps * self.batch_size].view(num_steps, self.process.world_size, -1)
        return iter(parts[start_step:, self.process.rank])


@dataclass(kw_only=True, eq=False)
class TrainLoader:
    """Shuffled, augmented batches of one size; the images that don't fill a batch are left out.

    The pixels of a decoded dataset lie on the device as uint8 (on a CPU they stay where they are
    mapped), or are gathered from their file. Otherwise, workers decode the full-size images.

    Args:
        dataset: The images.
        order: The samples of each batch.
        device: Device of the batches.
        preprocess: Preprocessing of the model.
        augmentation: Augmentation, by default none.
        decoding: How images are decoded as training goes, and the user's transform.
        gathers: Gather each batch from the decoded pixels, see `vit.data.gather`.

    Raises:
        ValueError: The batch size doesn't fit the dataset, the processes or mixup's pairs.
    """

    dataset: ImageDataset = field(kw_only=False)
    order: BatchOrder
    device: torch.device | str
    preprocess: Preprocess
    augmentation: Augmentation = field(default_factory=Augmentation)
    decoding: Decoding = field(default_factory=Decoding)
    gathers: bool = False

    def __post_init__(self) -> None:
        # mixup and cutmix pair samples
        multiple = self.order.process.world_size * (2 if self.augmentation.mixing else 1)
        if not 0 < self.batch_size <= len(self.dataset) or self.batch_size % multiple:
            text = f"a multiple of {multiple} and at most the {len(self.dataset)} images"
            reason = "; mixup and cutmix mix pairs" if self.augmentation.mixing else ""
            raise ValueError(f"batch_size {self.batch_size} must be {text}{reason}")
        self._labels = torch.from_numpy(self.dataset.labels)
        if self.dataset.is_multilabel:
            self._labels = self._labels.float()
        # the pixels of all images, if they are on the device
        self._resident_pixels: Tensor | None = None
        self._workers: DecodingWorkers | None = None
        # the part of the augmentation that is left for the device
        self._device_augmentation = self.augmentation
        if self.dataset.pixels is None:
            crop = self.augmentation.crop
            self._workers = DecodingWorkers(self.dataset, self.decoding, crop, self.preprocess)
            # a random crop is done where images are decoded
            self._device_augmentation = replace(self.augmentation, crop=replace(crop, scale=None))
        elif not self.gathers:
            assert self.dataset.pixels.shape[1:3] == self.preprocess.resize_size
            self._resident_pixels = torch.from_numpy(self.dataset.pixels).to(self.device)

    @property
    def batch_size(self) -> int:
        """Images in a step, over all processes."""
        return self.order.batch_size

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
        on_warning: Callable[[str], object] = warnings.warn,
    ) -> Iterator[Batch]:
        """The batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start_step: Number of the first step, for an epoch that was begun before.
            image_size: Height and width of the images; by default the model's input size.
            mix: Apply mixup and cutmix, if they are set.
            on_warning: Function that is called with a sentence for each image that can't be read.
        """
        size = image_size or self.preprocess.image_size
        with closing(self._read(epoch, start_step, on_warning)) as steps:
            for rng, pixels in steps:
                yield self._augment_batch(rng, pixels, size, mix=mix)

    def close(self) -> None:
        """End the processes that decode images; the next epoch starts new ones."""
        if self._workers is not None:
            self._workers.close()

    def _read(self, epoch: int, start_step: int, on_warning: Callable[[str], object]) -> Steps:
        """The samples of each step, and their pixels unless these are on the device already."""
        batches = self.order.list_batches(len(self._labels), epoch, start_step)
        samples = (StatelessRandom(self.order.seed, epoch, sample_ids) for sample_ids in batches)
        if self._workers is not None:
            yield from self._workers.decode(samples, on_warning)
        elif self._resident_pixels is not None:
            yield from ((rng, None) for rng in samples)
        else:
            assert self.dataset.pixels is not None
            pinned = torch.device(self.device).type not in ("cpu", "mps")
            yield from gather(self.dataset.pixels, samples, pinned=pinned)

    def _augment_batch(
        self, rng: StatelessRandom, pixels: Tensor | None, size: tuple[int, int], *, mix: bool
    ) -> Batch:
        """Sample on the host, copy all that the device needs at once, and compute there."""
        index = rng.sample_ids
        labels = self._labels[index]
        stored = self._resident_pixels if pixels is None else pixels
        assert stored is not None
        params = self._device_augmentation.sample(
            rng,
            stored_size=(stored.shape[1], stored.shape[2]),
            size=size,
            full_height=self.preprocess.image_size[0],
            mix=mix,
            full_sizes=self._find_full_sizes(index, stored) if self.gathers else None,
        )
        params, index, labels, pixels = copy_to_device(
            (params, index, labels, pixels), torch.device(self.device)
        )

        # resident pixels are looked up by the sample's index, decoded ones lie in the batch's order
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

    def _find_full_sizes(self, index: Tensor, stored: Tensor) -> Int64[Tensor, "2 B"]:
        """Width and height of the images whose parts are cropped: the full-size ones, unless they
        were brought to the shape of the input before."""
        if self.preprocess.resize_mode != "crop":
            return torch.tensor([[stored.shape[2]], [stored.shape[1]]]).expand(2, len(index))
        assert self.dataset.sizes is not None
        return torch.from_numpy(self.dataset.sizes[:, index]).long()


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

    def _augment_batch(
        self, rng: StatelessRandom, pixels: Tensor | None, size: tuple[int, int], *, mix: bool
    ) -> Batch:
        is_flipped = self.augmentation.crop.sample_flips(rng)
        index, view, labels = copy_to_device(
            (rng.sample_ids, is_flipped.long(), self._labels[rng.sample_ids]),
            torch.device(self.device),
        )
        return Batch(self.tokens[index, view].float(), labels, labels, index)


def fits_in_memory(num_bytes: int, device: torch.device) -> bool:
    """Return whether so many bytes of decoded images fit in the free memory of their device."""
    free = count_free_memory() if device.type == "cpu" else count_bytes(device)[0]
    return num_bytes <= MAX_MEMORY_FRACTION * free
