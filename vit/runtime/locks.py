"""Locks between processes. A lock ends with the process that holds it, however that ends."""

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors of file systems without locks: Lustre without its option flock, some NFS, FUSE and virtual
# machines' mounts. 524 is the kernel's own ENOTSUPP, which some file systems pass on.
_NO_LOCKS = (
    *(errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL),
    *(errno.ENOTTY, errno.EPROTO, 524),
)
# Device numbers of the file systems that a warning has named.
_named: set[int] = set()


@contextmanager
def lock_file(path: Path, *, refusal: str = "") -> Iterator[bool]:
    """Hold the lock on a file, which is made if it is missing, as long as the context lasts.

    Args:
        path: The file.
        refusal: Message of the error if another process holds the lock; empty: wait for it.

    Yields:
        False if the file system has no locks. One warning then names the folder.

    Raises:
        ValueError: Another process holds the lock, and there is a `refusal`.
        OSError: The file isn't regular, or can't be made.
    """
    # takes longer to import than `vit --help` may take
    from filelock import FileLock, Timeout

    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(blocking=not refusal)
    except Timeout:
        raise ValueError(refusal) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        file_system = path.parent.stat().st_dev
        if file_system not in _named:
            _named.add(file_system)
            warnings.warn(
                f"{path.parent} is on a file system without locks ({error.strerror}); "
                "don't start two commands that write into one folder there",
                stacklevel=3,
            )
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
