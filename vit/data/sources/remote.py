"""Object storage, through fsspec: files are copied into the cache when they are first needed, and
again when an S3 store or the Hub has another version."""

import re
from collections.abc import Sequence
from pathlib import Path

from vit.runtime.arguments import first_line, hide_tokens, shorten
from vit.runtime.locks import lock_file


def is_remote(path: object) -> bool:
    """Return true for an address, of any scheme."""
    return re.match(r"\w[\w+.-]*://", str(path)) is not None


def fetch_files(addresses: Sequence[str], cache_dir: Path) -> list[tuple[str, str]]:
    """Copy files into the cache, and return the address and the path of each. An address may be a
    pattern with an asterisk. Raises OSError if one can't be read."""
    import fsspec

    cache_dir.mkdir(parents=True, exist_ok=True)
    try:
        # two processes would write the same file
        with lock_file(cache_dir / "lock"):
            # a question mark in an address is no pattern
            opened = fsspec.open_files(
                [f"filecache::{each}" for each in addresses],
                expand=any("*" in each for each in addresses),
                filecache={"cache_storage": str(cache_dir), "check_files": True},
            )
            with opened as files:
                pairs = zip(opened, files, strict=True)
                return [(hide_tokens(each.path), file.name) for each, file in pairs]
    except Exception as error:
        # each client has its own types of errors; http's cause is more exact
        reason = shorten(hide_tokens(first_line(error.__cause__ or error)))
        # without the cause: its text has the whole address
        raise OSError(
            f"{shorten(hide_tokens(addresses[0]))} and others can't be read: {reason}; s3:// and"
            " https:// need pip install '.[remote]' in the clone of vit"
        ) from None
