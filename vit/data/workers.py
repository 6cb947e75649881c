"""Full-size images that are decoded, transformed and cropped as training goes, in worker processes.

An image that can't be read is named, and the next one that can takes its place.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from vit.data.crop import Crop
from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom, seed_generators
from vit.runtime.drive import DriveError
from vit.runtime.machine import count_workers

Transform = Callable[..., Any]
# the samples of each step and, unless they are in memory, their pixels on the host
Steps = Generator[tuple[StatelessRandom, UInt8[Tensor, "B H W 3"] | None], None, None]
# index of each image of a batch, and seed of its transform and random crop
Tasks = Sequence[tuple[int, int]]


def apply_transform(transform: Transform, image: Image.Image, *, seed: int) -> Image.Image:
    """Apply a user's transform to an RGB image of any size: one of albumentations or torchvision, or
    a function of uint8 [H, W, 3]. Raises ValueError if the result isn't an RGB image of uint8."""
    # albumentations has a generator of its own
    if hasattr(transform, "set_random_seed"):
        transform.set_random_seed(seed)
        result = transform(image=np.array(image))["image"]
    else:
        seed_generators(seed)
        takes_pil = type(transform).__module__.startswith("torchvision.")
        result = transform(image if takes_pil else np.array(image))

    # torchvision's tensors are [3, H, W]
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
    """From a decoded image to uint8 [H, W, 3]: the user's transform, then a random crop of the
    full-size image if the crop has a `scale`, otherwise the centre crop."""

    def __init__(self, crop: Crop, preprocess: Preprocess, transform: Transform | None) -> None:
        self.size = preprocess.image_size
        self._transform = transform
        self._crop = crop
        self._preprocess = preprocess
        # brings an image to its shape before a random crop; None: it has its own
        self._resize: Preprocess | None = preprocess
        if crop.scale is None:
            if crop.padding:
                # the device shifts: it gets the margin that crop_pct leaves
                self.size = preprocess.resize_size
                self._resize = replace(preprocess, image_size=self.size, crop_pct=1.0)
        elif preprocess.resize_mode == "crop":
            self._resize = None
        else:
            # so large that the smallest crop has the input's resolution
            height, width = (math.ceil(side * crop.scale[0] ** -0.5) for side in self.size)
            self._resize = replace(preprocess, image_size=(height, width))
        # see `ImageReader.decode`
        self.takes_arrays = transform is None and self._resize is None

    def __call__(self, image: Image.Image | np.ndarray, *, seed: int) -> np.ndarray:
        """Transform an image; an array only if `takes_arrays`."""
        if isinstance(image, Image.Image):
            image = self._preprocess.to_rgb(image)
            # another seed than that of the crop, because both may be of albumentations
            if self._transform is not None:
                image = apply_transform(self._transform, image, seed=seed + 1)
            image = np.asarray(image) if self._resize is None else self._resize.to_uint8(image)
        return image if self._crop.scale is None else self._cut(image, seed)

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
    """The decoded images of a batch.

    Attributes:
        indices: Index of each image; another one than was asked for if that can't be read.
        unreadable: Index of an image → why it can't be read.
        error: Why the user's transform failed, or images can't be reached now; else empty.
    """

    indices: Int64[Tensor, " B"]
    pixels: UInt8[Tensor, "B H W 3"]
    unreadable: dict[int, str]
    error: str


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


class Decoder(Dataset[Decoded]):
    """Decodes batches in a worker."""

    def __init__(
        self, dataset: ImageDataset, decoding: Decoding, crop: Crop, preprocess: Preprocess
    ) -> None:
        self._transform = TrainTransform(crop, preprocess, decoding.transform)
        self._count = len(dataset)
        reader = dataset.reader
        self._read = reader.decode if self._transform.takes_arrays else reader.image

    def __getitem__(self, tasks: Tasks) -> Decoded:
        pixels = np.empty((len(tasks), *self._transform.size, 3), dtype=np.uint8)
        indices = torch.empty(len(tasks), dtype=torch.int64)
        unreadable: dict[int, str] = {}
        error = ""
        # errors are returned as text: a worker's exceptions would arrive with its traceback
        try:
            for row, (index, seed) in enumerate(tasks):
                indices[row], image = self._read_next(index, unreadable)
                pixels[row] = self._transform(image, seed=seed)
        except (ValueError, OSError, DriveError) as failure:
            error = str(failure)
        return Decoded(indices, torch.from_numpy(pixels), unreadable, error)

    def _read_next(
        self, index: int, unreadable: dict[int, str]
    ) -> tuple[int, Image.Image | np.ndarray]:
        """Read the image at `index` or the first one after it that can be read, and note the
        others. Raises ValueError if none can."""
        for place in range(index, index + self._count):
            try:
                return place % self._count, self._read(place % self._count)
            except (ValueError, OSError) as error:
                unreadable[place % self._count] = str(error)
        raise ValueError("none of the images can be read")


def use_one_thread(_worker: int) -> None:
    """Keep OpenCV from starting a thread for each core in every worker."""
    # takes long to import
    import cv2

    cv2.setNumThreads(0)


class _EpochTasks:
    """The batches of one epoch; workers that live on take the next epoch's from it."""

    batches: Iterable[Tasks] = ()

    def __iter__(self) -> Iterator[Tasks]:
        return iter(self.batches)


class DecodingWorkers:
    """Worker processes that live until `close()` or until this object is deleted."""

    def __init__(
        self, dataset: ImageDataset, decoding: Decoding, crop: Crop, preprocess: Preprocess
    ) -> None:
        self._dataset = dataset
        self._crop = crop
        self._max_unreadable_fraction = decoding.max_unreadable_fraction
        self._decoder = Decoder(dataset, decoding, crop, preprocess)
        self._workers = count_workers() if decoding.workers is None else decoding.workers
        self._tasks = _EpochTasks()
        self._loader: DataLoader[Decoded] | None = None
        # the iterator of `_loader`, which owns the workers
        self._iterator: Any = None
        # index of an image → why it can't be read
        self._unreadable: dict[int, str] = {}

    def close(self) -> None:
        """End the processes that decode images; the next epoch starts new ones."""
        # an exception's traceback may keep the iterator alive, and with it the workers
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        self._loader = self._iterator = None
        if shut_down is not None:
            # torch raises again for a worker that was killed, and ends the others
            with suppress(RuntimeError):
                shut_down()

    def decode(
        self, samples: Iterator[StatelessRandom], on_warning: Callable[[str], object]
    ) -> Steps:
        """Decode the pixels of each batch."""
        sampled = list(samples)
        self._tasks.batches = (
            list(zip(rng.sample_ids.tolist(), self._crop.sample_seeds(rng), strict=True))
            for rng in sampled
        )
        if self._loader is None:
            self._loader = DataLoader(
                self._decoder,
                sampler=self._tasks,
                # the decoder gives batches
                batch_size=None,
                num_workers=self._workers,
                persistent_workers=self._workers > 0,
                worker_init_fn=use_one_thread,
                # or each epoch would take a number from torch's own
                generator=torch.Generator(),
            )
        self._iterator = iter(self._loader)
        for rng, batch in zip(sampled, self._iterator, strict=True):
            self._check(batch, on_warning)
            yield replace(rng, sample_ids=batch.indices), batch.pixels

    def _check(self, batch: Decoded, on_warning: Callable[[str], object]) -> None:
        """Name the images that can't be read. Raises ValueError if they are too many."""
        dataset = self._dataset
        for index, reason in batch.unreadable.items():
            if index not in self._unreadable:
                self._unreadable[index] = reason
                on_warning(f"skipped {dataset.split} image {dataset.ids[index]}: {reason}")
        unreadable = [(dataset.ids[index], why) for index, why in self._unreadable.items()]
        check_unreadable(unreadable, len(dataset), self._max_unreadable_fraction)
        if batch.error:
            raise ValueError(batch.error)
