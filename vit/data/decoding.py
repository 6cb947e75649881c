"""What a process that decodes training images is sent, does and gives back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from vit.data.duplicates import compute_dhash, hash_pixels
from vit.data.sets.remote import RemoteError, RemoteReader
from vit.data.sets.shards import ShardReader
from vit.data.sets.source import FileReader, ImageReader
from vit.data.transforms import ImageGeometry


class Task(NamedTuple):
    """The images of a batch."""

    reader: ImageReader | None  # of these images alone; None: the worker has one of all
    indices: list[int]  # in the reader
    seeds: list[int]  # of their random crops
    is_hashed: bool  # whether their hashes are wanted


class Decoded(NamedTuple):
    """A task's result."""

    pixels: Tensor  # uint8 [B, H, W, 3]
    hashes: Tensor  # int64 [2, B], the bits of digests and perceptual hashes
    unreadable: dict[int, str]  # row → why its image can't be read
    mistake: str  # of the user's transform, or why images can't be reached now


class Tasks(Sampler[Task]):
    """The tasks of the epoch that begins."""

    count: int
    begin: Callable[[], Iterator[Task]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Task]:
        return self.begin()


class Decoder(Dataset[Decoded]):
    """Task → result. A worker has no list of all names: it would grow with their number in each of them."""

    def __init__(self, reader: ImageReader, geometry: ImageGeometry) -> None:
        self.geometry = geometry
        self.reader = None if isinstance(reader, FileReader | ShardReader | RemoteReader) else reader

    def build_task(self, reader: ImageReader, indices: np.ndarray, seeds: list[int], *, is_hashed: bool) -> Task:
        """For images of the reader that the decoder was made with."""
        if self.reader is not None:
            return Task(None, indices.tolist(), seeds, is_hashed)
        return Task(reader.take(indices), [*range(len(indices))], seeds, is_hashed)

    def __getitem__(self, task: Task) -> Decoded:
        pixels = np.empty((len(task.seeds), *self.geometry.size, 3), dtype=np.uint8)
        hashes, unreadable, mistake = np.zeros((2, len(task.seeds)), dtype=np.uint64), dict[int, str](), ""
        reader = task.reader or self.reader
        assert reader is not None
        try:
            reader.fetch(task.indices)
            for row, (index, seed) in enumerate(zip(task.indices, task.seeds, strict=True)):
                with ExitStack() as stack:
                    try:
                        image = stack.enter_context(reader.open(index))
                    except RemoteError:  # tells nothing of the image
                        raise
                    except (ValueError, OSError) as error:
                        unreadable[row] = str(error)
                        continue
                    if task.is_hashed:
                        hashes[:, row] = hash_pixels(image), compute_dhash(image)
                    pixels[row] = self.geometry(image, seed=seed)
        except (ValueError, OSError) as error:
            mistake = str(error)
        return Decoded(torch.from_numpy(pixels), torch.from_numpy(hashes.view(np.int64)), unreadable, mistake)
