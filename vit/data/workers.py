"""Full-size images that are decoded, transformed and cropped as training goes, in worker processes.

An image that can't be read is named, and the next one that can takes its place.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pickle import PicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from vit.data.crop import Crop
from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.preprocess import Preprocess
from vit.data.random import SampleIds, StatelessRandom, seed_generators
from vit.data.sources.base import ImageReader
from vit.runtime.arguments import first_line
from vit.runtime.drive import DriveError
from vit.runtime.machine import count_workers

Transform = Callable[..., Any]

# images of a batch that a worker decodes at a time, at least: fewer cost more to send than to decode
_MIN_PART = 16

# the samples of each step and, unless they are in memory, their pixels on the host
Steps = Generator[tuple[StatelessRandom, UInt8[Tensor, "B H W 3"] | None], None, None]
# index of an image, and seed of its transform and random crop
Task = tuple[int, int]


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


class Decoded(NamedTuple):
    """Decoded images: a part of a batch."""

    # index of each image; another one than was asked for if that can't be read
    indices: Int64[Tensor, " B"]
    pixels: UInt8[Tensor, "B H W 3"]
    # index of an image → why it can't be read
    unreadable: dict[int, str]
    # why the user's transform failed, or why images can't be reached now; else empty
    error: str


class Decoder(Dataset[Decoded]):
    """Decodes a part of a batch in a worker.

    Args:
        reader: The images.
        transform: Transforms and crops each of them.
        max_unreadable: Number of images that may be unreadable.
    """

    def __init__(
        self, reader: ImageReader, transform: TrainTransform, *, max_unreadable: int
    ) -> None:
        self._transform = transform
        self._count = len(reader)
        self._read = reader.decode if transform.takes_arrays else reader.image
        self._max_unreadable = min(max_unreadable, self._count - 1)

    def __getitem__(self, tasks: Sequence[Task]) -> Decoded:
        pixels = np.empty((len(tasks), *self._transform.size, 3), dtype=np.uint8)
        indices = torch.empty(len(tasks), dtype=torch.int64)
        unreadable: dict[int, str] = {}
        error = ""
        # errors are returned as text: a worker's exceptions would arrive with its traceback
        try:
            for row, (index, seed) in enumerate(tasks):
                found, image = self._read_next(index, unreadable)
                # the main process ends the run
                if image is None:
                    break
                indices[row] = found
                pixels[row] = self._transform(image, seed=seed)
        except (ValueError, OSError, DriveError) as failure:
            error = str(failure)
        return Decoded(indices, torch.from_numpy(pixels), unreadable, error)

    def _read_next(
        self, index: int, unreadable: dict[int, str]
    ) -> tuple[int, Image.Image | np.ndarray | None]:
        """Read the image at `index` or the first one after it that can be read, and note the others;
        None if too many can't."""
        while len(unreadable) <= self._max_unreadable:
            try:
                return index, self._read(index)
            except (ValueError, OSError) as error:
                unreadable[index] = str(error)
            index = (index + 1) % self._count
        return index, None


def use_one_thread(_worker: int) -> None:
    """Keep OpenCV from starting a thread for each core in every worker."""
    # takes long to import
    import cv2

    cv2.setNumThreads(0)


class TaskSampler(Sampler[Sequence[Task]]):
    """The tasks of one epoch; workers that live on take the next epoch's from it."""

    tasks: Iterable[Sequence[Task]] = ()

    def __iter__(self) -> Iterator[Sequence[Task]]:
        return iter(self.tasks)


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
        self._decoding = decoding
        self._crop = crop
        self._preprocess = preprocess
        self._workers = count_workers() if decoding.workers is None else decoding.workers
        # without workers, a batch is decoded at once
        self._part_size = batch_size
        if self._workers:
            self._part_size = max(math.ceil(batch_size / self._workers), _MIN_PART)
        self._num_parts = math.ceil(batch_size / self._part_size)
        self._sampler = TaskSampler()
        self._loader: DataLoader[Decoded] | None = None
        # the iterator of `_loader`, which owns the workers
        self._parts: Any = None
        # index of an image → why it can't be read
        self._unreadable: dict[int, str] = {}

    def close(self) -> None:
        """End the processes that decode images, if there are any; the next epoch starts new ones.

        torch's handler of the signal of a worker that was killed raises wherever the program is,
        until the workers' iterator has ended; an exception's traceback may keep that alive.
        """
        shut_down = getattr(self._parts, "_shutdown_workers", None)
        self._loader = self._parts = None
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

        def list_tasks() -> Iterator[Sequence[Task]]:
            for sample_ids in batches:
                rng = StatelessRandom(seed, epoch, sample_ids)
                sent.append(rng)
                seeds = self._crop.sample_seeds(rng)
                tasks = list(zip(sample_ids.tolist(), seeds, strict=True))
                for start in range(0, len(tasks), self._part_size):
                    yield tasks[start : start + self._part_size]

        # workers that live on from the epoch before take this one's batches
        self._sampler.tasks = list_tasks()
        if self._loader is None:
            self._loader = self._build_loader()
        try:
            self._parts = iter(self._loader)
        # where processes don't begin as a copy of this one, as on Windows and macOS
        except (PicklingError, AttributeError, TypeError) as error:
            text = "the images or the transform can't be sent to other processes"
            hint = "define the transform in a module, or set data.workers=0"
            raise ValueError(f"{text} ({first_line(error)}); {hint}") from error
        while parts := list(islice(self._parts, self._num_parts)):
            for part in parts:
                self._check(part, on_warning)
            indices = torch.cat([part.indices for part in parts])
            pixels = parts[0].pixels
            if len(parts) > 1:
                pixels = torch.cat([part.pixels for part in parts])
            yield replace(sent.popleft(), sample_ids=indices), pixels

    def _build_loader(self) -> DataLoader[Decoded]:
        count = len(self._dataset)
        decoder = Decoder(
            self._dataset.reader,
            TrainTransform(self._crop, self._preprocess, self._decoding.transform),
            max_unreadable=int(self._decoding.max_unreadable_fraction * count),
        )
        return DataLoader(
            decoder,
            sampler=self._sampler,
            # the decoder gives parts of batches
            batch_size=None,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            worker_init_fn=use_one_thread,
            # or each epoch would take a number from torch's own
            generator=torch.Generator(),
        )

    def _check(self, part: Decoded, on_warning: Callable[[str], object]) -> None:
        """Name the images that can't be read. Raises ValueError if they are too many."""
        dataset = self._dataset
        for index, reason in part.unreadable.items():
            if index not in self._unreadable:
                self._unreadable[index] = reason
                on_warning(f"skipped {dataset.split} image {dataset.ids[index]}: {reason}")
        unreadable = [(dataset.ids[index], why) for index, why in self._unreadable.items()]
        check_unreadable(unreadable, len(dataset), self._decoding.max_unreadable_fraction)
        if part.error:
            raise ValueError(part.error)
