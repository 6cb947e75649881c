"""Decode once: images become uint8 pixels on disk, memory-mapped.

An image is known by its bytes, and found in any folder of its preprocessing: its labels, split,
name, permissions and place may change. A folder is built under another name, and renamed when it is
complete.
"""

import os
import secrets
import shutil
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from vit.data.dataset import DecodedPixels, ImageDataset, check_unreadable
from vit.data.duplicates import compute_dhash, hash_pixels
from vit.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vit.data.sources.base import ImageReader, hash_bytes, read_digests
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
_FORMAT = 10
# images that a process decodes at a time
_CHUNK = 256
# images below which starting processes costs more than it saves
_FEW = 1000
# a folder that nobody opened for so many seconds is removed when another one is built
_MAX_AGE = 14 * 24 * 3600

# row of an image → why it can't be read
_Failures = dict[int, str]


def decode_dataset(
    dataset: ImageDataset,
    preprocess: Preprocess,
    *,
    together: ImageDataset | None = None,
    cache_dir: Path | None = None,
    workers: int | None = None,
    max_unreadable_fraction: float = 0.05,
) -> ImageDataset:
    """Decode every image once to the model's `resize_size`, or open what was decoded earlier.

    Args:
        dataset: The images; already decoded ones are returned as they are.
        together: Images that are decoded if one of the dataset isn't yet, so that another split of
            them needs no decoding; None: those of the dataset.
        workers: Processes that decode; None is one a core, 0 this process.

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
    size = preprocess.resize_size
    # no stored pixel depends on the normalisation
    stored = replace(
        preprocess, image_size=size, crop_pct=1.0, mean=IMAGENET_MEAN, std=IMAGENET_STD
    )
    name = f"{size[1]}x{size[0]}-{hash_bytes(f'{_FORMAT} {stored}'.encode()):016x}"
    digests = read_digests(dataset.reader, cache_dir)
    index = _find(cache_dir, name, digests)
    if index is None:
        together = together or dataset
        contents = read_digests(together.reader, cache_dir)
        name += f"-{hash_bytes(contents.tobytes()):016x}"
        # who waits for the lock finds what another process has built meanwhile
        with lock_file(cache_dir / f"{name}.lock") as is_locked:
            index = _find(cache_dir, name, digests)
            if index is None:
                _remove_old(cache_dir, name if is_locked else "")
                # without a lock, another process may build the same beside this one
                building = cache_dir / f"{name}.{secrets.token_hex(4)}.building"
                building.mkdir()
                try:
                    _build(together, contents, stored, building, workers=workers)
                    rename_durably(building, building.with_suffix(".decoded"))
                finally:
                    shutil.rmtree(building, ignore_errors=True)
                index = _find(cache_dir, name, digests)
    if index is None:
        raise OSError("images have changed while they were decoded; start again")

    rows, failed = index["rows"], index["unreadable"]
    reasons = dict(zip(failed.tolist(), index["reasons"].tolist(), strict=True))
    is_readable = np.isin(rows, failed, invert=True)
    unreadable = [
        (dataset.ids[place], reasons[rows[place]])
        for place in np.flatnonzero(~is_readable).tolist()
    ]
    check_unreadable(unreadable, len(dataset), max_unreadable_fraction)
    rows = rows[is_readable]
    return replace(
        dataset.subset(np.flatnonzero(is_readable)),
        pixels=DecodedPixels(index["pixels"], rows),
        hashes=index["hashes"][:, rows],
        unreadable=unreadable,
    )


def _find(cache_dir: Path, name: str, digests: np.ndarray) -> dict[str, np.ndarray] | None:
    """Open a folder that has all images of the digests: the arrays of its index, its `pixels`, and
    the `rows` of these images. None if there is none."""
    for folder in cache_dir.glob(f"{name}*.decoded"):
        # copy-on-write: torch can use the memory, and the file can't be changed through it
        load = partial(np.load, folder / "images.npy", mmap_mode="c")
        try:
            index = open_cached(folder, partial(read_arrays, folder / "index.npz"))
            pixels = open_cached(folder, load)
        except PermissionError:  # another user's
            continue
        if index is None or pixels is None:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        known = index["digests"]
        order = np.argsort(known, kind="stable")
        rows = order.take(np.searchsorted(known, digests, sorter=order), mode="clip")
        if np.array_equal(known[rows], digests):
            # the age of the folder counts from here; the cache may be another user's
            with suppress(OSError):
                os.utime(folder)
            return {**index, "pixels": pixels, "rows": rows}
    return None


def _remove_old(cache_dir: Path, name: str) -> None:
    """Remove what nobody opened for a long time, and what a killed process left of `name`."""
    for folder in (*cache_dir.glob("*x*-*.decoded"), *cache_dir.glob("*x*-*.building")):
        with suppress(OSError):
            is_left = name and folder.name.startswith(name) and folder.suffix == ".building"
            if is_left or time.time() - folder.stat().st_mtime > _MAX_AGE:
                shutil.rmtree(folder)


def _build(
    dataset: ImageDataset,
    digests: np.ndarray,
    preprocess: Preprocess,
    folder: Path,
    *,
    workers: int | None,
) -> None:
    """Decode the images of a dataset into an empty folder, see `decode_dataset`."""
    # takes long to import; it starts new processes (a fork is unsafe with threads) that import no
    # __main__
    from joblib import Parallel, delayed  # type: ignore[import-untyped]

    count = len(dataset)
    path = folder / "images.npy"
    # every image has its row in the file, so that processes write side by side
    shape = (count, *preprocess.image_size, 3)
    pixels = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # writing through a memory map to a full disk would kill the process
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    hashes = np.zeros((2, count), dtype=np.uint64)
    failures: _Failures = {}
    is_alone = workers in (0, 1) or count < _FEW or dataset.reader.in_process
    num_jobs = 1 if is_alone else workers or -1
    pool = Parallel(n_jobs=num_jobs, return_as="generator_unordered", max_nbytes=None)
    # a generator, because the parts of millions of images would take much memory
    tasks = (
        delayed(_decode_chunk)(dataset.reader.subset(chunk), chunk, pixels, preprocess)
        for chunk in np.split(np.arange(count), range(_CHUNK, count, _CHUNK))
    )
    with show_progress(f"decoding {dataset.name}", count) as advance:
        try:
            for chunk, chunk_hashes, chunk_failures in pool(tasks):
                hashes[:, chunk] = chunk_hashes
                failures |= chunk_failures
                advance(len(chunk))
        except BrokenProcessPool as error:
            raise OSError(
                "a data-loading worker has ended (out of memory? try fewer data.workers)"
            ) from error

    index = {
        "digests": digests,
        "hashes": hashes,
        "unreadable": np.array(sorted(failures), dtype=np.int64),
        "reasons": np.array([failures[row] for row in sorted(failures)], dtype=str),
    }
    write_arrays(folder / "index.npz", index)


def _decode_chunk(
    reader: ImageReader, rows: np.ndarray, pixels: np.ndarray, preprocess: Preprocess
) -> tuple[np.ndarray, np.ndarray, _Failures]:
    """Decode images into these rows of a memory map. Return the rows, the images' hashes, uint64
    [2, n], and the failures."""
    hashes = np.zeros((2, len(rows)), dtype=np.uint64)
    failures: _Failures = {}
    for index, row in enumerate(rows.tolist()):
        try:
            image = preprocess.to_rgb(reader.image(index))
            hashes[:, index] = hash_pixels(image), compute_dhash(image)
            pixels[row] = preprocess.to_uint8(image)
        except (ValueError, OSError) as error:
            failures[row] = str(error)
    return rows, hashes, failures
