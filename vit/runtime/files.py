"""Read and write files. A written file is complete or absent: it is written under a temporary name,
flushed to disk and renamed.

Only regular files are read. A result is written into a new or empty directory, or one that vit
made.
"""

import argparse
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vit.runtime.arguments import first_line
from vit.runtime.drive import wait_for_drive
from vit.runtime.locks import lock_file

# Largest file that is read as a whole.
_MAX_BYTES = 2**30
# Bytes. File systems allow 255, but a method, a class and a temporary suffix are added.
_MAX_NAME = 120
# Names of files that are being written.
TEMPORARIES = ".*.tmp"
# Name of a file that marks a directory made by vit, which vit may therefore clear.
_MARK = ".vit-output"

Opened = TypeVar("Opened")


def clean_name(name: str) -> str:
    """Return `name` without characters that file systems and shells don't allow, at most 120 bytes."""
    name = re.sub(r'[\x00-\x1f\x7f<>:"/\\|?*\ud800-\udfff]', "_", name).strip(" .").lstrip("-")
    return name.encode()[:_MAX_NAME].decode(errors="ignore") or "image"


def open_regular(path: Path, *, encoding: str | None = None) -> Any:
    """Open a file to read its bytes or, with `encoding`, its text.

    Raises:
        OSError: The file isn't regular. Reading a pipe or a device may never end.
        DriveError: Its drive doesn't answer.
    """
    # Opening a pipe without a writer would wait for ever. Windows has no such flag, nor such pipes.
    no_wait = getattr(os, "O_NONBLOCK", 0)

    def open_file() -> BinaryIO:
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | no_wait))

    file = wait_for_drive(open_file, path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file if encoding is None else io.TextIOWrapper(file, encoding, newline="")


def read_bytes(path: Path) -> bytes:
    """Return a regular file's content. Raises OSError for more than 1 GiB."""

    def read() -> bytes:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _MAX_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            return bytes(file.read())

    return wait_for_drive(read, path)


def read_text(path: Path) -> str:
    """Return a file's UTF-8 text. Raises ValueError that names the file for other bytes."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8: {error}") from error


def read_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays that `write_arrays` wrote. Raises ValueError for a damaged file."""
    # numpy takes longer to import than `vit --help` may take
    import numpy as np

    with open_regular(path) as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                return dict(archive)
        except Exception as error:
            # numpy and zipfile raise nearly any error for broken bytes.
            raise ValueError(f"{path} is damaged: {error}") from error


def open_cached(path: Path, read: Callable[[], Opened]) -> Opened | None:
    """Return what `read` returns. None if the cache lacks `path` or, after a warning, if it is damaged.

    Raises:
        PermissionError: It may not be read.
    """
    try:
        return read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise
    except (OSError, ValueError, LookupError):
        # one place in the code, so that a second attempt doesn't warn again
        warnings.warn(f"{path} is damaged; it is made again", stacklevel=1)
        return None


def read_tensors(path: Path, *, only_map: bool = False) -> Any:
    """Return the content of a file of `torch.save`: tensors, on the CPU, and plain values.

    Args:
        path: The file.
        only_map: Map the tensors into memory instead of reading them, for who needs other values.

    Raises:
        ValueError: The file is damaged or holds anything else.
    """
    # torch takes longer to import than `vit --help` may take
    import torch

    from vit.runtime.device import list_tensors

    with open_regular(path) as file:
        try:
            # timm's training script saves its options in a Namespace, with the weights.
            with torch.serialization.safe_globals([argparse.Namespace]):
                source = str(path) if only_map else file
                content = torch.load(source, map_location="cpu", weights_only=True, mmap=only_map)
            # A manipulated tensor may repeat a few bytes to any size.
            for tensor in list_tensors(content):
                if tensor.nbytes > tensor.untyped_storage().nbytes():
                    shape = list(tensor.shape)
                    raise ValueError(f"a tensor {shape} is larger than its stored values")
        except Exception as error:
            # torch raises nearly any error for broken bytes.
            raise ValueError(f"{path} can't be read: {explain_damage(path, error)}") from error
    return content


def explain_damage(path: Path, error: BaseException) -> str:
    """Return why a file of tensors can't be read: the library's message, unless that is misleading."""
    with open_regular(path) as file:
        if file.read(23) == b"version https://git-lfs":
            return "it is only Git LFS's pointer to the file; download it with `git lfs pull`"
    # torch's own message says how to run code from the file.
    pickled = re.search(r"GLOBAL (\S+)", str(error))
    if pickled:
        return f"it holds {pickled[1]}, which is not run; save model.state_dict() alone"
    if "weights_only" in str(error):
        return "it is not a file of torch"
    return first_line(error)


def write_atomically(
    path: Path, write: Callable[[Path], object], *, flush_name: bool = True
) -> None:
    """Write a file so that a reader sees the old one or the new one, also after a power cut.

    If `write` raises an error, `path` is unchanged and no temporary file is left. While the drive
    fails, the file is written again.

    Args:
        path: Path of the file.
        write: Function that writes a temporary file, whose path it gets. The file is then renamed.
            It may be called several times.
        flush_name: False: the new name is only certain to be on disk when the next file of the
            directory has been written.
    """
    wait_for_drive(lambda: _write_once(path, write, flush_name=flush_name), path)


def _write_once(path: Path, write: Callable[[Path], object], *, flush_name: bool) -> None:
    # Hidden, and in the same directory, so that renaming is one step of the file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        write(temporary)
        # Some libraries create the file anew, readable by its owner only.
        temporary.chmod(stat.S_IMODE(mode))
        rename_durably(temporary, path, flush_name=flush_name)
    except BaseException as error:
        # BaseException, because the program may also be interrupted.
        temporary.unlink(missing_ok=True)
        # safetensors, which is written in Rust, has its own error for a full disk.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number and not isinstance(error, OSError):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def remove_temporaries(directory: Path) -> None:
    """Remove the temporary files of a writer that was killed. No other process may write to the
    directory meanwhile."""
    for temporary in directory.glob(TEMPORARIES):
        remove(temporary)


def rename_durably(source: Path, target: Path, *, flush_name: bool = True) -> None:
    """Rename a file, or a directory of files, after its content is on disk.

    Then wait until the new name is on disk, too, unless `flush_name` is False.
    """
    if source.is_dir():
        for path in source.iterdir():
            _flush(path)
    _flush(source)
    source.replace(target)
    if flush_name:
        _flush(target.parent)


def _flush(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on disk."""
    is_windows = sys.platform == "win32"
    # Windows flushes a file that is open for writing, and no directories.
    if is_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, values: Any) -> None:
    """Write plain values to `path` atomically."""
    write_text(path, format_json(values))


def format_json(values: Any) -> str:
    """Return plain values as the text of a JSON file."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays to `path`, an .npz file, atomically. Equal arrays give equal bytes."""
    write_atomically(path, partial(save_arrays, arrays=arrays))


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays to `path`, whatever its name. Equal arrays give equal bytes."""
    # numpy takes longer to import than `vit --help` may take
    import numpy as np

    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file's bytes, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Delete a file, a link, or a directory with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def default_cache_dir() -> Path:
    """Return the folder of downloads and decoded images: $VIT_CACHE, or ~/.cache/vit."""
    try:
        return Path(os.environ.get("VIT_CACHE") or "~/.cache/vit").expanduser()
    except RuntimeError:
        raise ValueError("there is no home directory to keep a cache in; set VIT_CACHE") from None


def expand_home(path: str | Path) -> Path:
    """Return a path with ~ replaced by the home directory: shells don't do so in `--output=~/runs`."""
    # Path.expanduser raises an error for the name of an unknown user.
    return Path(os.path.expanduser(path))


def check_output(path: Path, *, overwrite: bool) -> None:
    """Check an output directory before the work whose result is written there.

    Args:
        path: Path of the directory.
        overwrite: True: an earlier result of vit in it may be deleted.

    Raises:
        FileExistsError: It holds files that may not be deleted.
        NotADirectoryError: It is a file.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; --output takes a directory")
    is_ours = (path / _MARK).exists()
    # Temporary files alone: a writer was killed before its first file was complete.
    files = set(path.iterdir()) - {path / _MARK}
    if not files or (is_ours and files.issubset(path.glob(TEMPORARIES))):
        return
    if not overwrite:
        raise FileExistsError(
            f"{path} already holds files; choose another --output or add --overwrite"
        )
    # Files of other programs are never deleted.
    if not is_ours:
        raise FileExistsError(f"{path} holds files that vit did not make; choose another --output")


def prepare_output(path: str | Path, *, overwrite: bool = False) -> Path:
    """Create the empty output directory `path` and return it. Raises the errors of `check_output`."""
    path = expand_home(path)
    check_output(path, overwrite=overwrite)
    path.mkdir(parents=True, exist_ok=True)
    _clear(path)
    (path / _MARK).touch()
    return path


@contextmanager
def replace_output(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory for the files of a result. Once all are written they go into the
    output directory `path`; until then an earlier result stays there.

    Raises:
        FileExistsError, NotADirectoryError: See `check_output`.
        ValueError: Another process is writing a result into it.
    """
    path = expand_home(path)
    check_output(path, overwrite=overwrite)
    path.mkdir(parents=True, exist_ok=True)
    refusal = f"another process is writing into {path}; wait for it or choose another --output"
    with lock_file(path / _MARK, refusal=refusal):
        # It may have been the other process's until now.
        check_output(path, overwrite=overwrite)
        remove_temporaries(path)
        staged = path / f".{secrets.token_hex(4)}.tmp"
        staged.mkdir()
        try:
            yield staged
            _clear(path, keep=staged)
            for file in staged.iterdir():
                file.rename(path / file.name)
            _flush(path)
        finally:
            remove(staged)
    # Windows removes the file with its lock.
    (path / _MARK).touch()


def _clear(path: Path, *, keep: Path | None = None) -> None:
    """Empty an output directory, which may be a link or a mounted volume, but for its mark."""
    for entry in set(path.iterdir()) - {keep, path / _MARK}:
        remove(entry)


# The text of a file, or a function that writes the file at a path.
FileContent = str | Callable[[Path], object]


class Result(ABC):
    """A result of a public function, which can be saved as a directory of files."""

    @abstractmethod
    def build_files(self) -> Mapping[str, FileContent]:
        """Return the content of each file by name, in the order in which they are written."""

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write the files that the command writes.

        Args:
            directory: New or empty directory.
            overwrite: Replace an earlier result of vit in it.

        Raises:
            FileExistsError: It holds files, and `overwrite` is not set or vit did not make them.
        """
        # Built before the directory is made, so that a page that fails leaves no directory.
        files = self.build_files()
        with replace_output(directory, overwrite=overwrite) as output:
            for name, content in files.items():
                if isinstance(content, str):
                    write_text(output / name, content)
                else:
                    write_atomically(output / name, content)


def compute_and_save(compute: Callable[[], Any], output: Path, *, overwrite: bool) -> Any:
    """Compute a `Result` for a command, save it in `output`, and return it."""
    # A directory that can't be used is reported before minutes of work.
    check_output(output, overwrite=overwrite)
    result = compute()
    result.save(output, overwrite=overwrite)
    return result
