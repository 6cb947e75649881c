"""Files that are either whole or absent: write beside the target, flush to disk, rename. Only regular ones are read."""

import errno
import hashlib
import io
import os
import secrets
import shutil
import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

from vit.runtime.arguments import first_line

MOST_BYTES = 2**30  # of a file that is read whole


def open_regular(path: Path, *, encoding: str | None = None) -> Any:
    """Open a file to read its bytes or, with `encoding`, its text. Raises OSError for one that isn't regular: reading a
    pipe or a device may never end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file if encoding is None else io.TextIOWrapper(file, encoding, newline="")


def read_bytes(path: Path) -> bytes:
    """A regular file's content. Raises OSError for more than 1 GiB."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        content: bytes = file.read()
        return content


def read_text(path: Path) -> str:
    """A file's UTF-8 text. Raises ValueError naming the file for other bytes."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error


def read_arrays(path: Path) -> "dict[str, np.ndarray]":
    """What `write_arrays` wrote. Raises ValueError for a damaged file."""
    import numpy as np

    with open_regular(path) as file:
        try:
            with np.load(file, allow_pickle=False) as stored:
                # ours are not compressed: what is read is no larger than the file
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in stored.zip.infolist()):
                    raise ValueError("its arrays are compressed")
                return {name: stored[name] for name in stored.files}
        except Exception as error:  # numpy and zipfile answer broken bytes with nearly any
            raise ValueError(f"{path} is damaged: {error}") from error


def read_tensors(path: Path) -> Any:
    """What torch saved, tensors on the CPU and plain values alone. Raises ValueError for anything else."""
    import torch

    with open_regular(path) as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch answers broken bytes with nearly any
            raise ValueError(f"{path} is damaged: {first_line(error)}") from error
    unread = [content]
    while unread:
        value = unread.pop()
        unread += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if isinstance(value, torch.Tensor) and value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{path} is damaged: a tensor {list(value.shape)} is larger than what is stored of it")
    return content


def write_atomically(path: Path, write: Callable[[Path], object], *, flush_name: bool = True) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`. A reader sees the old file or the new
    one, also after a crash or a power cut. Whatever `write` raises leaves `path` as it was and no temporary file
    behind. Without `flush_name` the new name is sure when the next file of the directory is written."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        write(temporary)
        rename_durably(temporary, path, flush_name=flush_name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def rename_durably(source: Path, target: Path, *, flush_name: bool = True) -> None:
    """Rename a file, or a directory of files, when its content is on disk; return when its new name is too."""
    for path in (*source.iterdir(), source) if source.is_dir() else (source,):
        _flush(path)
    source.replace(target)
    if flush_name:
        _flush(target.parent)


def default_cache_dir() -> Path:
    """Where downloads and decoded images are kept: $VIT_CACHE, or ~/.cache/vit."""
    return Path(os.environ.get("VIT_CACHE") or Path.home() / ".cache" / "vit")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_arrays(path: Path, arrays: "Mapping[str, np.ndarray]") -> None:
    """Write named arrays to `path`, an .npz file, atomically. Equal arrays give equal bytes."""
    import numpy as np

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(path, write)


def compute_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Delete a file, or a directory with all it holds, where there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Return when a file's content, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
