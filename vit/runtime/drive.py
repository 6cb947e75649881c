"""Errors of a drive or network mount, which say nothing about the file."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ERRORS = (errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN)


class DriveError(Exception):
    """A drive doesn't answer.

    It is no OSError: what passes over a file that can't be read must not pass over all files of a
    drive.
    """


def is_drive_error(error: BaseException) -> bool:
    """Return true if an error says that a drive fails."""
    return isinstance(error, OSError) and error.errno in _ERRORS


@contextmanager
def report_drive(path: str | Path) -> Iterator[None]:
    """Raise DriveError if the drive fails while `path` is read."""
    try:
        yield
    except OSError as error:
        if not is_drive_error(error):
            raise
        raise DriveError(
            f"{path}: {error.strerror}; when the drive answers again, repeat the command"
            " (vit train with --resume)"
        ) from error
