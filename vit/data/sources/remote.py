"""Object storage, through fsspec: files are copied into the cache when they are first needed.

Only addresses of `SCHEMES` are read. fsspec's chains of addresses and its other protocols (local
files, archives, ssh) are never used.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from vit.runtime.arguments import HIDDEN, first_line, hide_tokens, shorten
from vit.runtime.files import clean_name

SCHEMES = ("s3", "hf", "https", "http")

# facts by which a store tells versions of a file apart
_VERSIONS = ("size", "ETag", "blob_id", "LastModified", "mtime")
# files that are copied at the same time
_MAX_REQUESTS = 8

Result = TypeVar("Result")


class RemoteError(OSError):
    """A file can't be read now; the message names its address."""


class MissingError(RemoteError):
    """There is no such file in a store that answers, or it may not be read."""


def is_remote(path: object) -> bool:
    """Return true for an address, of any scheme."""
    return re.match(r"\w[\w+.-]*://", str(path)) is not None


def list_addresses(address: str) -> list[str]:
    """List the files of a pattern, or below an address, sorted. Raises RemoteError."""

    def find(filesystem: Any) -> list[str]:
        paths = filesystem.glob(address) if "*" in address else filesystem.find(address)
        return [filesystem.unstrip_protocol(path) for path in paths]

    return sorted(_request(address, find))


def read_address(address: str) -> bytes:
    """Read a whole file. Raises RemoteError, MissingError for that file alone."""
    content: bytes = _request(address, lambda filesystem: filesystem.cat_file(address))
    return content


def fetch_files(addresses: Sequence[str], cache_dir: Path) -> list[str]:
    """Copy files into the cache, unless they are there in the version of the store.

    Returns:
        Their paths, in the same order.

    Raises:
        RemoteError: One can't be read.
    """

    cache_dir.mkdir(parents=True, exist_ok=True)

    def fetch(address: str) -> str:
        name = address.partition("?")[0].rpartition("/")[2]
        facts = _request(address, lambda filesystem: filesystem.info(address))
        version = repr([address, *(facts.get(key) for key in _VERSIONS)])
        digest = hashlib.sha256(version.encode()).hexdigest()[:16]
        path = cache_dir / f"{digest}-{clean_name(name)}"
        if not path.is_file():
            # moved to its place when complete: another process may read it meanwhile
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            try:
                _request(address, lambda filesystem: filesystem.get_file(address, str(temporary)))
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        return str(path)

    with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
        return list(pool.map(fetch, addresses))


def _request(address: str, ask: Callable[[Any], Result]) -> Result:
    """Ask a file system.

    Raises:
        ValueError: The scheme is not supported, or its package isn't installed.
        RemoteError: There is no such file, or it can't be read now.
    """
    scheme = address.partition("://")[0]
    shown = shorten(hide_tokens(address))
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{shown} is not read; known: {known}")
    if HIDDEN in address:
        text = "was saved without its token; name the whole address, with data.root or --data"
        raise ValueError(f"{shown} {text}")
    import fsspec

    try:
        return ask(fsspec.filesystem(scheme))
    except ImportError as error:
        hint = "pip install '.[remote]' in the clone of vit"
        raise ValueError(f"{shown} can't be read: {error}; {hint}") from error
    except Exception as error:
        # each client has its own types of errors; http's cause is more exact
        failure = (scheme.startswith("http") and error.__cause__) or error
        status = getattr(failure, "status", 500)
        is_missing = isinstance(failure, FileNotFoundError) or status == 404
        reason = "it is not there" if is_missing else shorten(hide_tokens(first_line(failure)))
        is_refused = isinstance(failure, PermissionError) or status in (401, 403)
        kind = MissingError if is_missing or is_refused else RemoteError
        # without the cause: its text has the whole address
        raise kind(f"{shown} can't be read: {reason}") from None
