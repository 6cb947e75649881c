"""Full-size images that are decoded, transformed and cropped as training goes, in worker processes.

An image that can't be read is named, and another one takes its place.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pickle import PicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from vit.data.crop import Crop
from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.preprocess import Preprocess
from vit.data.random import SampleIds, StatelessRandom, seed_generators
from vit.data.sources.base import ImageReader
from vit.data.sources.remote import RemoteError
from vit.runtime.arguments import first_line
from vit.runtime.drive import DriveError
from vit.runtime.machine import count_free_shared_memory, count_workers

Transform = Callable[..., Any]

# images of a batch that a worker decodes at a time, at least: fewer cost more to send than to decode
_MIN_PART = 16
# replacements of one image that are tried one after the other
_MAX_REPLACEMENTS = 1000

# the samples of each step and, unless they are in memory, their pixels on the host
Steps = Generator[tuple[StatelessRandom, UInt8[Tensor, "B H W 3"] | None], None, None]


def apply_transform(transform: Transform, image: Image.Image, *, seed: int) -> Image.Image:
    """Apply a transform of the user's to an RGB image of any size.

    Args:
        transform: A transform of albumentations or torchvision, or a function of uint8 [H, W, 3].
        image: The image, in RGB.
        seed: Seed of albumentations' own generator; for others, of torch's, numpy's and random's.

    Raises:
        ValueError: The result is neither an RGB image nor uint8 [H, W, 3] nor a uint8 tensor
            [3, H, W].
    """
    # a transform of albumentations
    if hasattr(transform, "set_random_seed"):
        transform.set_random_seed(seed)
        result = transform(image=np.array(image))["image"]
    else:
        seed_generators(seed)
        takes_pil = type(transform).__module__.startswith("torchvision.")
        result = transform(image if takes_pil else np.array(image))

    # torchvision returns [3, H, W], all others [H, W, 3]
    if isinstance(result, torch.Tensor):
        result = result.permute(1, 2, 0)
    pixels = np.asarray(result)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"the transform gives {pixels.dtype} {list(pixels.shape)}, not uint8 [H, W, 3]; leave "
            "conversion and normalisation out of it"
        )
    return Image.fromarray(pixels)


class TrainTransform:
    """From a decoded image to uint8 [H, W, 3]: the user's transform, then a crop.

    Args:
        crop: A random crop of the full-size image if it has a `scale`; otherwise the centre crop.
        preprocess: Preprocessing of the model.
        transform: The user's transform; None for none.

    Attributes:
        takes_arrays: Arrays are taken as well as images, see `ImageReader.decode`.
    """

    def __init__(self, crop: Crop, preprocess: Preprocess, transform: Transform | None) -> None:
        self.size = preprocess.image_size
        self._preprocess = preprocess
        self._transform = transform
        self._crop = crop
        # brings an image to the shape from which random parts are cropped; None: it has its own
        self._whole: Preprocess | None = None
        if crop.scale is not None and preprocess.resize_mode != "crop":
            # so large that the smallest crop has the input's resolution
            height, width = self.size
            side = crop.scale[0] ** -0.5
            whole_size = (math.ceil(height * side), math.ceil(width * side))
            self._whole = replace(preprocess, image_size=whole_size)
        elif crop.scale is None and crop.padding:
            # the device shifts: it gets the margin that crop_pct leaves
            self.size = preprocess.resize_size
            self._preprocess = replace(preprocess, image_size=self.size, crop_pct=1.0)
        self.takes_arrays = transform is None and crop.scale is not None and self._whole is None

    def __call__(self, image: Image.Image | np.ndarray, *, seed: int) -> np.ndarray:
        if not isinstance(image, np.ndarray):
            image = self._preprocess.to_rgb(image)
            # another seed than that of the crop, because both may be of albumentations
            if self._transform is not None:
                image = apply_transform(self._transform, image, seed=seed + 1)
            if self._crop.scale is None:
                return self._preprocess.to_uint8(image)
            image = np.asarray(image) if self._whole is None else self._whole.to_uint8(image)
        return self._cut(image, seed)

    def _cut(self, image: np.ndarray, seed: int) -> np.ndarray:
        """Cut out the random part, and resize it, bilinear and antialiased."""
        height, width = self.size
        left, top, right, bottom = self._crop.sample_part(
            seed, image.shape[:2], shape=width / height
        )
        part = image[top:bottom, left:right]
        if bottom - top <= height and right - left <= width:
            # takes long to import; it enlarges in less than half of torch's time
            import cv2

            enlarged: np.ndarray = cv2.resize(part, (width, height))
            return enlarged
        # torch warns of memory that it may not write to
        writable = np.require(part, requirements="W")
        channels = torch.from_numpy(writable).permute(2, 0, 1)[None]
        reduced = F.interpolate(channels, self.size, mode="bilinear", antialias=True)
        pixels: np.ndarray = reduced[0].permute(1, 2, 0).numpy()
        return pixels


def as_it_is(batch: Any) -> Any:
    """Return a decoded batch unchanged."""
    return batch


def use_one_thread(_worker: int) -> None:
    """Keep OpenCV from starting a thread for each core in every worker."""
    # takes long to import
    import cv2

    cv2.setNumThreads(0)


class BatchIndices(NamedTuple):
    """The images of a batch, or of a part of it."""

    # reads these images; None: the worker has a reader of all images
    reader: ImageReader | None
    # positions in the reader
    indices: list[int]
    # seed of each image's random crop
    seeds: list[int]


class DecodedBatch(NamedTuple):
    """The images of `BatchIndices`, decoded by a worker."""

    # torch sends a tensor through shared memory; an array goes through a pipe
    pixels: UInt8[Tensor, "B H W 3"] | UInt8[np.ndarray, "B H W 3"]
    # row → why its image can't be read
    unreadable: dict[int, str]
    # why the user's transform failed, or why images can't be reached now; else empty
    error: str


def join_parts(parts: Sequence[DecodedBatch]) -> DecodedBatch:
    """Join the decoded parts of a batch."""
    if len(parts) == 1:
        return parts[0]
    pixels = torch.cat([torch.as_tensor(part.pixels) for part in parts])
    unreadable: dict[int, str] = {}
    start = 0
    for part in parts:
        unreadable |= {start + row: reason for row, reason in part.unreadable.items()}
        start += len(part.pixels)
    return DecodedBatch(pixels, unreadable, next((part.error for part in parts if part.error), ""))


class BatchSampler(Sampler[BatchIndices]):
    """The batches of one epoch; workers that live on take the next epoch's from it."""

    batches: Iterable[BatchIndices] = ()

    def __iter__(self) -> Iterator[BatchIndices]:
        return iter(self.batches)


class BatchDecoder(Dataset[DecodedBatch]):
    """Decodes batches in a worker.

    A worker has no list of all files: in each of many it would grow with the number of images.

    Attributes:
        shares_memory: Return tensors, which are sent through shared memory.
    """

    def __init__(self, reader: ImageReader, transform: TrainTransform) -> None:
        self.shares_memory = True
        self.transform = transform
        self.reader = None if reader.has_small_subsets else reader

    def __getitem__(self, batch: BatchIndices) -> DecodedBatch:
        own_reader, indices, seeds = batch
        pixels = np.empty((len(seeds), *self.transform.size, 3), dtype=np.uint8)
        unreadable: dict[int, str] = {}
        message = ""
        reader = own_reader or self.reader
        assert reader is not None
        # errors are returned as text: a worker's exceptions would arrive with its traceback
        try:
            reader.fetch(indices)
            read = reader.decode if self.transform.takes_arrays else reader.image
            for row, (index, seed) in enumerate(zip(indices, seeds, strict=True)):
                try:
                    image = read(index)
                except RemoteError:
                    # the image itself may be good
                    raise
                except (ValueError, OSError) as error:
                    unreadable[row] = str(error)
                    continue
                pixels[row] = self.transform(image, seed=seed)
        except (ValueError, OSError, DriveError) as error:
            message = str(error)
        sent = torch.from_numpy(pixels) if self.shares_memory else pixels
        return DecodedBatch(sent, unreadable, message)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How images are decoded as training goes.

    Args:
        transform: The user's transform of one image, before all augmentation.
        workers: Processes that decode; None is `count_workers`, 0 decodes in this process.
        max_unreadable_fraction: Fraction of the images that may be unreadable.
    """

    transform: Transform | None = None
    workers: int | None = None
    max_unreadable_fraction: float = 0.05


class DecodingWorkers:
    """Worker processes that live until `close()` or until this object is deleted. They share each
    batch of `batch_size` images, so that it is there soon and few images are on their way."""

    def __init__(
        self,
        dataset: ImageDataset,
        decoding: Decoding,
        crop: Crop,
        preprocess: Preprocess,
        *,
        batch_size: int,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._decoding = decoding
        self._crop = crop
        self._preprocess = preprocess
        self._batch_sampler = BatchSampler()
        self._data_loader: DataLoader[DecodedBatch] | None = None
        # the iterator of `_data_loader`, which owns the workers
        self._decoded_batches: Any = None
        # index of an image → why it can't be read
        self._unreadable: dict[int, str] = {}

    @cached_property
    def decoder(self) -> BatchDecoder:
        """The decoder that each worker gets."""
        transform = TrainTransform(self._crop, self._preprocess, self._decoding.transform)
        return BatchDecoder(self._dataset.reader, transform)

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

    def decode(
        self,
        batches: Iterator[SampleIds],
        seed: int,
        epoch: int,
        on_warning: Callable[[str], object],
    ) -> Steps:
        """The pixels of each batch, with the random numbers of its samples."""
        # to the workers, and not received from them yet
        sent = deque[StatelessRandom]()

        def list_indices() -> Iterator[BatchIndices]:
            for sample_ids in batches:
                rng = StatelessRandom(seed, epoch, sample_ids)
                sent.append(self._replace_unreadable(rng))
                for ids in torch.split(sent[-1].sample_ids, part_size):
                    yield self.build_indices(replace(rng, sample_ids=ids))

        workers = self._decoding.workers
        if workers is None:
            workers = count_workers()
        # without workers, a batch is decoded at once
        part_size = self._batch_size
        if workers:
            part_size = max(math.ceil(self._batch_size / workers), _MIN_PART)

        # workers that live on from the epoch before take this one's batches
        self._batch_sampler.batches = list_indices()
        if self._data_loader is None:
            self._choose_transport(workers, min(part_size, self._batch_size), on_warning)
            self._data_loader = DataLoader(
                self.decoder,
                sampler=self._batch_sampler,
                # the decoder gives batches
                batch_size=None,
                # torch's own would make tensors of arrays
                collate_fn=as_it_is,
                num_workers=workers,
                persistent_workers=workers > 0,
                worker_init_fn=use_one_thread,
                # or each epoch would take a number from torch's own
                generator=torch.Generator(),
            )
        try:
            self._decoded_batches = iter(self._data_loader)
        # where processes don't begin as a copy of this one, as on Windows and macOS
        except (PicklingError, AttributeError, TypeError) as error:
            text = "the images or the transform can't be sent to other processes"
            hint = "define the transform in a module, or set data.workers=0"
            raise ValueError(f"{text} ({first_line(error)}); {hint}") from error
        num_parts = math.ceil(self._batch_size / part_size)
        while parts := list(islice(self._decoded_batches, num_parts)):
            yield self._receive(sent.popleft(), join_parts(parts), on_warning)

    def _choose_transport(
        self, workers: int, part_size: int, on_warning: Callable[[str], object]
    ) -> None:
        """Send batches through pipes if shared memory doesn't hold those that are on their way: a
        worker that writes to a full /dev/shm is killed."""
        image_bytes = 3 * math.prod(self.decoder.transform.size)
        # two parts for each worker, and those of the batch that is joined
        needed = (2 * workers * part_size + self._batch_size) * image_bytes
        free = count_free_shared_memory()
        had_room = self.decoder.shares_memory
        self.decoder.shares_memory = needed <= free
        if workers and needed > free and had_room:
            text = f"/dev/shm has {free / 2**20:,.0f} MiB for this process, but {workers} workers"
            hint = "docker run --shm-size=8g enlarges it"
            on_warning(
                f"{text} need {needed / 2**20:,.0f}: batches come through pipes, slower; {hint}"
            )

    def build_indices(self, rng: StatelessRandom) -> BatchIndices:
        """The task that a worker is sent for a batch."""
        index = (rng.sample_ids % len(self._dataset)).numpy()
        seeds = self._crop.sample_seeds(rng)
        if self.decoder.reader is not None:
            return BatchIndices(None, index.tolist(), seeds)
        return BatchIndices(self._dataset.reader.subset(index), [*range(len(index))], seeds)

    def _receive(
        self, rng: StatelessRandom, decoded: DecodedBatch, on_warning: Callable[[str], object]
    ) -> tuple[StatelessRandom, UInt8[Tensor, "B H W 3"]]:
        """A batch and its pixels; in place of an unreadable image another is decoded here."""
        dataset = self._dataset
        sample_ids = rng.sample_ids.clone()
        array, failures, message = decoded
        pixels = torch.as_tensor(array)
        # rows of the batch that were decoded last
        rows = torch.arange(len(sample_ids))
        while True:
            if message:
                raise ValueError(message)
            if not failures:
                return replace(rng, sample_ids=sample_ids), pixels

            # the replacement may be unreadable as well: again, until all rows are decoded
            for row, reason in failures.items():
                index = int(sample_ids[rows[row]]) % len(dataset)
                if index not in self._unreadable:
                    self._unreadable[index] = reason
                    on_warning(f"skipped {dataset.split} image {dataset.ids[index]}: {reason}")
            unreadable = [(dataset.ids[index], why) for index, why in self._unreadable.items()]
            check_unreadable(unreadable, len(dataset), self._decoding.max_unreadable_fraction)
            rows = rows[[*failures]]
            replacement = self._replace_unreadable(replace(rng, sample_ids=sample_ids[rows]))
            array, failures, message = self.decoder[self.build_indices(replacement)]
            pixels[rows] = torch.as_tensor(array)
            sample_ids[rows] = replacement.sample_ids

    def _replace_unreadable(self, rng: StatelessRandom) -> StatelessRandom:
        """The samples, with another one for each whose image is known to be unreadable.

        They are a function of (seed, epoch, sample) and of the files alone: it doesn't matter when
        an image was found to be unreadable.
        """
        unreadable = torch.tensor([*self._unreadable], dtype=torch.int64)
        count = len(self._dataset)
        for _ in range(_MAX_REPLACEMENTS):
            is_unreadable = torch.isin(rng.sample_ids % count, unreadable)
            if not is_unreadable.any():
                return rng
            # beyond the ids of the epoch, hence with an augmentation of its own; that two
            # replacements share one of a million ids an image is improbable and harmless
            random_bits = rng.bits("replacement") & (2**62 - 1)
            sampled = count + random_bits % (count << 20)
            rng = replace(rng, sample_ids=torch.where(is_unreadable, sampled, rng.sample_ids))
        name = f"{self._dataset.name} {self._dataset.split}"
        raise ValueError(f"too few images of {name} can be read; check the files")
