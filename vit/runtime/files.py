"""Files that are either whole or absent: write beside the target, flush to disk, rename."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`. A reader sees the old file or the new
    one, also after a crash or a power cut. Whatever `write` raises leaves `path` as it was and no temporary file
    behind."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        os.umask(mask := os.umask(0))  # the only way to read it
        temporary.chmod(0o666 & ~mask)
        rename_durably(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file, or a directory of files, when its content is on disk; return when its new name is too."""
    for path in (*source.iterdir(), source) if source.is_dir() else (source,):
        _flush(path)
    source.replace(target)
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
    with path.open("rb") as file:
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
