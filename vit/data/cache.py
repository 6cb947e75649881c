"""Decode once: the images of a dataset become uint8 pixels on disk, memory-mapped.

A split of a source has one folder for each size and preprocessing. Its images are known by their
bytes: labels, classes, file names and permissions may change, and an image that is in any folder of
this kind is copied instead of decoded. A changed folder is built anew under a lock, beside its
place, and takes the place of the old one when it is complete.
"""

import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.duplicates import compute_dhash, hash_pixels
from vit.data.preprocess import Preprocess
from vit.data.sources.base import ImageReader
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
_FORMAT = 6
# images that a process decodes at a time
_CHUNK = 256
# images below which starting processes costs more than it saves
_FEW = 1000

# Name of a fact → its values for the images of a folder.
_Index = dict[str, np.ndarray]
# index of an image → why it can't be read
_Failures = dict[int, str]


@dataclass(frozen=True, eq=False)
class Contents:
    """Files of the images of a dataset, whatever the images are called.

    Attributes:
        digests: Hash of the bytes of each image, uint64 [n].
        stats: Facts by which a file that is unchanged is known without reading it, int64 [n, 4];
            zeros for images that aren't files.
    """

    digests: np.ndarray
    stats: np.ndarray


def read_contents(reader: ImageReader, known: Contents | None = None) -> Contents:
    """Read the hash of each image's bytes.

    Args:
        reader: The images.
        known: Contents that were read before; a file with the same facts isn't read again.
    """
    stats = reader.stats()
    count = len(reader)
    if stats is None:
        digests = [reader.digest(index) for index in range(count)]
        return Contents(np.array(digests, np.uint64), np.zeros((count, 4), np.int64))
    digest_of: dict[bytes, int] = {}
    if known is not None:
        keys = (row.tobytes() for row in known.stats)
        digest_of = dict(zip(keys, known.digests.tolist(), strict=True))

    def read(index: int) -> int:
        return digest_of.get(stats[index].tobytes()) or reader.digest(index)

    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(read, range(count)))
    return Contents(np.array(digests, np.uint64), stats)


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
        The readable images, with `pixels`, `hashes`, `sizes` and `unreadable`.

    Raises:
        ValueError: More images are unreadable than allowed.
        OSError: The cache can't be written, or is full.
    """
    if dataset.pixels is not None:
        return dataset
    stored = replace(preprocess or Preprocess(size), image_size=size, crop_pct=1.0)
    kind = f"{size[0]}x{size[1]}-{_shorten(f'{_FORMAT} {size} {stored.storage}')}"
    names = (dataset.name, dataset.split, _shorten(dataset.reader.place), kind)
    folder = (cache_dir or default_cache_dir()) / "-".join(filter(None, names))
    folder.parent.mkdir(parents=True, exist_ok=True)

    decode = partial(_decode_images, dataset, preprocess=stored, workers=workers, progress=progress)
    # who waits for the lock finds what another process has built meanwhile
    with lock_file(folder.with_name(f"{folder.name}.lock")) as is_locked:
        index = _open_folder(folder, size)
        known = None
        if index is not None:
            known = Contents(index["digests"], index["stats"])
        contents = read_contents(dataset.reader, known)
        if known is None or not np.array_equal(contents.digests, known.digests):
            # without a lock, another process may build it at the same time, in a place of its own
            mark = "" if is_locked else f".{secrets.token_hex(4)}"
            building = folder.with_name(f"{folder.name}{mark}.building")
            _build(
                dataset,
                contents,
                folder=folder,
                building=building,
                kind=kind,
                size=size,
                decode=decode,
            )
            index = _open_folder(folder, size)
        elif index is not None and (contents.stats != known.stats).any():
            # so that files that only look new aren't read the next time
            arrays = {**index, "stats": contents.stats}
            del arrays["pixels"]
            write_arrays(folder / "index.npz", arrays)

    assert index is not None
    unreadable = [(name, reason) for name, reason in index["unreadable"].tolist()]
    check_unreadable(unreadable, len(dataset), max_unreadable_fraction)
    return replace(
        dataset.subset(index["readable"]),
        pixels=index["pixels"],
        hashes=index["hashes"],
        sizes=index["sizes"],
        unreadable=unreadable,
    )


def _shorten(text: str) -> str:
    """Return a hash of a text, for the name of a folder; empty for an empty text."""
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    return digest[:12] if text else ""


def _open_folder(folder: Path, size: tuple[int, int]) -> _Index | None:
    """Read what is known of the images in a folder, and map their "pixels", uint8 [n, H, W, 3]; None if
    there are none, or damaged ones."""

    def read() -> _Index:
        index = read_arrays(folder / "index.npz")
        path = folder / "images.u8"
        shape = (len(index["readable"]), *size, 3)
        if path.stat().st_size != math.prod(shape):
            raise ValueError(f"{path} is damaged")
        # an empty file can't be mapped
        index["pixels"] = np.zeros(shape, dtype=np.uint8)
        if shape[0]:
            # copy-on-write: torch can use the memory, and the file can't be changed through it
            index["pixels"] = np.memmap(path, dtype=np.uint8, mode="c", shape=shape)
        return index

    return open_cached(folder, read)


def _build(
    dataset: ImageDataset,
    contents: Contents,
    *,
    folder: Path,
    building: Path,
    kind: str,
    size: tuple[int, int],
    decode: Callable[..., _Failures],
) -> None:
    """Build a folder at the place `building`, and remove the folders of images that are gone: see
    `decode_dataset`."""
    # a process that was killed may have left it
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        # every image has its place in the file, so that processes write side by side
        shape = (len(dataset), *size, 3)
        path = building / "images.u8"
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                # writing through a memory map to a full disk would kill the process
                os.posix_fallocate(file.fileno(), 0, math.prod(shape))
        # it makes the file as large as it must be
        pixels = np.memmap(path, dtype=np.uint8, mode="r+", shape=shape)
        # two hashes, width and height
        facts = np.zeros((4, len(dataset)), dtype=np.uint64)
        missing = _copy_known(contents, folder.parent.glob(f"*-{kind}"), pixels, facts)
        failures: _Failures = {}
        if len(missing):
            failures = decode(missing, pixels, facts)

        # unreadable images have no place in the file, only in the index
        readable = np.delete(np.arange(len(dataset)), list(failures))
        # the places ascend, so no image is written over one that is still needed
        for row, place in enumerate(readable.tolist()):
            if row != place:
                pixels[row] = pixels[place]
        # Windows cuts no file that is mapped
        del pixels
        os.truncate(path, len(readable) * math.prod(shape[1:]))
        unreadable = [(dataset.ids[place], failures[place]) for place in sorted(failures)]
        index = {
            "readable": readable,
            "hashes": facts[:2, readable],
            "sizes": facts[2:, readable].astype(np.int32),
            "unreadable": np.array(unreadable, dtype=str).reshape(-1, 2),
            "digests": contents.digests,
            "stats": contents.stats,
            "place": np.array(dataset.reader.place),
        }
        write_arrays(building / "index.npz", index)
        _take_place(building, folder, contents, size)
    finally:
        shutil.rmtree(building, ignore_errors=True)

    for other in sorted(folder.parent.glob("*/index.npz")):
        arrays = open_cached(other.parent, partial(read_arrays, other)) or {}
        source = str(arrays.get("place", ""))
        if source and not os.path.lexists(source):
            shutil.rmtree(other.parent, ignore_errors=True)


def _take_place(building: Path, folder: Path, contents: Contents, size: tuple[int, int]) -> None:
    """Move a finished folder to its place, unless another process that had no lock either was
    faster with the same images."""

    def is_current() -> bool:
        index = _open_folder(folder, size) if folder.exists() else None
        return index is not None and np.array_equal(index["digests"], contents.digests)

    if is_current():
        return
    if folder.exists():
        # an outdated one, or a damaged one
        shutil.rmtree(folder, ignore_errors=True)
    try:
        rename_durably(building, folder)
    except OSError:
        if not is_current():
            raise


def _copy_known(
    contents: Contents, folders: Iterable[Path], pixels: np.ndarray, facts: np.ndarray
) -> np.ndarray:
    """Copy the images that other folders have, and what is known of them; return the indices of the
    others."""
    missing = list(range(len(pixels)))
    for folder in sorted(folders):
        index = _open_folder(folder, pixels.shape[1:3])
        if index is None:
            continue
        digests = index["digests"][index["readable"]].tolist()
        row_of = {digest: row for row, digest in enumerate(digests)}
        for place in missing:
            row = row_of.get(int(contents.digests[place]))
            if row is not None:
                pixels[place] = index["pixels"][row]
                facts[:, place] = *index["hashes"][:, row], *index["sizes"][:, row]
        missing = [place for place in missing if int(contents.digests[place]) not in row_of]
    return np.array(missing, dtype=np.int64)


def _decode_images(
    dataset: ImageDataset,
    places: np.ndarray,
    pixels: np.ndarray,
    facts: np.ndarray,
    *,
    preprocess: Preprocess,
    workers: int | None,
    progress: bool,
) -> _Failures:
    """Write the pixels of the images at `places` into a memory map, which other processes open by
    its file, and what is known of them into `facts`. Return the failures."""
    # takes long to import; it starts new processes (a fork is unsafe with threads) that import no
    # __main__
    from joblib import Parallel, delayed  # type: ignore[import-untyped]

    is_alone = workers in (0, 1) or len(places) < _FEW or dataset.reader.in_process
    num_jobs = 1 if is_alone else workers or -1
    pool = Parallel(n_jobs=num_jobs, return_as="generator_unordered", max_nbytes=None)
    # a generator, because the parts of millions of images would take much memory
    tasks = (
        delayed(_decode_chunk)(dataset.subset(chunk), chunk, pixels, preprocess)
        for chunk in np.split(places, range(_CHUNK, len(places), _CHUNK))
    )
    failures: _Failures = {}
    title = f"decoding {dataset.name} {dataset.split}"
    with show_progress(title, len(places), shown=progress) as advance:
        try:
            for chunk, chunk_facts, chunk_failures in pool(tasks):
                facts[:, chunk] = chunk_facts
                failures |= chunk_failures
                advance(len(chunk))
        except BrokenProcessPool as error:
            raise OSError(
                "a data-loading worker has ended (out of memory? try fewer data.workers; a script"
                " that starts workers calls vit under if __name__ == '__main__':)"
            ) from error
    return failures


def _decode_chunk(
    dataset: ImageDataset, places: np.ndarray, pixels: np.ndarray, preprocess: Preprocess
) -> tuple[np.ndarray, np.ndarray, _Failures]:
    """Decode images into these places of a memory map. Return the places, facts of the images
    [4, n], and failures."""
    facts = np.zeros((4, len(places)), dtype=np.uint64)
    failures: _Failures = {}
    for index, place in enumerate(places.tolist()):
        try:
            image = preprocess.to_rgb(dataset.image(index))
            facts[:, index] = hash_pixels(image), compute_dhash(image), *image.size
            pixels[place] = preprocess.to_uint8(image)
        except (ValueError, OSError) as error:
            failures[place] = str(error)
    return places, facts, failures
