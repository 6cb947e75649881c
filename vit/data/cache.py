"""Decode once: an ImageSource becomes labelled uint8 pixels on disk, memory-mapped, checksummed and fingerprinted.

A decoded dataset lives in a folder of the cache named for its contents, built beside its place under a lock and moved
there when complete. A changed source has another cache key, hence another folder; a damaged one is built again.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from vit.data.dataset import DecodedDataset, check_unreadable
from vit.data.duplicates import compute_dhash, hash_pixels, jpeg_note
from vit.data.images import Interpolation, Preprocess
from vit.data.sets.remote import RemoteError
from vit.data.sets.source import ImageSource, StoredReader
from vit.runtime.documents import check_schema, read_json
from vit.runtime.files import default_cache_dir, open_regular, read_arrays, rename_durably, write_arrays, write_text
from vit.runtime.progress import show_progress

_FORMAT = 2  # raise it when the files or the pixels in them change
_BLOCK = 1 << 24  # bytes under one checksum
_CHECKED_BLOCKS = 128  # 2 GiB: of a larger file only so many are checked
_CHUNK = 256  # images a task
_SAMPLE = 200  # images in which traces of JPEG are looked for
_FEW = 1000  # images below which starting processes costs more than it saves


def decode_dataset(
    source: ImageSource,
    *,
    size: tuple[int, int] | None,
    cache_dir: Path | None = None,
    workers: int | None = None,
    max_unreadable_fraction: float = 0.05,
    progress: bool = True,
    interpolation: Interpolation = "bicubic",
) -> DecodedDataset:
    """Decode every image of `source` once, scaled and cut to `size` (H, W), or open what was decoded earlier.

    Without a size the images are only scanned: labels, hashes and what is unreadable. `workers` processes decode, by
    default one a core; 0 is this process. Raises ValueError when more than `max_unreadable_fraction` of the images are
    unreadable, OSError when the cache can't be written or is full.
    """
    preprocess = None if size is None else Preprocess(size, interpolation=interpolation)

    def decode(pixels: Path) -> Iterator[_Chunk]:
        work = partial(decode_chunk, pixels=pixels, preprocess=preprocess)
        return work_through(source, work, title="decoding", workers=workers, progress=progress)

    dataset = _open_or_build(source, cache_dir, preprocess, decode)
    check_unreadable(dataset.unreadable, len(source), max_unreadable_fraction)
    return dataset


def open_scan(source: ImageSource, cache_dir: Path | None) -> DecodedDataset | None:
    """What an earlier scan of the source found, if there was one."""
    return _open_decoded(_locate(source, cache_dir, None), source, None)


def save_scan(
    source: ImageSource, cache_dir: Path | None, hashes: np.ndarray, unreadable: dict[int, str]
) -> DecodedDataset:
    """Keep what training found when it decoded the images, uint64 [2, n] and index → reason, as a scan would."""
    return _open_or_build(source, cache_dir, None, lambda _: iter([(0, hashes, unreadable)]))


# the first image's index, digests and perceptual hashes uint64 [2, n], what was wrong with which image
_Chunk = tuple[int, np.ndarray, dict[int, str]]


def _locate(source: ImageSource, cache_dir: Path | None, preprocess: Preprocess | None) -> Path:
    """The folder of a source's decoded images, or of its scan."""
    size, interpolation = (None, "bicubic")
    if preprocess is not None:
        size, interpolation = preprocess.image_size, preprocess.interpolation
    key = hashlib.sha256(f"{_FORMAT} {source.cache_key()} {size} {interpolation}".encode()).hexdigest()[:16]
    shape = "scan" if size is None else f"{size[0]}x{size[1]}"
    return (cache_dir or default_cache_dir()) / f"{source.name}-{source.split}-{shape}-{key}"


def _open_or_build(
    source: ImageSource,
    cache_dir: Path | None,
    preprocess: Preprocess | None,
    decode: Callable[[Path], Iterator[_Chunk]],
) -> DecodedDataset:
    folder, size = _locate(source, cache_dir, preprocess), None if preprocess is None else preprocess.image_size
    if (dataset := _open_decoded(folder, source, size)) is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (dataset := _open_decoded(folder, source, size)) is None:  # else another process built it meanwhile
                _build(source, folder, preprocess, decode)
                dataset = _open_decoded(folder, source, size)
    assert dataset is not None
    return dataset


def _build(
    source: ImageSource, folder: Path, preprocess: Preprocess | None, decode: Callable[[Path], Iterator[_Chunk]]
) -> None:
    building = folder.with_suffix(".building")
    shutil.rmtree(building, ignore_errors=True)  # left by a builder that was killed: we hold its lock
    building.mkdir()
    try:
        pixels = building / "images.u8"
        image_bytes = 0 if preprocess is None else 3 * math.prod(preprocess.image_size)
        with pixels.open("wb") as file:
            if image_bytes:  # reserved now: writing through a memory map to a full disk would kill the process
                os.posix_fallocate(file.fileno(), 0, image_bytes * len(source))
        digests, perceptual = hashes = np.zeros((2, len(source)), dtype=np.uint64)
        failures: dict[int, str] = {}
        for start, of_chunk, unreadable in decode(pixels):
            hashes[:, start : start + of_chunk.shape[1]] = of_chunk
            failures |= unreadable
        good = np.array([index for index in range(len(source)) if index not in failures], dtype=np.int64)
        _compact(pixels, good, image_bytes)
        write_arrays(building / "index.npz", {"good": good, "digests": digests[good], "perceptual": perceptual[good]})
        sample = source.subset(good[:: max(1, len(good) // _SAMPLE)])
        sample.reader.fetch(range(len(sample)))
        note = jpeg_note(source.class_names, map(sample.read, range(len(sample))))
        index = {
            "size": None if preprocess is None else preprocess.image_size,
            "unreadable": [(source.ids[failed], failures[failed]) for failed in sorted(failures)],
            "notes": [] if note is None else [note],
            "checksums": _checksums(pixels, range(-(-pixels.stat().st_size // _BLOCK))),
        }
        write_text(building / "index.json", json.dumps(index))
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        rename_durably(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def work_through(
    source: ImageSource,
    work: Callable[[ImageSource, int], _Chunk],
    *,
    title: str,
    workers: int | None,
    progress: bool = True,
) -> Iterator[_Chunk]:
    """What `work` finds of each chunk of the images, in any order; `workers` as of `decode_dataset`."""
    chunks = (range(start, min(start + _CHUNK, len(source))) for start in range(0, len(source), _CHUNK))
    tasks = ((source.subset(chunk), chunk.start) for chunk in chunks)
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    with show_progress(f"{title} {source.name} {source.split}", len(source), shown=progress) as advance:
        if workers <= 1 or len(source) < _FEW or source.reader.in_process:
            results: Iterator[_Chunk] = (work(*task) for task in tasks)
        else:
            # joblib starts processes afresh (no fork beside threads) and imports no __main__ in them
            from joblib import Parallel, delayed  # type: ignore[import-untyped]

            pool = Parallel(n_jobs=workers, return_as="generator_unordered", max_nbytes=None)
            results = pool(delayed(work)(*task) for task in tasks)
        try:
            for chunk in results:
                advance(chunk[1].shape[1])
                yield chunk
        except BrokenProcessPool as error:
            text = "a process that decodes images was killed, perhaps for want of memory; try fewer data.workers"
            raise OSError(text) from error


def check_headers(source: ImageSource, start: int) -> _Chunk:
    """Look for images of a chunk that are none, without decoding one."""
    reader, failures = source.reader, {}
    assert isinstance(reader, StoredReader)
    for index in range(len(source)):
        try:
            reader.check(index)
        except (ValueError, OSError) as error:
            failures[start + index] = str(error)
    return start, np.zeros((2, len(source)), dtype=np.uint64), failures


def decode_chunk(
    source: ImageSource, start: int, pixels: Path | None = None, preprocess: Preprocess | None = None
) -> _Chunk:
    """Decode images for their hashes and, with a file, into its places start, start + 1, …"""
    hashes, failures = np.zeros((2, len(source)), dtype=np.uint64), {}
    if preprocess is not None:
        assert pixels is not None
        shape = (len(source), *preprocess.image_size, 3)
        out = np.memmap(pixels, dtype=np.uint8, mode="r+", offset=start * math.prod(shape[1:]), shape=shape)
    source.reader.fetch(range(len(source)))
    for index in range(len(source)):
        try:
            with source.open(index) as image:
                hashes[:, index] = hash_pixels(image), compute_dhash(image)
                if preprocess is not None:
                    out[index] = preprocess.to_uint8(image)
        except RemoteError:  # tells nothing of the image
            raise
        except (ValueError, OSError) as error:
            failures[start + index] = str(error)
    return start, hashes, failures


def _compact(pixels: Path, good: np.ndarray, image_bytes: int) -> None:
    """Close the gaps of unreadable images; `good` ascends, so no image lands on one still needed."""
    count = pixels.stat().st_size // image_bytes if image_bytes else 0
    if 0 < len(good) < count:
        images = np.memmap(pixels, dtype=np.uint8, mode="r+", shape=(count, image_bytes))
        for start in range(0, len(good), _CHUNK):
            chosen = good[start : start + _CHUNK]
            images[start : start + len(chosen)] = images[chosen]
        del images
    os.truncate(pixels, len(good) * image_bytes)


class _Index(BaseModel):
    size: tuple[int, int] | None
    unreadable: list[tuple[str, str]]
    notes: list[str]
    checksums: list[int]


def _open_decoded(folder: Path, source: ImageSource, size: tuple[int, int] | None) -> DecodedDataset | None:
    """The decoded dataset in `folder`, or None where there is none, or a damaged one."""
    try:
        index = check_schema(_Index, read_json(folder / "index.json"), origin=str(folder))
        hashes: dict[str, Any] = read_arrays(folder / "index.npz")
        good = hashes.pop("good")
        kinds = [(good, np.int64), (hashes["digests"], np.uint64), (hashes["perceptual"], np.uint64)]
        if any(array.dtype != kind or array.shape != (len(good),) for array, kind in kinds):
            raise ValueError(f"{folder} is damaged")
        if index.size != size or (np.diff(good, prepend=-1) < 1).any() or (good >= len(source)).any():
            raise ValueError(f"{folder} is damaged")
        images = None if size is None else _open_images(folder / "images.u8", (len(good), *size, 3), index.checksums)
        readable = source.subset(good)
        origin: dict[str, Any] = {"name": source.name, "split": source.split, "class_names": source.class_names}
        found: dict[str, Any] = {"labels": readable.labels, "ids": tuple(readable.ids), "source": readable}
        unreadable, notes = tuple(index.unreadable), (*source.notes, *index.notes)
        return DecodedDataset(**origin, **found, **hashes, images=images, unreadable=unreadable, notes=notes)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open_images(path: Path, shape: tuple[int, ...], checksums: list[int]) -> np.ndarray:
    blocks = range(0, len(checksums), max(1, len(checksums) // _CHECKED_BLOCKS))
    right_size = path.stat().st_size == math.prod(shape) and len(checksums) == -(-math.prod(shape) // _BLOCK)
    if not right_size or _checksums(path, blocks) != [checksums[block] for block in blocks]:
        raise ValueError(f"{path} is damaged")
    if not shape[0]:
        return np.zeros(shape, dtype=np.uint8)  # no file can be mapped
    # copy-on-write: torch takes the memory as it is, and the file can't be changed through it
    return np.memmap(path, dtype=np.uint8, mode="c", shape=shape)


def _checksums(path: Path, blocks: range) -> list[int]:
    with open_regular(path) as file:
        return [zlib.crc32(os.pread(file.fileno(), _BLOCK, block * _BLOCK)) for block in blocks]
