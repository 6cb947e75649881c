"""Batches whose order and random numbers are functions of (seed, epoch, sample).

So a run that stops in mid-epoch goes on at `start_step` with the batches it would have had, and
neither the number of workers nor of processes changes a sample's augmentation. A sample that is
drawn for the k-th time in an epoch of balanced classes has its index + k · (number of samples) for
an id, hence an augmentation of its own.
"""

import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vit.config import AugmentConfig
from vit.data.augment import (
    color_and_normalize,
    crop_and_flip,
    mix_batch,
    sample_flips,
    sample_params,
)
from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.images import Preprocess
from vit.data.random import SampleIds, StatelessRandom
from vit.data.sources.base import FileReader, ImageReader
from vit.data.sources.remote import RemoteError
from vit.data.sources.shards import ShardReader
from vit.data.transforms import TrainTransform, Transform, apply_transform, use_one_thread
from vit.runtime.device import copy_to_device, count_free_bytes

# of the free memory, that decoded pixels may take
MAX_MEMORY_FRACTION = 0.4
# of an image, one after the other
_MAX_REPLACEMENTS = 1000

Pipeline = Literal["resident", "workers", "tokens"]
# the samples and, where they aren't resident, the images' pixels [B, H, W, 3], on the host
Steps = Generator[tuple[StatelessRandom, UInt8[Tensor, "B H W 3"] | None], None, None]


class Batch(NamedTuple):
    """What a training step takes; all on the training device."""

    # normalised, or their tokens
    images: Float[Tensor, "B 3 H W"] | Float[Tensor, "B N D"]
    # int64 [B], or float32 [B, C] when samples are mixed
    targets: Tensor
    labels: Int64[Tensor, " B"]
    # index in the dataset
    sample_ids: Int64[Tensor, " B"]


class BatchIndices(NamedTuple):
    """The images of a batch."""

    # reads these images; None: the worker has a reader of all images
    reader: ImageReader | None
    # positions in the reader
    indices: list[int]
    # one for the random crop of each image
    seeds: list[int]


class DecodedBatch(NamedTuple):
    """What a worker made of `BatchIndices`."""

    pixels: UInt8[Tensor, "B H W 3"]
    # row → why its image can't be read
    unreadable: dict[int, str]
    # why the user's transform failed, or why images can't be reached now; else empty
    error: str


class BatchSampler(Sampler[BatchIndices]):
    """The batches of one epoch; workers that live on take the next epoch's from it."""

    batches: Iterable[BatchIndices] = ()

    def __iter__(self) -> Iterator[BatchIndices]:
        return iter(self.batches)


class BatchDecoder(Dataset[DecodedBatch]):
    """Decodes batches in a worker.

    A worker has no list of all files: in each of many it would grow with the number of images.
    """

    def __init__(self, reader: ImageReader, transform: TrainTransform) -> None:
        self.transform = transform
        # what these readers have of an image is small: it is sent with each batch
        is_list = isinstance(reader, FileReader | ShardReader)
        self.reader = None if is_list else reader

    def __getitem__(self, batch: BatchIndices) -> DecodedBatch:
        pixels = np.empty((len(batch.seeds), *self.transform.size, 3), dtype=np.uint8)
        unreadable: dict[int, str] = {}
        message = ""
        reader = batch.reader or self.reader
        assert reader is not None
        # errors are returned as text: a worker's exceptions would arrive with its traceback
        try:
            reader.fetch(batch.indices)
            for row, (index, seed) in enumerate(zip(batch.indices, batch.seeds, strict=True)):
                try:
                    image = reader.image(index)
                except RemoteError:
                    # tells nothing of the image
                    raise
                except (ValueError, OSError) as error:
                    unreadable[row] = str(error)
                    continue
                pixels[row] = self.transform(image, seed=seed)
        except (ValueError, OSError) as error:
            message = str(error)
        return DecodedBatch(torch.from_numpy(pixels), unreadable, message)


@dataclass(kw_only=True, eq=False)
class TrainLoader:
    """Shuffled, augmented batches of one size; what does not fill a batch is left out.

    Of a dataset with cached pixels, they lie on the device as uint8 (on a CPU they are read where
    they are mapped). Of another, worker processes decode the full-size images, and crop and flip
    them by albumentations; they live until `close()` or the loader's end.

    Raises:
        ValueError: the batch size doesn't fit the dataset, the processes or mixup's pairs.
    """

    dataset: ImageDataset = field(kw_only=False)
    # of all processes; each takes a contiguous part of every batch
    batch_size: int
    seed: int
    device: torch.device | str
    preprocess: Preprocess
    augment: AugmentConfig
    # whether every class is drawn as often as the others
    balanced: bool = False
    # of one image, before all augmentation
    transform: Transform | None = None
    rank: int = 0
    world_size: int = 1
    # None: one a core; 0: images are decoded in this process
    workers: int | None = None
    # of the images; where more can't be read, an error
    max_unreadable_fraction: float = 0.05

    def __post_init__(self) -> None:
        # mixup and cutmix pair samples
        multiple = self.world_size * (2 if self.augment.mixes else 1)
        if not 0 < self.batch_size <= len(self.dataset) or self.batch_size % multiple:
            text = f"a multiple of {multiple} and at most the {len(self.dataset)} images"
            raise ValueError(f"batch_size {self.batch_size} must be {text}")

        self._labels = torch.from_numpy(self.dataset.labels)
        # what is left to be done on the device
        self._device_augment = self.augment
        self._resident_pixels: Tensor | None = None
        if self.dataset.pixels is not None:
            assert self.dataset.pixels.shape[1:3] == self.preprocess.resize_size
            self._resident_pixels = torch.from_numpy(self.dataset.pixels).to(self.device)
        elif self.augment.resized_crop_scale is not None:
            # the crop and the random flip are done where images are decoded
            flip = "none" if self.augment.flip == "random" else self.augment.flip
            self._device_augment = self.augment.model_copy(
                update={"resized_crop_scale": None, "flip": flip}
            )
        self._batch_sampler = BatchSampler()
        self._data_loader: DataLoader[DecodedBatch] | None = None
        # the iterator of `_data_loader`, which owns the workers
        self._decoded_batches: Any = None
        # index of an image → why it can't be read
        self._unreadable: dict[int, str] = {}

    # resident pixels need none, and it imports albumentations
    @cached_property
    def _decoder(self) -> BatchDecoder:
        transform = TrainTransform(self.augment, self.preprocess, self.transform)
        return BatchDecoder(self.dataset.reader, transform)

    def __len__(self) -> int:
        """Steps an epoch."""
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
            epoch: from 0.
            start_step: the first step, where the epoch was begun before.
            image_size: height and width of the images; by default the model's input size.
            mix: whether mixup and cutmix are applied, where they are configured.
            on_warning: called with a sentence for each image that can't be read.
        """
        size = image_size or self.preprocess.image_size
        # contiguous parts of each batch: any number of processes trains on the same batches
        order = self._epoch_order(epoch)[: len(self) * self.batch_size]
        batches = iter(order.view(len(self), self.world_size, -1)[start_step:, self.rank])
        if self._resident_pixels is None:
            steps = self._decode(batches, epoch, on_warning)
        else:
            steps = self._read_resident(batches, epoch)
        with closing(steps):
            for rng, pixels in steps:
                yield self._augment_batch(rng, pixels, size, mix=mix)

    def _epoch_order(self, epoch: int) -> SampleIds:
        """The ids of an epoch's samples, of all processes, in order."""
        count = len(self._labels)
        order = StatelessRandom(self.seed, epoch, torch.arange(count)).permutation()
        if not self.balanced:
            return order

        # Every class gets the same number of samples, give or take one: a part of a large class, and
        # the images of a small one several times. A sample's id is its image's index plus `count`
        # times the number of the repetition, so that each repetition is augmented anew.
        labels = self._labels[order]
        class_sizes = torch.bincount(labels)
        class_sizes = class_sizes[class_sizes > 0]
        classes = torch.split(order[labels.argsort(stable=True)], class_sizes.tolist())

        # the remainder is shared out, so that the epoch keeps its length
        samples_per_class, remainder = divmod(count, len(classes))
        drawn = []
        for number, members in enumerate(classes):
            draws = torch.arange(samples_per_class + (number < remainder))
            repetition = draws // len(members)
            drawn.append(members[draws % len(members)] + count * repetition)
        return StatelessRandom(self.seed, epoch, torch.cat(drawn)).permutation("balanced order")

    def close(self) -> None:
        """End the processes that decode images, if there are any; the next epoch starts new ones.

        torch's handler of the signal of a worker that was killed raises wherever the program is,
        until the workers' iterator has ended; an exception's traceback may keep that alive.
        """
        shut_down = getattr(self._decoded_batches, "_shutdown_workers", None)
        self._data_loader = self._decoded_batches = None
        if shut_down is not None:
            # the handler may raise once more while torch waits for the other workers; it ends them
            with suppress(RuntimeError):
                shut_down()

    def _augment_batch(
        self, rng: StatelessRandom, pixels: Tensor | None, size: tuple[int, int], *, mix: bool
    ) -> Batch:
        """Sample on the host, copy all that the device needs at once, and compute there."""
        index = rng.sample_ids % len(self._labels)
        labels = self._labels[index]
        stored = self._resident_pixels if pixels is None else pixels
        assert stored is not None
        params = sample_params(
            rng,
            augment=self._device_augment,
            stored_size=(stored.shape[1], stored.shape[2]),
            size=size,
            config_height=self.preprocess.image_size[0],
            mix=mix,
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
        crop_size = self.preprocess.image_size if params.crop_boxes is None else size
        cropped = crop_and_flip(stored, rows, params, size=crop_size)
        images = color_and_normalize(cropped, params, preprocess=self.preprocess, size=size)
        if params.mix is None:
            return Batch(images, labels, labels, index)
        images, targets = mix_batch(
            images, labels, params, num_classes=len(self.dataset.class_names)
        )
        return Batch(images, targets, labels, index)

    def _read_resident(self, batches: Iterator[SampleIds], epoch: int) -> Steps:
        """The samples of each step and, where the user has a transform, their transformed pixels,
        brought back to the size of the stored ones."""
        assert self.dataset.pixels is not None
        stored_size = self.preprocess.resize_size
        resize = Preprocess(stored_size, interpolation=self.preprocess.interpolation)
        for sample_ids in batches:
            rng = StatelessRandom(self.seed, epoch, sample_ids)
            if self.transform is None:
                yield rng, None
                continue

            seeds = rng.integers("transform", below=2**31 - 1).tolist()
            images = map(Image.fromarray, self.dataset.pixels[sample_ids % len(self._labels)])
            transformed = [
                resize.to_uint8(apply_transform(self.transform, image, seed=seed))
                for image, seed in zip(images, seeds, strict=True)
            ]
            yield rng, torch.from_numpy(np.stack(transformed))

    def _decode(
        self, batches: Iterator[SampleIds], epoch: int, on_warning: Callable[[str], object]
    ) -> Steps:
        # to the workers, and not received from them yet
        sent = deque[StatelessRandom]()

        def list_indices() -> Iterator[BatchIndices]:
            for sample_ids in batches:
                rng = StatelessRandom(self.seed, epoch, sample_ids)
                sent.append(self._replace_unreadable(rng))
                yield self._build_indices(sent[-1])

        # workers that live on from the epoch before take this one's batches
        self._batch_sampler.batches = list_indices()
        if self._data_loader is None:
            workers = len(os.sched_getaffinity(0)) if self.workers is None else self.workers
            self._data_loader = DataLoader(
                self._decoder,
                sampler=self._batch_sampler,
                # the decoder gives batches
                batch_size=None,
                num_workers=workers,
                persistent_workers=workers > 0,
                worker_init_fn=use_one_thread,
                # or each epoch would take a number from torch's own
                generator=torch.Generator(),
            )
        self._decoded_batches = iter(self._data_loader)
        for decoded in self._decoded_batches:
            yield self._receive(sent.popleft(), decoded, on_warning)

    def _build_indices(self, rng: StatelessRandom) -> BatchIndices:
        index = (rng.sample_ids % len(self._labels)).numpy()
        seeds = rng.integers("albumentations", below=2**31 - 1).tolist()
        if self._decoder.reader is not None:
            return BatchIndices(None, index.tolist(), seeds)
        return BatchIndices(self.dataset.reader.subset(index), [*range(len(index))], seeds)

    def _receive(
        self, rng: StatelessRandom, decoded: DecodedBatch, on_warning: Callable[[str], object]
    ) -> tuple[StatelessRandom, UInt8[Tensor, "B H W 3"]]:
        """A batch and its pixels; in place of an unreadable image another is decoded here."""
        dataset = self.dataset
        sample_ids = rng.sample_ids.clone()
        pixels = decoded.pixels
        # of the batch, which are in `decoded`
        rows = torch.arange(len(sample_ids))
        while True:
            if decoded.error:
                raise ValueError(decoded.error)
            if not decoded.unreadable:
                return replace(rng, sample_ids=sample_ids), pixels

            # the replacement may be unreadable as well: again, until all rows are decoded
            for row, reason in decoded.unreadable.items():
                index = int(sample_ids[rows[row]]) % len(dataset)
                if index not in self._unreadable:
                    self._unreadable[index] = reason
                    on_warning(f"skipped {dataset.split} image {dataset.ids[index]}: {reason}")
            unreadable = [(dataset.ids[index], why) for index, why in self._unreadable.items()]
            check_unreadable(unreadable, len(dataset), self.max_unreadable_fraction)
            rows = rows[[*decoded.unreadable]]
            replacement = self._replace_unreadable(replace(rng, sample_ids=sample_ids[rows]))
            decoded = self._decoder[self._build_indices(replacement)]
            sample_ids[rows] = replacement.sample_ids
            pixels[rows] = decoded.pixels

    def _replace_unreadable(self, rng: StatelessRandom) -> StatelessRandom:
        """The samples, with another one for each whose image is known to be unreadable.

        They are a function of (seed, epoch, sample) and of the files alone, whenever it became
        known that an image is unreadable.
        """
        unreadable = torch.tensor([*self._unreadable], dtype=torch.int64)
        count = len(self._labels)
        for _ in range(_MAX_REPLACEMENTS):
            is_unreadable = torch.isin(rng.sample_ids % count, unreadable)
            if not is_unreadable.any():
                return rng
            # beyond the ids of the epoch, hence with an augmentation of its own; that two
            # replacements share one of a million ids an image is improbable and harmless
            random_bits = rng.bits("replacement") & (2**62 - 1)
            sampled = count + random_bits % (count << 20)
            rng = replace(rng, sample_ids=torch.where(is_unreadable, sampled, rng.sample_ids))
        raise ValueError(f"too few images of {self.dataset.name} {self.dataset.split} can be read")


@dataclass(kw_only=True, eq=False)
class TokenLoader(TrainLoader):
    """Shuffled batches of tokens that a model's frozen blocks made of the images as they are, or of
    their mirror images where a flip has it so."""

    # of each image as it is and, where it may be flipped, of its mirror image
    tokens: Float[Tensor, "n V N D"]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens = self.tokens.to(self.device)

    def _augment_batch(
        self, rng: StatelessRandom, pixels: Tensor | None, size: tuple[int, int], *, mix: bool
    ) -> Batch:
        index = rng.sample_ids % len(self._labels)
        is_flipped = sample_flips(rng, self.augment.flip)
        labels = self._labels[index]
        index, view, labels = copy_to_device(
            (index, is_flipped.long(), labels), torch.device(self.device)
        )
        return Batch(self.tokens[index, view].float(), labels, labels, index)


def choose_pipeline(
    num_bytes: int, *, device: torch.device, what: str = "pixels"
) -> tuple[Pipeline, str]:
    """Whether so many bytes of decoded pixels stay in the device's memory, and why in words."""
    free = _free_host_memory() if device.type == "cpu" else count_free_bytes(device)
    pipeline: Pipeline = "resident"
    verb = "fit"
    if num_bytes > MAX_MEMORY_FRACTION * free:
        pipeline = "workers"
        verb = "do not fit"
    share = f"{MAX_MEMORY_FRACTION:.0%} of the {free / 2**20:,.0f} MiB free on {device.type}"
    return pipeline, f"{num_bytes / 2**20:,.0f} MiB of {what} {verb} in {share}"


def _free_host_memory() -> int:
    """Bytes that the kernel says are available or, if less, what the container's limit leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        # no such limit, or "max"
        return free
    return min(free, limit - used)
