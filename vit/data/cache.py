"""Decode once: the images of a dataset become uint8 pixels on disk, memory-mapped, with checksums.

Decoded images lie in a folder of the cache whose name has a hash of the files' facts. It is built
under a lock next to its place, and moved there when complete. Changed files have another hash,
hence another folder; a damaged folder is built again.
"""

import errno
import hashlib
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.duplicates import compute_dhash, hash_pixels
from vit.data.preprocess import Preprocess
from vit.data.sources.remote import RemoteError
from vit.runtime.files import (
    default_cache_dir,
    open_cached,
    open_regular,
    read_arrays,
    rename_durably,
    write_arrays,
)
from vit.runtime.locks import lock_file
from vit.runtime.progress import show_progress

# raise it when the files or the pixels in them change
_FORMAT = 5
# bytes for each checksum
_BLOCK = 1 << 24
# 2 GiB; a larger file is checked in a sample of its blocks
_CHECKED_BLOCKS = 128
# images that a process decodes at a time
_CHUNK = 256
# images below which starting processes costs more than it saves
_FEW = 1000

# index of the first image, facts uint64 [4, n], image index → why it can't be read
_Chunk = tuple[int, np.ndarray, dict[int, str]]


def decode_dataset(
    dataset: ImageDataset,
    *,
    size: tuple[int, int] | None,
    cache_dir: Path | None = None,
    workers: int | None = None,
    max_unreadable_fraction: float = 0.05,
    progress: bool = True,
    preprocess: Preprocess | None = None,
    while_decoding: Callable[[], object] | None = None,
) -> ImageDataset:
    """Decode every image once, or open what was decoded earlier.

    Args:
        dataset: The images; already decoded ones are returned as they are.
        size: Height and width that the images are scaled and cut to; None computes hashes alone.
        cache_dir: The cache; None is $VIT_CACHE or ~/.cache/vit.
        workers: Processes that decode; None is one a core, 0 this process.
        max_unreadable_fraction: Fraction of the images that may be unreadable, 0 to 1.
        progress: Show a progress bar.
        preprocess: How images are scaled, apart from the size; None for a bicubic crop.
        while_decoding: Called once when other processes have begun to decode; not if this one
            decodes.

    Returns:
        The readable images, with `pixels` (None without a size), `hashes`, `sizes` and `unreadable`.

    Raises:
        ValueError: More images are unreadable than allowed.
        OSError: The cache can't be written, or is full.
    """
    if dataset.pixels is not None:
        return dataset

    folder, stored = _find_place(dataset, size, cache_dir, preprocess)
    open_decoded = partial(open_cached, folder, partial(_open_decoded, folder, dataset, size))
    decode = partial(
        _decode_images, workers=workers, progress=progress, while_decoding=while_decoding
    )
    decoded = open_decoded()
    if decoded is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.with_suffix(".lock")) as is_locked:
            # another process may have built it while this one waited
            decoded = open_decoded()
            if decoded is None:
                # without a lock, another process may build it at the same time, in a place of its
                # own
                building = folder.with_suffix(
                    ".building" if is_locked else f".{secrets.token_hex(4)}.building"
                )
                try:
                    _build(dataset, building, stored, decode, has_pixels=size is not None)
                    # without a lock, another process may have been quicker
                    decoded = open_decoded()
                    if decoded is None:
                        # there may be a damaged one
                        shutil.rmtree(folder, ignore_errors=True)
                        try:
                            rename_durably(building, folder)
                        except OSError as error:
                            # or another process was quicker after all
                            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                                raise
                        decoded = open_decoded()
                finally:
                    shutil.rmtree(building, ignore_errors=True)

    assert decoded is not None
    check_unreadable(decoded.unreadable, len(dataset), max_unreadable_fraction)
    return decoded


def is_decoded(dataset: ImageDataset, preprocess: Preprocess, cache_dir: Path) -> bool:
    """Return true if `decode_dataset` has no images to decode for this preprocessing."""
    if dataset.pixels is not None:
        return True
    return _find_place(dataset, preprocess.resize_size, cache_dir, preprocess)[0].exists()


def _find_place(
    dataset: ImageDataset,
    size: tuple[int, int] | None,
    cache_dir: Path | None,
    preprocess: Preprocess | None,
) -> tuple[Path, Preprocess]:
    """Return the folder of decoded images, and their preprocessing. See `decode_dataset`."""
    given = preprocess or Preprocess(size or (1, 1))
    # hashes don't depend on how images are resized
    stored = Preprocess((1, 1), value_range=given.value_range)
    if size is not None:
        stored = replace(given, image_size=size, crop_pct=1.0)
    key = f"{_FORMAT} {dataset.cache_key()} {size} {stored.storage}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    kind = "hashes" if size is None else f"{size[0]}x{size[1]}"
    folder = cache_dir or default_cache_dir()
    return folder / f"{dataset.name}-{dataset.split}-{kind}-{digest}", stored


def _build(
    dataset: ImageDataset,
    building: Path,
    preprocess: Preprocess,
    decode: Callable[[ImageDataset, Path | None, Preprocess], tuple[np.ndarray, dict[int, str]]],
    *,
    has_pixels: bool,
) -> None:
    """Decode the images into the folder `building`, by `_decode_images`. The caller removes it."""
    # a process that was killed may have left it
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    # every image has its place in the file, so that processes write side by side
    pixels = building / "images.u8"
    image_bytes = 3 * math.prod(preprocess.image_size) if has_pixels else 0
    with pixels.open("wb") as file:
        # reserved now: writing through a memory map to a full disk would kill the process
        _reserve(file, image_bytes * len(dataset))

    facts, failures = decode(dataset, pixels if has_pixels else None, preprocess)

    # unreadable images have no place in the file, only in the index
    readable = np.delete(np.arange(len(dataset)), list(failures))
    if image_bytes and len(readable):
        images = np.memmap(pixels, dtype=np.uint8, mode="r+").reshape(-1, image_bytes)
        # the places ascend, so no image is written over one that is still needed
        for place, index in enumerate(readable):
            if place != index:
                images[place] = images[index]
        # Windows cuts no file that is mapped
        del images
    os.truncate(pixels, len(readable) * image_bytes)

    # each block has a checksum, so that a part of a large file can be checked
    num_blocks = math.ceil(pixels.stat().st_size / _BLOCK)
    unreadable = [(dataset.ids[failed], failures[failed]) for failed in sorted(failures)]
    arrays = {
        "readable": readable,
        "hashes": facts[:2, readable],
        "sizes": facts[2:, readable].astype(np.int32),
        "unreadable": np.array(unreadable, dtype=str).reshape(-1, 2),
        "checksums": _compute_checksums(pixels, range(num_blocks)),
    }
    write_arrays(building / "index.npz", arrays)


def _reserve(file: BinaryIO, num_bytes: int) -> None:
    """Take the space of a file's bytes, which are zeros then. Raises OSError if the disk is full."""
    if num_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return
    # macOS and Windows
    zeros = bytes(_BLOCK)
    for start in range(0, num_bytes, _BLOCK):
        file.write(zeros[: num_bytes - start])


def _decode_images(
    dataset: ImageDataset,
    pixels: Path | None,
    preprocess: Preprocess,
    *,
    workers: int | None,
    progress: bool,
    while_decoding: Callable[[], object] | None,
) -> tuple[np.ndarray, dict[int, str]]:
    """Write the pixels of all images into a file, unless it is None, and hash them.

    Returns:
        Facts of the images, uint64 [4, n]: two hashes, width and height; and index of an image → why it can't be read.
    """
    count = len(dataset)
    facts = np.zeros((4, count), dtype=np.uint64)
    failures: dict[int, str] = {}
    # a generator, because the parts of millions of images would take much memory
    tasks = (
        (dataset.subset(range(start, min(start + _CHUNK, count))), start, pixels, preprocess)
        for start in range(0, count, _CHUNK)
    )
    title = f"decoding {dataset.name} {dataset.split}"
    with show_progress(title, count, shown=progress) as advance:
        if workers in (0, 1) or count < _FEW or dataset.reader.in_process:
            chunks: Iterator[_Chunk] = (_decode_chunk(*task) for task in tasks)
        else:
            # joblib starts new processes (a fork is unsafe with threads) and imports no __main__
            from joblib import Parallel, delayed  # type: ignore[import-untyped]

            pool = Parallel(n_jobs=workers or -1, return_as="generator_unordered", max_nbytes=None)
            decoded = pool(delayed(_decode_chunk)(*task) for task in tasks)
            try:
                if while_decoding is not None:
                    while_decoding()
            except BaseException as error:
                # ends the processes, as if raised while waiting for them
                decoded.throw(error)
            chunks = decoded

        try:
            for start, chunk_facts, chunk_failures in chunks:
                chunk_size = chunk_facts.shape[1]
                facts[:, start : start + chunk_size] = chunk_facts
                failures |= chunk_failures
                advance(chunk_size)
        except BrokenProcessPool as error:
            text = "a data-loading worker was killed (out of memory?)"
            raise OSError(f"{text}; try fewer data.workers") from error
    return facts, failures


def _decode_chunk(
    dataset: ImageDataset, start: int, pixels: Path | None, preprocess: Preprocess
) -> _Chunk:
    """Decode a chunk, and write its pixels into the places start, start + 1, … of the file."""
    count = len(dataset)
    if pixels is not None:
        shape = (count, *preprocess.image_size, 3)
        offset = start * math.prod(shape[1:])
        images = np.memmap(pixels, dtype=np.uint8, mode="r+", offset=offset, shape=shape)

    facts = np.zeros((4, count), dtype=np.uint64)
    failures: dict[int, str] = {}
    dataset.reader.fetch(range(count))
    for index in range(count):
        try:
            image = preprocess.to_rgb(dataset.image(index))
            facts[:, index] = hash_pixels(image), compute_dhash(image), *image.size
            if pixels is not None:
                images[index] = preprocess.to_uint8(image)
        except RemoteError:
            # the image itself may be good
            raise
        except (ValueError, OSError) as error:
            failures[start + index] = str(error)
    return start, facts, failures


def _open_decoded(
    folder: Path, dataset: ImageDataset, size: tuple[int, int] | None
) -> ImageDataset:
    """Open the decoded images in `folder`. Raises OSError or ValueError if there are none, or
    damaged ones."""
    index = read_arrays(folder / "index.npz")
    readable = index["readable"]
    images = None
    if size is not None:
        shape = (len(readable), *size, 3)
        images = _open_images(folder / "images.u8", shape, index["checksums"])
    return replace(
        dataset.subset(readable),
        pixels=images,
        hashes=index["hashes"],
        sizes=index["sizes"],
        unreadable=[(name, reason) for name, reason in index["unreadable"].tolist()],
    )


def _open_images(path: Path, shape: tuple[int, ...], checksums: np.ndarray) -> np.ndarray:
    """Map the pixels in a file. Raises ValueError if it is damaged."""
    # evenly spaced blocks, because reading a large file whole would take minutes
    blocks = range(0, len(checksums), max(1, len(checksums) // _CHECKED_BLOCKS))
    has_right_size = path.stat().st_size == math.prod(shape)
    if not has_right_size or (_compute_checksums(path, blocks) != checksums[blocks]).any():
        raise ValueError(f"{path} is damaged")

    if not shape[0]:
        # an empty file can't be mapped
        return np.zeros(shape, dtype=np.uint8)
    # copy-on-write: torch can use the memory, and the file can't be changed through it
    return np.memmap(path, dtype=np.uint8, mode="c", shape=shape)


def _compute_checksums(path: Path, blocks: range) -> np.ndarray:
    """Compute the CRC-32 of blocks of a file, uint32."""
    with open_regular(path) as file:
        checksums = []
        for block in blocks:
            file.seek(block * _BLOCK)
            checksums.append(zlib.crc32(file.read(_BLOCK)))
        return np.array(checksums, dtype=np.uint32)
