"""Full-size images that are decoded, transformed and cropped as training goes, in worker processes.

An image that can't be read is named, and the next one that can takes its place.
"""

import os
import warnings
from collections.abc import Callable, Generator, Iterator
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

from vit.data.augment import Augmentation
from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom, seed_generators
from vit.runtime.drive import DriveError

Transform = Callable[..., Any]
# the samples of each step and, unless they are on the device, their pixels
Steps = Generator[tuple[StatelessRandom, UInt8[Tensor, "B H W 3"] | None], None, None]
# JPEG files may be decoded to so many times the sides of the input, because random parts of 6 % of
# the area then have all of its pixels
_DRAFT_SIDES = 4
# processes beyond which one training process gains little
_MAX_WORKERS = 16


def apply_transform(transform: Transform, image: Image.Image, *, seed: int) -> Image.Image:
    """Apply a user's transform to an RGB image of any size: one of albumentations or torchvision,
    or a function of uint8 [H, W, 3]. Raises ValueError if the result isn't RGB of uint8."""
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


class Decoded(NamedTuple):
    """The decoded images of a batch."""

    # another index than was asked for where that image can't be read
    indices: Int64[Tensor, " B"]
    pixels: UInt8[Tensor, "B H W 3"]
    # index of an image → why it can't be read
    unreadable: dict[int, str]
    # why the user's transform failed, or images can't be reached now; else empty
    error: str


@dataclass(eq=False)
class Decoder(Dataset[Decoded]):
    """Decodes batches, in a worker.

    Random crops are cut from the full-size images; without, and where the whole image is shown,
    images are decoded as for the other pipelines. The user's transform comes first.
    """

    dataset: ImageDataset
    preprocess: Preprocess
    augmentation: Augmentation
    transform: Transform | None

    def __post_init__(self) -> None:
        size = self.preprocess.resize_size
        self._whole = replace(self.preprocess, image_size=size, crop_pct=1.0)
        is_cropped = self.preprocess.resize_mode == "crop"
        self.cuts_parts = is_cropped and self.augmentation.resized_crop_scale is not None
        self._size = self.preprocess.image_size if self.cuts_parts else size
        is_drafted = self.cuts_parts and self.transform is None
        self._draft_side = _DRAFT_SIDES * max(self._size) if is_drafted else None

    def __getitem__(self, rng: StatelessRandom) -> Decoded:
        """Decode a batch."""
        pixels = np.empty((len(rng.sample_ids), *self._size, 3), dtype=np.uint8)
        indices = rng.sample_ids.clone()
        seeds = rng.integers("albumentations", below=2**31 - 1) + 1
        places = self.augmentation.sample_places(rng).numpy()
        unreadable: dict[int, str] = {}
        error = ""
        # errors are returned as text: a worker's exceptions would arrive with its traceback
        try:
            for row, index in enumerate(rng.sample_ids.tolist()):
                indices[row], image = self._read_next(index, unreadable)
                image = self.preprocess.to_rgb(image)
                if self.transform is not None:
                    image = apply_transform(self.transform, image, seed=int(seeds[row]))
                if self.cuts_parts:
                    pixels[row] = self._cut(image, places[:, row])
                else:
                    pixels[row] = self._whole.to_uint8(image)
        except (ValueError, OSError, DriveError) as failure:
            error = str(failure)
        return Decoded(indices, torch.from_numpy(pixels), unreadable, error)

    def _read_next(self, index: int, unreadable: dict[int, str]) -> tuple[int, Image.Image]:
        """Read the image at `index` or the first one after it that can be read, and note the
        others. Raises ValueError if none can."""
        count = len(self.dataset)
        for place in range(index, index + count):
            try:
                image = self.dataset.reader.image(place % count, draft_side=self._draft_side)
            except (ValueError, OSError) as error:
                unreadable[place % count] = str(error)
            else:
                return place % count, image
        raise ValueError("none of the images can be read")

    def _cut(self, image: Image.Image, places: np.ndarray) -> np.ndarray:
        """Cut out the random part, and resize it, bilinear and antialiased, to [H, W, 3]."""
        height, width = self._size
        full_size = image.height, image.width
        box = self.augmentation.place_crops(places, full_size, shape=width / height)
        left, top, right, bottom = map(int, box)
        part = torch.from_numpy(np.array(image.crop((left, top, right, bottom))))
        # with channels last it takes a fifth of Pillow's time
        channels_last = part.unsqueeze(0).permute(0, 3, 1, 2)
        resized = F.interpolate(channels_last, (height, width), mode="bilinear", antialias=True)
        return resized[0].permute(1, 2, 0).numpy()


def use_one_thread(_worker: int) -> None:
    """Keep OpenCV from starting a thread for each core in every worker."""
    # takes long to import
    import cv2

    cv2.setNumThreads(0)


def count_workers() -> int:
    """Return the number of processes that decode for this one: the cores that it may use, divided
    among the processes of the run on this machine, and at most 16."""
    # takes a tenth of a second to import
    from joblib import cpu_count  # type: ignore[import-untyped]

    # torchrun sets the variable
    cores: int = cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cores, 1), _MAX_WORKERS)


class DecodingWorkers:
    """Worker processes that live until `close()` or until this object is deleted."""

    def __init__(
        self, decoder: Decoder, workers: int | None, max_unreadable_fraction: float
    ) -> None:
        self._decoder = decoder
        self._max_unreadable_fraction = max_unreadable_fraction
        # the batches of one epoch; workers that live on take the next epoch's from it
        self._samples: list[StatelessRandom] = []
        num_workers = count_workers() if workers is None else workers
        self._loader: Any = DataLoader(
            decoder,
            sampler=self._samples,
            # the decoder gives batches
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=use_one_thread,
            # or each epoch would take a number from torch's own
            generator=torch.Generator(),
        )
        # id of an image → why it can't be read
        self._unreadable: dict[str, str] = {}

    def close(self) -> None:
        """End the processes that decode images; the next epoch starts new ones."""
        # an exception's traceback may keep the iterator alive, and with it the workers
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None:
            # torch raises again for a worker that was killed, and ends the others
            with suppress(RuntimeError):
                iterator._shutdown_workers()

    def decode(self, samples: Iterator[StatelessRandom]) -> Steps:
        """Yield the samples and the pixels of each batch, and warn of images that can't be read.
        Raises ValueError if they are too many."""
        dataset = self._decoder.dataset
        self._samples[:] = samples
        for rng, batch in zip(list(self._samples), self._loader, strict=True):
            for index, reason in batch.unreadable.items():
                name = dataset.ids[index]
                if name not in self._unreadable:
                    self._unreadable[name] = reason
                    warnings.warn(f"skipped {dataset.split} image {name}: {reason}", stacklevel=2)
            unreadable = list(self._unreadable.items())
            check_unreadable(unreadable, len(dataset), self._max_unreadable_fraction)
            if batch.error:
                raise ValueError(batch.error)
            yield replace(rng, sample_ids=batch.indices), batch.pixels
