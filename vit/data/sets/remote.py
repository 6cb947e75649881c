"""Files in object storage, read by byte range through fsspec; what was read is kept on disk, up to a size.

Only the addresses of `SCHEMES` are read, each handed to its file system as it stands: a chain of addresses
("simplecache::…") is never taken apart, and no other protocol of fsspec (local files, archives, ssh) is reached.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import numpy as np
from PIL import Image

from vit.data.images import open_image
from vit.data.sets.source import StoredReader
from vit.runtime.arguments import first_line, shorten

# scheme → the package that reads it
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "https": "aiohttp", "http": "aiohttp"}
_BLOCK = 2**20  # bytes that are read at once where a quarter of them is wanted
_AT_ONCE = 32  # requests of a process
_TRIES, _FIRST_WAIT = 5, 0.5  # seconds, doubled before each further try
_SILENCE = 30.0  # seconds without a byte after which a request has failed
_VERSIONS = ("ETag", "etag", "sha256", "blob_id", "md5Hash", "LastModified", "Last-Modified")
Value = TypeVar("Value")
Result = TypeVar("Result")


class RemoteError(OSError):
    """What can't be read now; the message names its address."""


class MissingError(RemoteError):
    """A file is not there, or not for us."""


class RemoteFile(NamedTuple):
    """A file as it was found: `version` is the store's checksum or date, where it gives one."""

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        return self.url.partition("?")[0].rpartition("/")[2]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return self.url

    def read(self, start: int, end: int) -> bytes:
        """Raises RemoteError, as all that reads."""
        content: bytes = _ask(self.url, lambda fs: fs.cat_file(self.url, start=start, end=end))
        if len(content) != end - start:
            raise RemoteError(f"{shorten(self.url)} has changed meanwhile, or its server gives no byte ranges")
        return content

    def open(self) -> BinaryIO:
        """To be read here and there, 32 KiB at a time."""
        from fsspec.spec import AbstractBufferedFile

        file = AbstractBufferedFile(None, self.url, block_size=2**15, size=self.size)
        file.cache.fetcher = self.read
        return cast(BinaryIO, file)


def is_remote(path: object) -> bool:
    """Whether this is an address, of a scheme that is read or another."""
    return re.match(r"\w[\w+.-]*://", str(path)) is not None


def find_files(pattern: str) -> list[RemoteFile]:
    """The files of an address, in which a * stands for more than one."""
    found = _ask(pattern, lambda fs: [*map(fs.unstrip_protocol, fs.glob(pattern))]) if "*" in pattern else [pattern]
    return at_once(_find, sorted(found))


def _find(url: str) -> RemoteFile:
    info = _ask(url, lambda fs: fs.info(url))
    info = {**(info.get("lfs") or {}), **info}  # of hf://
    if info.get("size") is None:
        raise RemoteError(f"{shorten(url)} can't be read in parts: its server doesn't tell its length")
    return RemoteFile(url, info["size"], next((str(info[name]) for name in _VERSIONS if info.get(name)), ""))


def read_text(url: str) -> str | None:
    """A small UTF-8 file; None where it is missing."""
    try:
        return "".join(file.read(0, min(file.size, 2**24)).decode() for file in find_files(url))
    except MissingError:
        return None


def at_once(function: Callable[[Value], Result], values: Iterable[Value]) -> list[Result]:
    """The function of each value, of many at a time."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(function, values))


@dataclass(frozen=True, eq=False)
class RemoteReader(StoredReader):
    """Images inside tar files of object storage, kept in a folder of at most so many bytes."""

    folder: Path
    most_bytes: float
    shards: Sequence[RemoteFile]
    names: Sequence[str]
    places: np.ndarray  # int64 [n, 3]: shard, offset, size in bytes
    blocks: np.ndarray | None = None  # what `whole_blocks` is, where these are a part of other images

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        pieces, content = self._cover(index), b""
        self.fetch([index])
        for shard, start, end in pieces:
            piece, path = b"", self._path(shard, start, end)
            with suppress(FileNotFoundError):  # deleted to make room
                piece = path.read_bytes()
                os.utime(path)
            content += piece if len(piece) == end - start else self.shards[shard].read(start, end)
        skipped, size = int(self.places[index, 1]) - pieces[0][1], int(self.places[index, 2])
        return open_image(io.BytesIO(content[skipped : skipped + size]), name=self.names[index])

    def fetch(self, indices: Iterable[int]) -> None:
        """Bring what isn't in the folder yet there, many pieces at a time."""
        pieces = dict.fromkeys(piece for index in indices for piece in self._cover(index))
        if missing := [piece for piece in pieces if not self._path(*piece).is_file()]:
            added = sum(at_once(lambda piece: self._save(*piece), missing))
            if secrets.randbelow(int(self.most_bytes / 20) + 1) < added:  # of all processes about each such part
                self._shrink()

    @property
    def remote_shards(self) -> np.ndarray:
        return self.places[:, 0]

    def sizes(self) -> np.ndarray:
        return self.places[:, 2]

    def cache_key(self) -> bytes:
        return repr([shard[1:] for shard in self.shards]).encode() + self.places.tobytes()

    def subset(self, indices: np.ndarray) -> RemoteReader:
        places = self.places[indices]
        used, places[:, 0] = np.unique(places[:, 0], return_inverse=True)
        shards, names = [self.shards[shard] for shard in used], [self.names[index] for index in indices]
        return replace(self, shards=shards, names=names, places=places, blocks=None)

    def take(self, indices: np.ndarray) -> RemoteReader:
        return replace(self.subset(indices), blocks=self.whole_blocks[indices])

    @cached_property
    def whole_blocks(self) -> np.ndarray:
        """bool [n, 2]: whether the blocks of an image's first and last byte are read as a whole, since a quarter of
        them are images of ours, counted where each begins."""
        if self.blocks is not None:
            return self.blocks
        shards, offsets, sizes = self.places.T
        ends = np.stack([offsets, offsets + np.maximum(sizes, 1) - 1]) // _BLOCK + (shards << 32)  # [2, n]
        found, inverse = np.unique(ends, return_inverse=True)
        inverse = inverse.reshape(ends.shape)
        weights = np.bincount(inverse[0], weights=sizes, minlength=len(found))
        whole: np.ndarray = (weights >= _BLOCK / 4)[inverse].T
        return whole

    def _cover(self, index: int) -> list[tuple[int, int, int]]:
        """(shard, start, end) of the image's bytes: of blocks that aren't read as a whole the part that is needed."""
        shard, offset, size = self.places[index].tolist()
        first, last = offset // _BLOCK, (offset + max(size, 1) - 1) // _BLOCK
        pieces = []
        for block in range(first, last + 1):
            start, end = block * _BLOCK, min((block + 1) * _BLOCK, self.shards[shard].size)
            if not self.whole_blocks[index, int(block > first)]:
                start, end = max(start, offset), min(end, offset + size)
            pieces.append((shard, start, end))
        return pieces

    def _path(self, shard: int, start: int, end: int) -> Path:
        return self.folder / self.shards[shard].digest / f"{start}-{end}"

    def _save(self, shard: int, start: int, end: int) -> int:
        path, content = self._path(shard, start, end), self.shards[shard].read(start, end)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.write_bytes(content)
        with suppress(FileNotFoundError):  # deleted to make room
            temporary.replace(path)
        return len(content)

    def _shrink(self) -> None:
        """Of more than is allowed, or than leaves as much space free, delete what was used longest ago."""
        with suppress(FileNotFoundError):  # another process does it
            stats = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in self.folder.glob("*/*-*")]
            total = sum(size for _, size, _ in stats)
            most = min(self.most_bytes, (total + shutil.disk_usage(self.folder).free) / 2)
            for _, size, path in sorted(stats):
                if total <= 0.8 * most:
                    break
                path.unlink()
                total -= size


def _ask(url: str, ask: Callable[[Any], Any]) -> Any:
    """What a file system answers, asked again where its server fails."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise ValueError(f"{shorten(url)} is not read; known: {', '.join(f'{name}://' for name in SCHEMES)}")
    tries, number = _TRIES if scheme.startswith("http") else 1, 0  # the stores' clients try again by themselves
    while True:
        number += 1
        try:
            return ask(_open_filesystem(scheme))
        except ImportError as error:
            cure = "pip install 'vit-pipeline[remote]'"
            raise ValueError(f"{shorten(url)} is read by {SCHEMES[scheme]}, which is not installed: {cure}") from error
        except Exception as error:  # each client has errors of its own; fsspec's of http calls any a missing file
            failure = (tries > 1 and error.__cause__) or error
            known = (FileNotFoundError, 404), (PermissionError, 403), (Exception, 500)
            status = getattr(failure, "status", next(code for kind, code in known if isinstance(failure, kind)))
            if number < tries and (status >= 500 or status in (408, 429)):
                time.sleep(_FIRST_WAIT * 2 ** (number - 1))
                continue
            reason = f"nothing came for {_SILENCE:g} s" if isinstance(failure, TimeoutError) else first_line(failure)
            reason = "it is not there" if status == 404 else shorten(reason)
            after = f" (tried {number} times)" if number > 1 else ""
            what = MissingError if status in (403, 404) else RemoteError
            raise what(f"{shorten(url)} can't be read: {reason}{after}") from error


def _open_filesystem(scheme: str) -> Any:
    import fsspec

    options: dict[str, Any] = {}
    if scheme.startswith("http"):
        from aiohttp import ClientTimeout

        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_read=_SILENCE)}
    return fsspec.filesystem(scheme, **options)  # one for each process: connections don't survive a fork
