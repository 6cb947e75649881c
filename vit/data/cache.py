"""Decode once: the images of a dataset become uint8 pixels on disk, memory-mapped, with checksums.

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
import zlib
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

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
# bytes for each checksum
_BLOCK = 1 << 24
# 2 GiB; a larger file is checked in a sample of its blocks
_CHECKED_BLOCKS = 128
# images that a process decodes at a time
_CHUNK = 256
# images below which starting processes costs more than it saves
_FEW = 1000

# facts of images: two hashes, width and height, uint64 [4, n]
_Facts = np.ndarray


@dataclass(frozen=True, eq=False)
class Contents:
    """Files and preprocessing of the images of a dataset, whatever the images are called.

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
        digest = digest_of.get(stats[index].tobytes())
        return reader.digest(index) if digest is None else digest

    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(read, range(count)))
    return Contents(np.array(digests, np.uint64), stats)


@dataclass(frozen=True)
class _Place:
    """Where the decoded images of a dataset lie.

    Attributes:
        folder: The folder.
        kind: End of the names of all folders with the same size and preprocessing.
        preprocess: How its images were made.
        size: Height and width of the images; None: there are hashes alone.
    """

    folder: Path
    kind: str
    preprocess: Preprocess
    size: tuple[int, int] | None

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.lock")

    def read_index(self) -> dict[str, np.ndarray] | None:
        """Read what is known of the images; None if there are none, or damaged ones."""
        index = self.folder / "index.npz"
        return open_cached(self.folder, lambda: read_arrays(index))

    def open_images(self, index: dict[str, np.ndarray]) -> np.ndarray | None:
        """Map the pixels, uint8 [n, H, W, 3]; None if they are damaged."""
        assert self.size is not None
        path = self.folder / "images.u8"
        shape = (len(index["readable"]), *self.size, 3)
        checksums = index["checksums"]
        # evenly spaced blocks, because reading a large file whole would take minutes
        blocks = range(0, len(checksums), max(1, len(checksums) // _CHECKED_BLOCKS))

        def map_pixels() -> np.ndarray:
            has_right_size = path.stat().st_size == math.prod(shape)
            if not has_right_size or (_compute_checksums(path, blocks) != checksums[blocks]).any():
                raise ValueError(f"{path} is damaged")
            if not shape[0]:
                # an empty file can't be mapped
                return np.zeros(shape, dtype=np.uint8)
            # copy-on-write: torch can use the memory, and the file can't be changed through it
            return np.memmap(path, dtype=np.uint8, mode="c", shape=shape)

        return open_cached(self.folder, map_pixels)


def decode_dataset(
    dataset: ImageDataset,
    *,
    size: tuple[int, int] | None,
    cache_dir: Path | None = None,
    workers: int | None = None,
    max_unreadable_fraction: float = 0.05,
    progress: bool = True,
    preprocess: Preprocess | None = None,
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

    Returns:
        The readable images, with `pixels` (None without a size), `hashes`, `sizes` and `unreadable`.

    Raises:
        ValueError: More images are unreadable than allowed.
        OSError: The cache can't be written, or is full.
    """
    if dataset.pixels is not None:
        return dataset

    place = _find_place(dataset, size, cache_dir, preprocess)
    decoded, contents = _open_decoded(place, dataset)
    if decoded is None:
        place.folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(place.lock) as is_locked:
            # another process may have built it while this one waited
            decoded, contents = _open_decoded(place, dataset, contents)
            if decoded is None:
                # without a lock, another process may build it at the same time, in a place of its
                # own
                mark = "" if is_locked else f".{secrets.token_hex(4)}"
                building = place.folder.with_name(f"{place.folder.name}{mark}.building")
                try:
                    _build(dataset, contents, place, building, workers=workers, progress=progress)
                    # the outdated one, or a damaged one
                    shutil.rmtree(place.folder, ignore_errors=True)
                    rename_durably(building, place.folder)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
                _remove_orphans(place.folder.parent)
                decoded, _ = _open_decoded(place, dataset, contents)

    assert decoded is not None
    check_unreadable(decoded.unreadable, len(dataset), max_unreadable_fraction)
    return decoded


def _find_place(
    dataset: ImageDataset,
    size: tuple[int, int] | None,
    cache_dir: Path | None,
    preprocess: Preprocess | None,
) -> _Place:
    """Find the folder of decoded images. See `decode_dataset`."""
    given = preprocess or Preprocess(size or (1, 1))
    # hashes don't depend on how images are resized
    stored = Preprocess((1, 1), value_range=given.value_range)
    if size is not None:
        stored = replace(given, image_size=size, crop_pct=1.0)
    kind = "hashes" if size is None else f"{size[0]}x{size[1]}"
    kind += f"-{_shorten(f'{_FORMAT} {size} {stored.storage}')}"
    name = "-".join(filter(None, (dataset.name, dataset.split, _shorten(dataset.reader.place))))
    return _Place((cache_dir or default_cache_dir()) / f"{name}-{kind}", kind, stored, size)


def _shorten(text: str) -> str:
    """Return a hash of a text, for the name of a folder; empty for an empty text."""
    if not text:
        return ""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def _build(
    dataset: ImageDataset,
    contents: Contents,
    place: _Place,
    building: Path,
    *,
    workers: int | None,
    progress: bool,
) -> None:
    """Write the images into the folder `building`: those that are in a folder of the same kind are
    copied, and the others are decoded. The caller removes it."""
    # a process that was killed may have left it
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    count = len(dataset)
    # every image has its place in the file, so that processes write side by side
    pixels = building / "images.u8"
    image_bytes = 0 if place.size is None else 3 * math.prod(place.size)
    with pixels.open("wb") as file:
        # reserved now: writing through a memory map to a full disk would kill the process
        _reserve(file, image_bytes * count)

    facts = np.zeros((4, count), dtype=np.uint64)
    is_copied = np.zeros(count, dtype=bool)
    for other in sorted(place.folder.parent.glob(f"*-{place.kind}")):
        _copy_known(replace(place, folder=other), contents, pixels, facts, is_copied)
    missing = np.flatnonzero(~is_copied)
    failures: dict[int, str] = {}
    if len(missing):
        file_of_pixels = None if place.size is None else pixels
        facts[:, missing], failures = _decode_images(
            dataset, missing, file_of_pixels, place.preprocess, workers=workers, progress=progress
        )

    # unreadable images have no place in the file, only in the index
    readable = np.delete(np.arange(count), list(failures))
    if image_bytes and len(readable):
        images = np.memmap(pixels, dtype=np.uint8, mode="r+").reshape(-1, image_bytes)
        # the places ascend, so no image is written over one that is still needed
        for row, index in enumerate(readable):
            if row != index:
                images[row] = images[index]
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
        "digests": contents.digests,
        "stats": contents.stats,
        "place": np.array(dataset.reader.place),
    }
    write_arrays(building / "index.npz", arrays)


def _copy_known(
    other: _Place, contents: Contents, pixels: Path, facts: _Facts, is_copied: np.ndarray
) -> None:
    """Copy the images that another folder has, and their facts. Damaged folders have none."""
    index = other.read_index()
    if index is None or is_copied.all():
        return
    digests = index["digests"][index["readable"]].tolist()
    row_of = {digest: row for row, digest in enumerate(digests)}
    rows = np.array([row_of.get(digest, -1) for digest in contents.digests.tolist()])
    chosen = np.flatnonzero((rows >= 0) & ~is_copied)
    if not len(chosen):
        return
    if other.size is not None:
        stored = other.open_images(index)
        if stored is None:
            return
        images = np.memmap(pixels, np.uint8, mode="r+", shape=(len(rows), *other.size, 3))
        for target in chosen.tolist():
            images[target] = stored[rows[target]]
    facts[:2, chosen] = index["hashes"][:, rows[chosen]]
    facts[2:, chosen] = index["sizes"][:, rows[chosen]]
    is_copied[chosen] = True


def _remove_orphans(cache_dir: Path) -> None:
    """Remove the decoded images of folders that are gone."""
    for index in sorted(cache_dir.glob("*/index.npz")):
        arrays = open_cached(index.parent, partial(read_arrays, index))
        place = "" if arrays is None else str(arrays.get("place", ""))
        if place and not os.path.lexists(place):
            shutil.rmtree(index.parent, ignore_errors=True)


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
    indices: np.ndarray,
    pixels: Path | None,
    preprocess: Preprocess,
    *,
    workers: int | None,
    progress: bool,
) -> tuple[_Facts, dict[int, str]]:
    """Write the pixels of the images at `indices` into their places of a file, unless it is None,
    and hash them.

    Returns:
        Facts of the images, and index of an image → why it can't be read.
    """
    # takes long to import; it starts new processes (a fork is unsafe with threads) that import no
    # __main__
    from joblib import Parallel, delayed  # type: ignore[import-untyped]

    is_alone = workers in (0, 1) or len(indices) < _FEW or dataset.reader.in_process
    pool = Parallel(
        n_jobs=1 if is_alone else workers or -1, return_as="generator_unordered", max_nbytes=None
    )
    # a generator, because the parts of millions of images would take much memory
    tasks = (
        delayed(_decode_chunk)(
            dataset.subset(indices[start : start + _CHUNK]),
            range(start, min(start + _CHUNK, len(indices))),
            indices[start : start + _CHUNK],
            total=len(dataset),
            pixels=pixels,
            preprocess=preprocess,
        )
        for start in range(0, len(indices), _CHUNK)
    )
    facts = np.zeros((4, len(indices)), dtype=np.uint64)
    failures: dict[int, str] = {}
    title = f"decoding {dataset.name} {dataset.split}"
    with show_progress(title, len(indices), shown=progress) as advance:
        try:
            for rows, chunk_facts, chunk_failures in pool(tasks):
                facts[:, rows] = chunk_facts
                failures |= chunk_failures
                advance(len(rows))
        except BrokenProcessPool as error:
            raise OSError(
                "a data-loading worker has ended (out of memory? try fewer data.workers; a script"
                " that starts workers calls vit under if __name__ == '__main__':)"
            ) from error
    return facts, failures


def _decode_chunk(
    dataset: ImageDataset,
    rows: range,
    places: np.ndarray,
    *,
    total: int,
    pixels: Path | None,
    preprocess: Preprocess,
) -> tuple[range, _Facts, dict[int, str]]:
    """Decode a chunk, and write its pixels into these places of the file of `total` images.

    Returns:
        `rows` as they are, and what `_decode_images` returns.
    """
    if pixels is not None:
        shape = (total, *preprocess.image_size, 3)
        images = np.memmap(pixels, dtype=np.uint8, mode="r+", shape=shape)

    facts = np.zeros((4, len(dataset)), dtype=np.uint64)
    failures: dict[int, str] = {}
    for index, place in enumerate(places.tolist()):
        try:
            image = preprocess.to_rgb(dataset.image(index))
            facts[:, index] = hash_pixels(image), compute_dhash(image), *image.size
            if pixels is not None:
                images[place] = preprocess.to_uint8(image)
        except (ValueError, OSError) as error:
            failures[place] = str(error)
    return rows, facts, failures


def _open_decoded(
    place: _Place, dataset: ImageDataset, contents: Contents | None = None
) -> tuple[ImageDataset | None, Contents]:
    """Open the decoded images in a folder.

    Args:
        place: The folder.
        dataset: The images.
        contents: Their known contents.

    Returns:
        The dataset with its pixels, None if there are none, other or damaged ones; and the contents
        of the images.
    """
    index = place.read_index()
    if index is not None and contents is None:
        contents = Contents(index["digests"], index["stats"])
    contents = read_contents(dataset.reader, contents)
    if index is None or not np.array_equal(contents.digests, index["digests"]):
        return None, contents
    if (contents.stats != index["stats"]).any():
        # so that files that only look new aren't read the next time
        write_arrays(place.folder / "index.npz", {**index, "stats": contents.stats})
    images = None if place.size is None else place.open_images(index)
    if images is None and place.size is not None:
        return None, contents
    decoded = replace(
        dataset.subset(index["readable"]),
        pixels=images,
        hashes=index["hashes"],
        sizes=index["sizes"],
        unreadable=[(name, reason) for name, reason in index["unreadable"].tolist()],
    )
    return decoded, contents


def _compute_checksums(path: Path, blocks: range) -> np.ndarray:
    """Compute the CRC-32 of blocks of a file, uint32."""
    with path.open("rb") as file:
        checksums = []
        for block in blocks:
            file.seek(block * _BLOCK)
            checksums.append(zlib.crc32(file.read(_BLOCK)))
        return np.array(checksums, dtype=np.uint32)
