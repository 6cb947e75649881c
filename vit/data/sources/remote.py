"""Files on this disk or in object storage, read by byte range; the latter through fsspec.

Only addresses of `SCHEMES` are read, each by its own file system. fsspec's chains of addresses
("simplecache::…") and its other protocols (local files, archives, ssh) are never used.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vit.runtime.arguments import HIDDEN, first_line, hide_tokens, shorten
from vit.runtime.drive import wait_for_drive
from vit.runtime.files import open_regular

SCHEMES = ("s3", "hf", "https", "http")
# requests of a process at the same time
_MAX_REQUESTS = 32
_MAX_TRIES = 5
# seconds, doubled before each further try
_FIRST_WAIT = 0.5
# seconds without a byte after which a request has failed
_SILENCE = 30.0
# bytes that a stream reads ahead: the headers of a tar file lie between its images
_BLOCK_BYTES = 2**15

# facts by which a store tells versions of a file apart, the best first
_VERSIONS = ("ETag", "blob_id", "Last-Modified")

_CHANGED = "has changed since its images were listed; start again"

Value = TypeVar("Value")
Result = TypeVar("Result")


class RemoteError(OSError):
    """A file can't be read now; the message names its address."""


class MissingError(RemoteError):
    """There is no such file in a store that answers, or it may not be read."""


class StoredFile(NamedTuple):
    """A file as it was found, on this disk or in object storage."""

    # path or address
    path: str
    # bytes
    size: int
    # checksum or date that the store gives; empty if it gives none
    version: str

    @property
    def name(self) -> str:
        return self.path.partition("?")[0].rpartition("/")[2]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:16]

    def read(self, start: int, end: int) -> bytes:
        """Read the bytes from `start` up to `end`. Raises RemoteError or DriveError."""
        if not is_remote(self.path):
            return wait_for_drive(lambda: self._read_local(start, end), self.path)

        content: bytes = request(
            self.path, lambda filesystem: _read_range(filesystem, self, start, end)
        )
        if len(content) != end - start:
            raise RemoteError(f"{_show(self.path)} {_CHANGED}")
        return content

    def _read_local(self, start: int, end: int) -> bytes:
        with open_regular(Path(self.path)) as file:
            file.seek(start)
            return bytes(file.read(end - start))

    def open(self) -> Any:
        """Open the file as a stream that can be read in parts. Reading raises RemoteError."""
        if not is_remote(self.path):
            return open_regular(Path(self.path))

        from fsspec.spec import AbstractBufferedFile

        read = self.read

        # unlike the streams of fsspec's file systems, this one tries again
        class Stream(AbstractBufferedFile):  # type: ignore[misc]
            def _fetch_range(self, start: int, end: int) -> bytes:
                return read(start, end)

        return Stream(None, self.path, block_size=_BLOCK_BYTES, size=self.size)


def is_remote(path: object) -> bool:
    """Return true for an address, of any scheme."""
    return re.match(r"\w[\w+.-]*://", str(path)) is not None


def match_files(pattern: str) -> list[str]:
    """List the paths or addresses of a pattern, sorted. Raises RemoteError."""
    if not is_remote(pattern):
        return sorted(path.replace(os.sep, "/") for path in glob.glob(pattern))
    if "*" not in pattern:
        return [pattern]

    def list_urls(filesystem: Any) -> list[str]:
        return [filesystem.unstrip_protocol(path) for path in filesystem.glob(pattern)]

    return sorted(request(pattern, list_urls))


def find_file(path: str) -> StoredFile:
    """Find a file at a path or an address. Raises RemoteError."""
    if not is_remote(path):
        stat = os.stat(path)
        version = f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        return StoredFile(path, stat.st_size, version)

    info = request(path, lambda filesystem: filesystem.info(path))
    if info.get("size") is None:
        text = "can't be read in parts: its server doesn't say how long it is; copy it to this disk"
        raise RemoteError(f"{_show(path)} {text}")
    return StoredFile(path, info["size"], _find_version(info))


def list_addresses(address: str) -> list[str]:
    """List the files below an address, sorted. Raises RemoteError."""

    def find(filesystem: Any) -> list[str]:
        return [filesystem.unstrip_protocol(path) for path in filesystem.find(address)]

    return sorted(request(address, find))


def read_address(address: str) -> bytes:
    """Read a whole file. Raises RemoteError, MissingError for that file alone."""
    content: bytes = request(address, lambda filesystem: filesystem.cat_file(address))
    return content


def _find_version(facts: Mapping[str, Any]) -> str:
    return next((str(facts[name]) for name in _VERSIONS if facts.get(name)), "")


def map_parallel(function: Callable[[Value], Result], values: Iterable[Value]) -> list[Result]:
    """Apply a function to values, many at a time, in threads."""
    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        return list(pool.map(function, values))


def request(url: str, ask: Callable[[Any], Result]) -> Result:
    """Ask a file system, and ask again if its server fails.

    Args:
        url: Address; its scheme chooses the file system.
        ask: Function that is called with the file system.

    Raises:
        ValueError: The scheme is not supported, or its package isn't installed.
        RemoteError: There is no such file, or it can't be read now.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{_show(url)} is not read; known: {known}")
    if HIDDEN in url:
        text = "was saved without its token; name the whole address, with data.root or --data"
        raise ValueError(f"{_show(url)} {text}")

    is_http = scheme.startswith("http")
    num_tries = 0
    while True:
        num_tries += 1
        try:
            return ask(_open_filesystem(scheme))
        except ImportError as error:
            hint = "pip install '.[remote]' in the clone of vit"
            raise ValueError(f"{_show(url)} can't be read: {error}; {hint}") from error
        except RemoteError:
            raise
        except Exception as error:
            # Each client has its own types of errors. fsspec reports any failure of http as a
            # missing file; the cause is more exact.
            failure = (is_http and error.__cause__) or error
            status = getattr(failure, "status", 500)
            is_missing = isinstance(failure, FileNotFoundError) or status == 404

            # the clients of the stores try again by themselves
            is_temporary = is_http and (status >= 500 or status in (408, 429))
            if is_temporary and not is_missing and num_tries < _MAX_TRIES:
                time.sleep(_FIRST_WAIT * 2 ** (num_tries - 1))
                continue

            reason = shorten(hide_tokens(first_line(failure)))
            if is_missing:
                reason = "it is not there"
            # without the cause: its text has the whole address
            is_refused = isinstance(failure, PermissionError) or status in (401, 403)
            kind = MissingError if is_missing or is_refused else RemoteError
            raise kind(f"{_show(url)} can't be read: {reason}") from None


def _show(url: str) -> str:
    """An address for a message."""
    return shorten(hide_tokens(url))


def _read_range(filesystem: Any, file: StoredFile, start: int, end: int) -> Any:
    """Read the bytes from `start` up to `end` of the version that was found. Raises RemoteError if
    the store has another version."""
    if file.path.startswith("http"):
        return filesystem.read_range(file, start, end)
    if file.path.startswith("hf:"):
        return filesystem.cat_file(_pin_commit(file, os.getpid()), start=start, end=end)

    from s3fs.utils import FileExpired  # type: ignore[import-untyped]  # an extra

    opened = _open_s3(file.path, os.getpid())
    if file.version != str(opened.details.get("ETag", "")):
        raise RemoteError(f"{_show(file.path)} {_CHANGED}")
    try:
        # with the header If-Match
        return opened._fetch_range(start, end)
    except FileExpired:
        raise RemoteError(f"{_show(file.path)} {_CHANGED}") from None


@lru_cache(maxsize=1024)
def _pin_commit(file: StoredFile, process: int) -> str:
    """Return the address of a file of the Hub at a commit, where it never changes. Raises
    RemoteError if the file there isn't the one that was found."""
    filesystem = _open_filesystem("hf")
    place = filesystem.resolve_path(file.path)
    # a bucket of the Hub has no commits
    if not hasattr(place, "repo_id"):
        return file.path
    commit = _find_commit(place.repo_type, place.repo_id, place.revision, process)
    pinned = type(place)(place.repo_type, place.repo_id, commit, place.path_in_repo).unresolve()
    info = filesystem.info(pinned)
    if (info["size"], _find_version(info)) != (file.size, file.version):
        raise RemoteError(f"{_show(file.path)} {_CHANGED}")
    return str(pinned)


@lru_cache
def _find_commit(repo_type: str, repo_id: str, revision: str, process: int) -> str:
    """Find the newest commit of a repository of the Hub, once a process."""
    from huggingface_hub import HfApi

    filesystem = _open_filesystem("hf")
    hub = HfApi(endpoint=filesystem.endpoint, token=filesystem.token)
    return str(hub.repo_info(repo_id, repo_type=repo_type, revision=revision).sha)


@lru_cache(maxsize=1024)
def _open_s3(path: str, process: int) -> Any:
    """Open a file of S3 once a process, because opening asks for its version."""
    return _open_filesystem("s3").open(path, cache_type="none")


@cache
def _define_http_filesystem() -> Any:
    """Extend fsspec's file system for http by a read of a range of one version."""
    from fsspec.asyn import sync_wrapper
    from fsspec.implementations.http import HTTPFileSystem

    class RangeFileSystem(HTTPFileSystem):  # type: ignore[misc]
        async def _read_range(self, file: StoredFile, start: int, end: int) -> bytes:
            # a range of compressed bytes would be another part of the file
            headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            session = await self.set_session()
            async with session.get(self.encode_url(file.path), headers=headers) as response:
                self._raise_not_found_for_status(response, file.path)
                # checked before the body, which may be the whole file, is in memory
                encoding = response.headers.get("Content-Encoding", "identity")
                if response.status != 206 or encoding != "identity":
                    text = "can't be read in parts: its server gives no byte ranges, or compresses"
                    raise RemoteError(f"{_show(file.path)} {text}")
                version = _find_version(response.headers) or file.version
                if version != file.version or response.content_length != end - start:
                    raise RemoteError(f"{_show(file.path)} {_CHANGED}")
                content: bytes = await response.read()
                return content

        read_range = sync_wrapper(_read_range)

    return RangeFileSystem


def _open_filesystem(scheme: str) -> Any:
    """Return the file system of this process; fsspec keeps it. Connections don't survive a fork."""
    if not scheme.startswith("http"):
        # takes a quarter of a second to import
        import fsspec

        return fsspec.filesystem(scheme)

    # from the extra "remote"
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_read=_SILENCE)
    return _define_http_filesystem()(client_kwargs={"timeout": timeout})
