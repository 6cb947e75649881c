"""Pipeline "cached": pixels of the cache, which a thread reads for the next step."""

import math
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit.data.crop import Crop
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.data.workers import Steps
from vit.runtime.machine import count_free_memory

# part of the free memory, and of the free disk, that decoded pixels may take
MAX_MEMORY_FRACTION = 0.4
_MAX_DISK_FRACTION = 0.8
# side of the stored image in units of the input's
_STORED_SIDE = 1.4


def choose_stored(preprocess: Preprocess, crop: Crop) -> Preprocess:
    """Return the preprocessing of images that are stored once and cropped on the device.

    Random parts are cut from the whole image, stored with 1.4 times the sides of the input, with
    less detail than parts of the full-size image: by 2.6 of 255 grey levels on average for photos
    of 500 x 375 pixels and an input of 224. Other crops have the pixels of the other pipelines.
    """
    if crop.scale is None:
        return replace(preprocess, image_size=preprocess.resize_size, crop_pct=1.0)
    height, width = (math.ceil(_STORED_SIDE * side) for side in preprocess.image_size)
    mode = preprocess.resize_mode if preprocess.resize_mode != "crop" else "stretch"
    return replace(preprocess, image_size=(height, width), crop_pct=1.0, resize_mode=mode)


def has_room(num_bytes: int, cache_dir: Path) -> bool:
    """Return true if so many bytes fit on the disk of `cache_dir` and in the free memory."""
    folder = next(place for place in (cache_dir, *cache_dir.parents) if place.exists())
    fits_disk = num_bytes <= _MAX_DISK_FRACTION * shutil.disk_usage(folder).free
    return fits_disk and num_bytes <= MAX_MEMORY_FRACTION * count_free_memory()


def gather(pixels: np.ndarray, samples: Iterator[StatelessRandom], *, pinned: bool) -> Steps:
    """Read the pixels of each batch from `pixels`, uint8 [n, H, W, 3], one batch ahead. If
    `pinned`, into memory from which a GPU copies while it computes."""
    stored = torch.from_numpy(pixels)

    def start(rng: StatelessRandom) -> Future[Tensor]:
        shape = (len(rng.sample_ids), *stored.shape[1:])
        batch = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        return pool.submit(torch.index_select, stored, 0, rng.sample_ids, out=batch)

    with ThreadPoolExecutor(1) as pool:
        reading: tuple[StatelessRandom, Future[Tensor]] | None = None
        for rng in samples:
            following = rng, start(rng)
            if reading is not None:
                yield reading[0], reading[1].result()
            reading = following
        if reading is not None:
            yield reading[0], reading[1].result()
