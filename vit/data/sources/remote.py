"""Files on this disk or in object storage, read by byte range; the latter through fsspec.

Only the addresses of `SCHEMES` are read, each handed to its file system as it stands: a chain of
addresses ("simplecache::…") is never taken apart, and no other protocol of fsspec (local files,
archives, ssh) is reached.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import open_regular

# scheme → the package that reads it
SCHEMES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
}
# of a process at the same time
_MAX_REQUESTS = 32
_MAX_TRIES = 5
# seconds, doubled before each further try
_FIRST_WAIT = 0.5
# seconds without a byte after which a request has failed
_SILENCE = 30.0
# bytes of a text file
_MAX_TEXT = 2**24

# what a store says of the content of a file, best first
_VERSIONS = ("ETag", "etag", "sha256", "blob_id", "md5Hash", "LastModified", "Last-Modified")

Value = TypeVar("Value")
Result = TypeVar("Result")


class RemoteError(OSError):
    """What can't be read now; the message names its address."""


class MissingError(RemoteError):
    """A file is not there, or not for us."""


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

        content = request_with_retries(
            self.path, lambda filesystem: filesystem.cat_file(self.path, start=start, end=end)
        )
        if len(content) != end - start:
            text = "has changed meanwhile, or its server gives no byte ranges"
            raise RemoteError(f"{shorten(self.path)} {text}")
        return content


class StoredStream(io.RawIOBase):
    """A stored file, to be read here and there. Reading raises RemoteError."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = starts[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._file.size)
        if end <= self._position:
            return 0
        content = self._file.read(self._position, end)
        buffer[: len(content)] = content
        self._position = end
        return len(content)


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

    return sorted(request_with_retries(pattern, list_urls))


def find_file(path: str) -> StoredFile:
    """A file at a path or an address. Raises RemoteError."""
    if not is_remote(path):
        stat = os.stat(path)
        return StoredFile(path, stat.st_size, str(stat.st_mtime_ns))

    info = request_with_retries(path, lambda filesystem: filesystem.info(path))
    # of hf://
    info = {**(info.get("lfs") or {}), **info}
    if info.get("size") is None:
        text = "can't be read in parts: its server doesn't say how long it is"
        raise RemoteError(f"{shorten(path)} {text}")
    versions = [str(info[name]) for name in _VERSIONS if info.get(name)]
    return StoredFile(path, info["size"], versions[0] if versions else "")


def read_text(path: str) -> str | None:
    """A small UTF-8 file; None where it is missing. Raises RemoteError."""
    try:
        file = find_file(path)
    except (MissingError, FileNotFoundError):
        return None
    return file.read(0, min(file.size, _MAX_TEXT)).decode()


def map_parallel(function: Callable[[Value], Result], values: Iterable[Value]) -> list[Result]:
    """The function of each value, of many at a time."""
    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        return list(pool.map(function, values))


def request_with_retries(url: str, request: Callable[[Any], Result]) -> Result:
    """What a file system answers, asked again where its server fails.

    Args:
        url: what is asked for; its scheme chooses the file system.
        request: called with that.

    Raises:
        ValueError: the scheme is not read, or its package isn't installed.
        MissingError: it is not there, or not for us.
        RemoteError: it can't be read now.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{shorten(url)} is not read; known: {known}")

    # the clients of the stores try again by themselves
    is_http = scheme.startswith("http")
    max_tries = _MAX_TRIES if is_http else 1
    for num_tries in range(1, max_tries + 1):
        try:
            return request(_open_filesystem(scheme))
        except ImportError as error:
            text = f"{shorten(url)} is read by {SCHEMES[scheme]}, which is not installed"
            raise ValueError(f"{text}: pip install 'vit-pipeline[remote]'") from error
        except Exception as error:
            # each client has errors of its own
            # fsspec calls any failure of http a missing file; the cause says more
            failure = (is_http and error.__cause__) or error
            status = _find_status(failure)
            is_temporary = status >= 500 or status in (408, 429)
            if is_temporary and num_tries < max_tries:
                time.sleep(_FIRST_WAIT * 2 ** (num_tries - 1))
                continue

            reason = shorten(first_line(failure))
            if isinstance(failure, TimeoutError):
                reason = f"nothing came for {_SILENCE:g} s"
            elif status == 404:
                reason = "it is not there"
            if num_tries > 1:
                reason += f" (tried {num_tries} times)"
            error_class = MissingError if status in (403, 404) else RemoteError
            raise error_class(f"{shorten(url)} can't be read: {reason}") from error
    raise AssertionError("the last try returns or raises")


def _find_status(failure: BaseException) -> int:
    """The status of HTTP that a failure has or amounts to."""
    if isinstance(failure, FileNotFoundError):
        default = 404
    elif isinstance(failure, PermissionError):
        default = 403
    else:
        default = 500
    return int(getattr(failure, "status", default))


def _open_filesystem(scheme: str) -> Any:
    """fsspec keeps one for each process: connections don't survive a fork."""
    # a quarter of a second, which data on this disk doesn't need
    import fsspec

    if not scheme.startswith("http"):
        return fsspec.filesystem(scheme)

    # of the extra "remote"
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_read=_SILENCE)
    return fsspec.filesystem(scheme, client_kwargs={"timeout": timeout})
