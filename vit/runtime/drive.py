"""Wait for a drive or network mount that fails for a while."""

import errno
import os
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Errors of a drive or mount that may come back. The files on it may be good.
_ERRORS = (
    *(errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN),
    *(errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN),
    # Linux alone has it
    getattr(errno, "EREMOTEIO", errno.EIO),
)
_MAX_SECONDS = 120
# Seconds before the second try, doubled before each further one.
_FIRST_PAUSE = 0.5
_MAX_PAUSE = 10.0


class DriveError(Exception):
    """A drive doesn't answer for minutes.

    It is no OSError: what passes over a file that can't be read must not pass over all files of a
    drive.
    """


def is_drive_error(error: BaseException) -> bool:
    """Return true if an error says that a drive fails, and nothing about the file."""
    return isinstance(error, OSError) and error.errno in _ERRORS


def wait_for_drive(action: Callable[[], T], path: str | os.PathLike[str]) -> T:
    """Return `action()`. While the drive fails, call it again, for two minutes.

    Args:
        action: Function that reads or writes a file. It may be called several times.
        path: The file, for messages.

    Raises:
        DriveError: The drive still fails.
    """
    pause = _FIRST_PAUSE
    waited = 0.0
    while True:
        try:
            return action()
        except OSError as error:
            if not is_drive_error(error):
                raise
            reason = error.strerror or str(error)
            if waited >= _MAX_SECONDS:
                raise DriveError(
                    f"{os.fspath(path)}: {reason}, for {waited:.0f} seconds; when the drive answers "
                    "again, repeat the command (vit train with --resume)"
                ) from error
        if not waited:
            warnings.warn(
                f"{os.fspath(path)}: {reason}; waiting up to {_MAX_SECONDS} seconds for the drive",
                stacklevel=2,
            )
        time.sleep(pause)
        waited += pause
        pause = min(2 * pause, _MAX_PAUSE)
