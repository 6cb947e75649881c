"""Decode once: the images of a dataset become uint8 pixels on disk, memory-mapped.

A folder is named by the bytes of its images and by their preprocessing: labels, classes, file names,
permissions and the place of the files may change. It is built beside its place, and renamed when it
is complete.
"""

import hashlib
import math
import os
import secrets
import shutil
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.duplicates import compute_dhash, hash_pixels
from vit.data.preprocess import Preprocess
from vit.data.sources.base import read_digests
from vit.runtime.files import (
    default_cache_dir,
    open_cached,
    read_arrays,
    rename_durably,
    write_arrays,
)
from vit.runtime.locks import lock_file
from vit.runtime.progress import show_progress

# raise it when the files or the pixels in them change
_FORMAT = 7
# images that a process decodes at a time
_CHUNK = 256
# images below which starting processes costs more than it saves
_FEW = 1000
# a folder that nobody opened for so many seconds is removed when another one is built
_MAX_AGE = 14 * 24 * 3600

# index of an image → why it can't be read
_Failures = dict[int, str]


def decode_dataset(
    dataset: ImageDataset,
    *,
    size: tuple[int, int],
    cache_dir: Path | None = None,
    workers: int | None = None,
    max_unreadable_fraction: float = 0.05,
    progress: bool = True,
    preprocess: Preprocess | None = None,
) -> ImageDataset:
    """Decode every image once, or open what was decoded earlier.

    Args:
        dataset: The images; already decoded ones are returned as they are.
        size: Height and width that the images are scaled and cut to.
        cache_dir: The cache; None is $VIT_CACHE or ~/.cache/vit.
        workers: Processes that decode; None is one a core, 0 this process.
        max_unreadable_fraction: Fraction of the images that may be unreadable, 0 to 1.
        progress: Show a progress bar.
        preprocess: How images are scaled, apart from the size; None for a bicubic crop.

    Returns:
        The readable images, with `pixels`, `hashes` and `unreadable`.

    Raises:
        ValueError: More images are unreadable than allowed.
        OSError: The cache can't be written, or is full.
    """
    if dataset.pixels is not None:
        return dataset
    cache_dir = cache_dir or default_cache_dir()
    cache_dir.mkdir(parents=True, exist_ok=True)
    stored = replace(preprocess or Preprocess(size), image_size=size, crop_pct=1.0)
    content = f"{_FORMAT} {stored.storage}".encode()
    content += read_digests(dataset.reader, cache_dir).tobytes()
    name = f"{size[1]}x{size[0]}-{hashlib.sha256(content).hexdigest()[:16]}"
    folder = cache_dir / f"{name}.decoded"
    shape = (len(dataset), *size, 3)

    def read() -> dict[str, Any]:
        index = read_arrays(folder / "index.npz")
        # copy-on-write: torch can use the memory, and the file can't be changed through it
        pixels = np.memmap(folder / "images.u8", dtype=np.uint8, mode="c", shape=shape)
        # the age of the folder counts from here; the cache may be another user's
        with suppress(OSError):
            os.utime(folder)
        return {**index, "pixels": pixels[: len(index["readable"])]}

    # who waits for the lock finds what another process has built meanwhile
    with lock_file(cache_dir / f"{name}.lock") as is_locked:
        index = open_cached(folder, read)
        if index is None:
            _remove_old(cache_dir)
            # without a lock, another process may build it at the same time, in a place of its own
            mark = "" if is_locked else f".{secrets.token_hex(4)}"
            building = cache_dir / f"{name}{mark}.building"
            # a process that was killed may have left it
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                _build(dataset, building, shape, stored, workers=workers, progress=progress)
                try:
                    rename_durably(building, folder)
                except OSError:
                    # another process was faster, unless what is there is damaged
                    if open_cached(folder, read) is None:
                        shutil.rmtree(folder)
                        rename_durably(building, folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
            index = read()

    pairs = zip(index["unreadable"].tolist(), index["reasons"].tolist(), strict=True)
    unreadable = [(dataset.ids[place], reason) for place, reason in pairs]
    check_unreadable(unreadable, len(dataset), max_unreadable_fraction)
    return replace(
        dataset.subset(index["readable"]),
        pixels=index["pixels"],
        hashes=index["hashes"],
        unreadable=unreadable,
    )


def _remove_old(cache_dir: Path) -> None:
    """Remove the folders of decoded images that nobody opened for a long time."""
    for folder in (*cache_dir.glob("*x*-*.decoded"), *cache_dir.glob("*x*-*.building")):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _MAX_AGE:
                shutil.rmtree(folder)


def _build(
    dataset: ImageDataset,
    folder: Path,
    shape: tuple[int, ...],
    preprocess: Preprocess,
    *,
    workers: int | None,
    progress: bool,
) -> None:
    """Decode the images of a dataset into an empty folder, see `decode_dataset`."""
    # takes long to import; it starts new processes (a fork is unsafe with threads) that import no
    # __main__
    from joblib import Parallel, delayed  # type: ignore[import-untyped]

    path = folder / "images.u8"
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            # writing through a memory map to a full disk would kill the process
            os.posix_fallocate(file.fileno(), 0, math.prod(shape))
    # it makes the file as large as it must be; every image has its place in it, so that processes
    # write side by side
    pixels = np.memmap(path, dtype=np.uint8, mode="r+", shape=shape)
    count = len(dataset)
    hashes = np.zeros((2, count), dtype=np.uint64)
    failures: _Failures = {}
    is_alone = workers in (0, 1) or count < _FEW or dataset.reader.in_process
    num_jobs = 1 if is_alone else workers or -1
    pool = Parallel(n_jobs=num_jobs, return_as="generator_unordered", max_nbytes=None)
    # a generator, because the parts of millions of images would take much memory
    tasks = (
        delayed(_decode_chunk)(dataset.subset(chunk), chunk, pixels, preprocess)
        for chunk in np.split(np.arange(count), range(_CHUNK, count, _CHUNK))
    )
    with show_progress(
        f"decoding {dataset.name} {dataset.split}", count, shown=progress
    ) as advance:
        try:
            for chunk, chunk_hashes, chunk_failures in pool(tasks):
                hashes[:, chunk] = chunk_hashes
                failures |= chunk_failures
                advance(len(chunk))
        except BrokenProcessPool as error:
            raise OSError(
                "a data-loading worker has ended (out of memory? try fewer data.workers; a script"
                " that starts workers calls vit under if __name__ == '__main__':)"
            ) from error

    readable = np.delete(np.arange(count), list(failures))
    # unreadable images have no place; the places ascend, so none is overwritten before it is read
    for row, place in enumerate(readable.tolist()):
        if row != place:
            pixels[row] = pixels[place]
    index = {
        "readable": readable,
        "hashes": hashes[:, readable],
        "unreadable": np.array(sorted(failures), dtype=np.int64),
        "reasons": np.array([failures[place] for place in sorted(failures)], dtype=str),
    }
    write_arrays(folder / "index.npz", index)


def _decode_chunk(
    dataset: ImageDataset, places: np.ndarray, pixels: np.ndarray, preprocess: Preprocess
) -> tuple[np.ndarray, np.ndarray, _Failures]:
    """Decode images into these places of a memory map. Return the places, the images' hashes, uint64
    [2, n], and the failures."""
    hashes = np.zeros((2, len(places)), dtype=np.uint64)
    failures: _Failures = {}
    for index, place in enumerate(places.tolist()):
        try:
            image = preprocess.to_rgb(dataset.image(index))
            hashes[:, index] = hash_pixels(image), compute_dhash(image)
            pixels[place] = preprocess.to_uint8(image)
        except (ValueError, OSError) as error:
            failures[place] = str(error)
    return places, hashes, failures
