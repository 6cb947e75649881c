"""Batches whose order and random numbers are functions of (seed, epoch, sample).

So a run that stops in mid-epoch goes on at `start_step` with the batches it would have had, and neither the
number of workers nor of ranks changes a sample's augmentation. A sample that is drawn for the k-th time in an epoch of
balanced classes has its index + k · (number of samples) for an id, hence an augmentation of its own.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vit.data.augment import Augment, cut_pixels, draw, finish_images, mix_batch
from vit.data.dataset import DecodedDataset
from vit.data.decoding import Decoded, Decoder, Task, Tasks
from vit.data.images import Preprocess
from vit.data.kernels import Size
from vit.data.random import SampleIds, StatelessRandom
from vit.data.transforms import ImageGeometry, Transform, apply_transform, use_one_thread
from vit.runtime.device import copy_to_device

Pipeline = Literal["resident", "workers"]
Steps = Generator[tuple[SampleIds, Tensor | None], None, None]


class Batch(NamedTuple):
    """What a step takes; all on the training device."""

    images: Float[Tensor, "B 3 H W"]  # normalised
    targets: Tensor  # int64 [B], or float32 [B, C] when samples are mixed
    labels: Int64[Tensor, " B"]
    sample_ids: Int64[Tensor, " B"]  # index in the dataset


@dataclass(frozen=True, eq=False)
class _Schedule:
    """Which samples a rank takes in which step."""

    labels: Int64[Tensor, " n"]
    balanced: bool  # every class as often as the others
    batch_size: int  # of all ranks together
    seed: int
    rank: int
    world_size: int
    shards: np.ndarray | None = None  # int64 [n], of samples that are read shard by shard
    shuffle_window: int = 1  # places by which those are moved on, at most

    def sample_ids(self, epoch: int, step: int) -> SampleIds:
        each = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * each
        return _order(self, epoch)[first : first + each]


@lru_cache(maxsize=2)
def _order(schedule: _Schedule, epoch: int) -> SampleIds:
    """The ids of an epoch's samples: all in random order or, of balanced classes, as many in all, of each class the
    same number but for one: some of a large one, all of a small one again and again."""
    rng, count = StatelessRandom(schedule.seed, epoch), len(schedule.labels)
    order = rng.permutation(count)
    if not schedule.balanced:
        return _order_by_shards(schedule, rng, order)
    labels = schedule.labels[order]
    sizes = torch.bincount(labels)
    classes = torch.split(order[labels.argsort(stable=True)], sizes[sizes > 0].tolist())
    each, rest = divmod(count, len(classes))
    drawn = []
    for place, members in enumerate(classes):
        draws = torch.arange(each + (place < rest))
        drawn.append(members[draws % len(members)] + count * (draws // len(members)))
    ids = torch.cat(drawn)
    return _order_by_shards(schedule, rng, ids[rng.bits("balanced order", ids).argsort()])


def _order_by_shards(schedule: _Schedule, rng: StatelessRandom, ids: SampleIds) -> SampleIds:
    """`ids` as they are or, of samples that are read shard by shard, the shards in random order, and each sample moved
    on by a random number of places within the window."""
    if schedule.shards is None or schedule.shuffle_window >= len(ids):
        return ids
    index = ids % len(schedule.labels)
    shards = torch.from_numpy(schedule.shards)[index]
    begun = rng.bits("shards", shards)  # one number for a shard
    by_shard = ids[torch.from_numpy(np.lexsort((ids.numpy(), index.numpy(), begun.numpy())))]
    moved = rng.uniform("window", by_shard).double() * schedule.shuffle_window
    return by_shard[(torch.arange(len(ids)) + moved).argsort(stable=True)]


@dataclass(kw_only=True, eq=False)
class _Loader(ABC):
    """What both loaders have in common: shuffled batches of one size, without what is left over."""

    dataset: DecodedDataset = field(kw_only=False)
    batch_size: int  # the samples of all ranks; each takes a contiguous chunk of every batch
    seed: int
    device: torch.device | str
    preprocess: Preprocess
    augment: Augment
    num_classes: int
    balanced: bool = False  # samples are drawn so that every class is there as often as the others
    transform: Transform | None = None  # of one image, before all augmentation
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        count, size, processes = len(self.dataset), self.batch_size, self.world_size
        each, rest = divmod(size, processes)
        if each < 1 or rest:
            raise ValueError(f"batch_size {size} must be a positive multiple of the {processes} processes")
        if self.augment.mixes and each % 2:
            raise ValueError(f"mixup and cutmix pair samples: {each} a process and step is not even")
        if size > count:
            raise ValueError(f"batch_size {size} is more than the {count} images")
        self.labels = torch.from_numpy(self.dataset.labels)
        self.images = torch.empty(0, 0, 0, 3)  # uint8, on the device, where all of them lie there
        self._schedule = _Schedule(self.labels, self.balanced, size, self.seed, self.rank, processes)
        self._of_batches = self.augment  # what is left to be done on the device

    def __len__(self) -> int:
        """Steps an epoch."""
        return len(self.labels) // self.batch_size

    def epoch(
        self, epoch: int, *, start_step: int = 0, image_size: Size | None = None, mix: bool = True
    ) -> Iterator[Batch]:
        """The batches of an epoch from `start_step` on, scaled to `image_size`, without mixing on request."""
        rng = StatelessRandom(self.seed, epoch)
        size = image_size or self.preprocess.image_size
        with closing(self._pixels(rng, start_step)) as steps:
            for ids, pixels in steps:
                yield self._augment(pixels, ids, rng, size, mix=mix and self.augment.mixes)

    def close(self) -> None:  # noqa: B027  (most loaders hold nothing)
        """End the processes that decode images, if there are any; the next epoch starts them again."""

    @abstractmethod
    def _pixels(self, rng: StatelessRandom, start_step: int) -> Steps:
        """(sample ids, their images where they aren't resident), both on the host, of each step."""

    def _augment(self, pixels: Tensor | None, ids: SampleIds, rng: StatelessRandom, size: Size, *, mix: bool) -> Batch:
        """Draw on the host, copy all that the device needs at once, and compute there."""
        augment, preprocess, index = self._of_batches, self.preprocess, ids % len(self.labels)
        full = self.images.shape if pixels is None else pixels.shape
        sizes: dict[str, Any] = {"full": (full[1], full[2]), "size": size, "side": preprocess.image_size[0]}
        sent = draw(ids, rng=rng, augment=augment, mix=mix, **sizes) | {"index": index, "labels": self.labels[index]}
        sent = copy_to_device(sent if pixels is None else sent | {"pixels": pixels}, torch.device(self.device))
        index, labels = sent["index"], sent["labels"]
        images, place = self.images, index
        if pixels is not None:
            images, place = sent["pixels"], torch.arange(len(ids), device=self.device)
        cut = cut_pixels(
            images, place, sent, size=preprocess.image_size if augment.resized_crop_scale is None else size
        )
        finished = finish_images(cut, sent, augment=augment, preprocess=preprocess, size=size)
        if not mix:
            return Batch(finished, labels, labels, index)
        return Batch(*mix_batch(finished, labels, sent, num_classes=self.num_classes), labels, index)


@dataclass(kw_only=True, eq=False)
class ResidentLoader(_Loader):
    """Batches of a dataset that lies whole on the device as uint8; on a CPU it is read where it is mapped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.dataset.images is not None, "a scanned dataset has no pixels"
        assert self.dataset.images.shape[1:3] == self.preprocess.resize_size
        self.images = torch.from_numpy(self.dataset.images).to(self.device)

    def _pixels(self, rng: StatelessRandom, start_step: int) -> Steps:
        for step in range(start_step, len(self)):
            ids = self._schedule.sample_ids(rng.epoch, step)
            yield ids, None if self.transform is None else self._transform(self.transform, ids, rng)

    def _transform(self, transform: Transform, ids: SampleIds, rng: StatelessRandom) -> Tensor:
        """uint8 [B, H', W', 3]: the samples' images, each transformed and brought back to the size of the stored."""
        stored = Preprocess(self.preprocess.resize_size, interpolation=self.preprocess.interpolation)
        seeds = rng.integers("transform", ids, below=2**31 - 1).tolist()
        assert self.dataset.images is not None
        images = [Image.fromarray(pixels) for pixels in self.dataset.images[ids % len(self.labels)]]
        changed = [apply_transform(transform, image, seed=seed) for image, seed in zip(images, seeds, strict=True)]
        return torch.from_numpy(np.stack([stored.to_uint8(image) for image in changed]))


@dataclass(kw_only=True, eq=False)
class WorkerLoader(_Loader):
    """Batches decoded from full-size images by worker processes, cropped and flipped by albumentations.

    `dataset` says which images are readable; its pixels aren't used. Workers live until `close()` or the loader's end.
    """

    workers: int | None = None  # None: one a core; 0: this process
    shuffle_window: int = 16_384  # samples of object storage are read shard by shard, shuffled among so many
    start_method: Literal["fork", "spawn", "forkserver"] | None = None  # multiprocessing's

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augment.resized_crop_scale is not None:  # this and the random flip are done where images are decoded
            flip = "alternating" if self.augment.flip == "alternating" else "none"
            self._of_batches = self.augment.model_copy(update={"resized_crop_scale": None, "flip": flip})
        shards = self.dataset.source.reader.remote_shards
        self._schedule = replace(self._schedule, shards=shards, shuffle_window=self.shuffle_window)
        geometry = ImageGeometry(self.augment, self.preprocess, self.transform)
        self._decode, self._tasks = Decoder(self.dataset.source.reader, geometry), Tasks()
        self._decoder: DataLoader[Decoded] | None = None

    def close(self) -> None:
        # torch's handler of a killed worker's signal raises wherever the program is, until its loader has ended
        decoder, self._decoder = self._decoder, None
        iterator = decoder and decoder._iterator
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()

    def _pixels(self, rng: StatelessRandom, start_step: int) -> Steps:
        sent = deque[SampleIds]()

        def list_tasks() -> Iterator[Task]:
            for step in range(start_step, len(self)):
                sent.append(self.dataset.replace_unreadable(self._schedule.sample_ids(rng.epoch, step), rng))
                yield self._build_task(rng, sent[-1])

        self._tasks.count, self._tasks.begin = len(self) - start_step, list_tasks
        if self._decoder is None:
            workers = len(os.sched_getaffinity(0)) if self.workers is None else self.workers
            self._decoder = DataLoader(
                self._decode,
                sampler=self._tasks,
                batch_size=None,  # the data set gives whole batches
                num_workers=workers,
                persistent_workers=workers > 0,
                prefetch_factor=2 if workers else None,  # batches that each worker decodes ahead
                worker_init_fn=use_one_thread,
                multiprocessing_context=self.start_method if workers else None,
                generator=torch.Generator(),  # or each epoch would take a number from torch's own
            )
        for decoded in self._decoder:
            yield self._receive(rng, sent.popleft(), decoded)

    def _build_task(self, rng: StatelessRandom, ids: SampleIds) -> Task:
        seeds = rng.integers("albumentations", ids, below=2**31 - 1).tolist()
        is_hashed, index = not self.dataset.is_complete, (ids % len(self.labels)).numpy()
        return self._decode.build_task(self.dataset.source.reader, index, seeds, is_hashed=is_hashed)

    def _receive(self, rng: StatelessRandom, ids: SampleIds, decoded: Decoded) -> tuple[SampleIds, Tensor]:
        """A batch's ids and pixels: what is found out of its images is noted, and of an unreadable one another is
        decoded here."""
        ids, pixels, rows = ids.clone(), decoded.pixels, torch.arange(len(ids))
        while True:
            if decoded.mistake:
                raise ValueError(decoded.mistake)
            index = (ids[rows] % len(self.labels)).numpy()
            unreadable = {int(index[row]): reason for row, reason in decoded.unreadable.items()}
            self.dataset.record(index, decoded.hashes.numpy().view(np.uint64), unreadable)
            if not unreadable:
                return ids, pixels
            rows = rows[[*decoded.unreadable]]
            ids[rows] = self.dataset.replace_unreadable(ids[rows], rng)
            decoded = self._decode[self._build_task(rng, ids[rows])]
            pixels[rows] = decoded.pixels


def choose_pipeline(num_bytes: int, *, device: torch.device | str, fraction: float) -> tuple[Pipeline, str]:
    """Whether `num_bytes` of pixels fit in a `fraction` of the device's free memory, and that in words."""
    device = torch.device(device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_host_memory()
    fits = num_bytes <= fraction * free
    needed, left = f"{num_bytes / 2**20:,.0f} MiB of pixels", f"{free / 2**20:,.0f} MiB free on {device.type}"
    reason = f"{needed} {'fit' if fits else 'do not fit'} in {fraction:.0%} of the {left}"
    return ("resident" if fits else "workers"), reason


def _free_host_memory() -> int:
    """Bytes: what the kernel says is available, or what the container's limit leaves, if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no such limit, or "max"
        return free
