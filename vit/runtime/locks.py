"""Locks between processes. A lock ends with the process that holds it, however that ends."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock_file(path: Path, *, refusal: str = "") -> Iterator[bool]:
    """Hold the lock on a file, which is made if it is missing, as long as the context lasts. Yield
    False, after a warning, if the file system has no locks. If another process holds the lock, wait
    for it, or raise ValueError with the text of `refusal`.
    """
    # takes longer to import than `vit --help` may take
    from filelock import FileLock, Timeout

    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(blocking=not refusal)
    except Timeout:
        raise ValueError(refusal) from None
    except OSError as error:
        # the file itself could not be made
        if not path.is_file():
            raise
        warnings.warn(
            f"{path.parent} is on a file system without locks ({error.strerror}); don't start two"
            " commands that write into one folder there",
            stacklevel=3,
        )
    try:
        yield lock.is_locked
    finally:
        lock.release()
