"""Errors of a drive or network mount, which say nothing about the file."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRIVE_ERRORS = (errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN)


class DriveError(Exception):
    """A drive doesn't answer. It is no OSError, because what passes over a file that can't be read
    must not pass over all files of a drive."""


@contextmanager
def report_drive(path: str | Path) -> Iterator[None]:
    """Raise DriveError if the drive fails while `path` is read."""
    try:
        yield
    except OSError as error:
        if error.errno not in DRIVE_ERRORS:
            raise
        raise DriveError(
            f"{path}: {error.strerror}; repeat the command (vit train with --resume)"
        ) from error
