"""Files on this disk or in object storage, read by byte range; the latter through fsspec.

Only the addresses of `SCHEMES` are read, each handed to its file system as it stands: a chain of
addresses ("simplecache::…") is never taken apart, and no other protocol of fsspec (local files,
archives, ssh) is reached.
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
from vit.runtime.files import open_regular

SCHEMES = ("s3", "hf", "https", "http")
# of a process at the same time
_MAX_REQUESTS = 32
_MAX_TRIES = 5
# seconds, doubled before each further try
_FIRST_WAIT = 0.5
# seconds without a byte after which a request has failed
_SILENCE = 30.0
# bytes that a stream reads ahead: the headers of a tar file lie between its images
_BLOCK_BYTES = 2**15

# what a store says of the content of a file, best first
_VERSIONS = ("ETag", "blob_id", "Last-Modified")

_CHANGED = "has changed meanwhile: its images are not those that were listed; start again"

Value = TypeVar("Value")
Result = TypeVar("Result")


class RemoteError(OSError):
    """What can't be read now; the message names its address."""


class StoredFile(NamedTuple):
    """A file as it was found, on this disk or in object storage."""

    # or its address
    path: str
    # bytes
    size: int
    # the store's checksum or date, where it gives one
    version: str

    @property
    def name(self) -> str:
        return self.path.partition("?")[0].rpartition("/")[2]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:16]

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`. Raises RemoteError."""
        content: bytes
        if not is_remote(self.path):
            with open_regular(Path(self.path)) as file:
                file.seek(start)
                content = file.read(end - start)
            return content

        content = request(self.path, lambda filesystem: _read_range(filesystem, self, start, end))
        if len(content) != end - start:
            raise RemoteError(f"{_show(self.path)} {_CHANGED}")
        return content

    def open(self) -> Any:
        """The file as a stream, to be read here and there. Reading raises RemoteError."""
        if not is_remote(self.path):
            return open_regular(Path(self.path))

        from fsspec.spec import AbstractBufferedFile

        read = self.read

        # the streams of fsspec's file systems don't try again
        class Stream(AbstractBufferedFile):  # type: ignore[misc]
            def _fetch_range(self, start: int, end: int) -> bytes:
                return read(start, end)

        return Stream(None, self.path, block_size=_BLOCK_BYTES, size=self.size)


def is_remote(path: object) -> bool:
    """Whether this is an address, of a scheme that is read or another."""
    return re.match(r"\w[\w+.-]*://", str(path)) is not None


def list_files(pattern: str) -> list[str]:
    """The paths or addresses of a pattern, sorted. Raises RemoteError."""
    if not is_remote(pattern):
        return sorted(glob.glob(pattern))
    if "*" not in pattern:
        return [pattern]

    def list_urls(filesystem: Any) -> list[str]:
        return [filesystem.unstrip_protocol(path) for path in filesystem.glob(pattern)]

    return sorted(request(pattern, list_urls))


def find_file(path: str) -> StoredFile:
    """A file at a path or an address. Raises RemoteError."""
    if not is_remote(path):
        stat = os.stat(path)
        version = f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        return StoredFile(path, stat.st_size, version)

    info = request(path, lambda filesystem: filesystem.info(path))
    if info.get("size") is None:
        text = "can't be read in parts: its server doesn't say how long it is"
        raise RemoteError(f"{_show(path)} {text}")
    return StoredFile(path, info["size"], _find_version(info))


def _find_version(facts: Mapping[str, Any]) -> str:
    return next((str(facts[name]) for name in _VERSIONS if facts.get(name)), "")


def map_parallel(function: Callable[[Value], Result], values: Iterable[Value]) -> list[Result]:
    """The function of each value, of many at a time."""
    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        return list(pool.map(function, values))


def request(url: str, ask: Callable[[Any], Result]) -> Result:
    """What a file system answers, asked again where its server fails.

    Args:
        url: what is asked for; its scheme chooses the file system.
        ask: called with that.

    Raises:
        ValueError: the scheme is not read, or its package isn't installed.
        RemoteError: it is not there, or can't be read now.
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
            hint = "pip install 'vit-pipeline[remote]'"
            raise ValueError(f"{_show(url)} can't be read: {error}; {hint}") from error
        except RemoteError:
            raise
        except Exception as error:
            # each client has errors of its own
            # fsspec calls any failure of http a missing file; the cause says more
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
            # without the cause, whose text has the whole address
            raise RemoteError(f"{_show(url)} can't be read: {reason}") from None


def _show(url: str) -> str:
    """An address for a message."""
    return shorten(hide_tokens(url))


def _read_range(filesystem: Any, file: StoredFile, start: int, end: int) -> Any:
    """The bytes from `start` up to `end` of the version that was found. Raises RemoteError where
    the store has another."""
    if file.path.startswith("http"):
        return filesystem.read_range(file, start, end)
    if file.path.startswith("hf:"):
        return filesystem.cat_file(_pin_commit(file, os.getpid()), start=start, end=end)

    from s3fs.utils import FileExpired  # type: ignore[import-untyped]  # of the extra

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
    """The address of a file of the Hub at a commit, at which it never changes. Raises RemoteError
    where the file there isn't the one that was found."""
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
    """The newest commit of a repository of the Hub, asked for once a process."""
    from huggingface_hub import HfApi

    filesystem = _open_filesystem("hf")
    hub = HfApi(endpoint=filesystem.endpoint, token=filesystem.token)
    return str(hub.repo_info(repo_id, repo_type=repo_type, revision=revision).sha)


@lru_cache(maxsize=1024)
def _open_s3(path: str, process: int) -> Any:
    """A file of S3, opened once a process: that asks for its version."""
    return _open_filesystem("s3").open(path, cache_type="none")


@cache
def _define_http_filesystem() -> Any:
    """fsspec's file system for http, which also reads a range of a version."""
    from fsspec.asyn import sync_wrapper
    from fsspec.implementations.http import HTTPFileSystem

    class RangeFileSystem(HTTPFileSystem):  # type: ignore[misc]
        async def _read_range(self, file: StoredFile, start: int, end: int) -> bytes:
            # compressed bytes would be others
            headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            session = await self.set_session()
            async with session.get(self.encode_url(file.path), headers=headers) as response:
                self._raise_not_found_for_status(response, file.path)
                # before the body, which may be the whole file, is in memory
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
    """fsspec keeps one for each process: connections don't survive a fork."""
    if not scheme.startswith("http"):
        # a quarter of a second, which data on this disk doesn't need
        import fsspec

        return fsspec.filesystem(scheme)

    # of the extra "remote"
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_read=_SILENCE)
    return _define_http_filesystem()(client_kwargs={"timeout": timeout})
