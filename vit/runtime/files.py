"""Read and write files.

A written file is complete or absent: it is written under a temporary name, flushed to disk and
renamed. A result is written into a new or empty directory, or into one that vit made.
"""

import argparse
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

# Bytes. File systems allow 255, but a method, a class and a temporary suffix are added.
_MAX_NAME = 120
# Names of files that are being written.
TEMPORARIES = ".*.tmp"
# Name of a file that marks a directory made by vit, which vit may therefore clear.
_MARK = ".vit-output"

Opened = TypeVar("Opened")
# A text, bytes, or a function that writes the file at a path.
FileContent = str | bytes | Callable[[Path], object]


def clean_name(name: str) -> str:
    """Return at most 120 bytes of `name`, without characters that file systems don't allow."""
    name = re.sub(r'[\x00-\x1f\x7f<>:"/\\|?*\ud800-\udfff]', "_", name).strip(" .").lstrip("-")
    return name.encode()[:_MAX_NAME].decode(errors="ignore") or "image"


def expand_home(path: str | Path) -> Path:
    """Return a path with ~ replaced, which shells don't do in `--output=~/runs`."""
    # Path.expanduser raises an error for the name of an unknown user.
    return Path(os.path.expanduser(path))


def default_cache_dir() -> Path:
    """Return the folder of downloads and decoded images: $VIT_CACHE, or ~/.cache/vit."""
    try:
        return Path(os.environ.get("VIT_CACHE") or "~/.cache/vit").expanduser()
    except RuntimeError:
        raise ValueError("there is no home directory to keep a cache in; set VIT_CACHE") from None


def read_text(path: Path) -> str:
    """Return a file's UTF-8 text. Raises ValueError that names the file for other bytes."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8: {error}") from error


def read_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays that `write_arrays` wrote. Raises ValueError for a damaged file."""
    # numpy takes longer to import than `vit --help` may take
    import numpy as np

    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                return dict(archive)
        except Exception as error:
            # numpy and zipfile raise nearly any error for broken bytes.
            raise ValueError(f"{path} is damaged: {error}") from error


def open_cached(path: Path, read: Callable[[], Opened]) -> Opened | None:
    """Return what `read` returns; None if the cache lacks `path`, or if it is damaged."""
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


def read_tensors(path: Path) -> Any:
    """Return the content of a file of `torch.save`: tensors, on the CPU, and plain values. Raises
    ValueError if the file is damaged or holds anything else."""
    # torch takes longer to import than `vit --help` may take
    import torch

    try:
        # timm's training script saves its options in a Namespace, with the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # torch raises nearly any error for broken bytes, and says how to run code from the file.
        raise ValueError(
            f"{path} is damaged, is only Git LFS's pointer to the file, or holds more than tensors"
            " and plain values; save model.state_dict() alone"
        ) from error


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, content: FileContent) -> None:
    """Write a file so that a reader sees the old one or the new one, also after a power cut.

    After an error, `path` is unchanged and no temporary file is left.
    """
    # Hidden, and in the same directory, so that renaming is one step of the file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if isinstance(content, str):
            temporary.write_text(content, encoding="utf-8")
        elif callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        rename_durably(temporary, path)
    except BaseException:
        # BaseException, because the program may also be interrupted.
        temporary.unlink(missing_ok=True)
        raise


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file, or a directory of files, after its content is on disk. Then wait until the new
    name is on disk, too."""
    for path in (*source.glob("*"), source):
        _flush(path)
    source.replace(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on disk."""
    # Windows has no such call for directories.
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def format_json(values: Any) -> str:
    """Return plain values as the text of a JSON file."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays to `path`, an .npz file, atomically. Equal arrays give equal bytes."""
    # numpy takes longer to import than `vit --help` may take
    import numpy as np

    def save(temporary: Path) -> None:
        # By its name, numpy would add a suffix.
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(path, save)


def remove(path: Path) -> None:
    """Delete a file, a link, or a directory with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_output(path: Path, *, overwrite: bool, sources: Sequence[str] = ()) -> None:
    """Raise FileExistsError if an output directory holds files that may not be deleted: with
    `overwrite`, those of an earlier result of vit may be. Raise ValueError if it holds one of the
    `sources`, from which the new result is made."""
    # a name of timm, or of a module, is no file
    for source in filter(os.path.exists, sources):
        if Path(source).resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"{path} holds {source}, from which this is made; name another --output"
            )
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    # Files of other programs are never deleted.
    if names - {_MARK} and not (overwrite and _MARK in names):
        raise FileExistsError(
            f"{path} already holds files; choose another --output, or add --overwrite, which"
            " replaces a result of vit"
        )


def open_output(path: str | Path, *, overwrite: bool = False, sources: Sequence[str] = ()) -> Path:
    """Create and return the empty output directory `path`. Raises the errors of `check_output`."""
    path = expand_home(path)
    check_output(path, overwrite=overwrite, sources=sources)
    path.mkdir(parents=True, exist_ok=True)
    # before anything is deleted; the directory itself may be a link or a mounted volume
    (path / _MARK).touch()
    for entry in path.iterdir():
        if entry.name != _MARK:
            remove(entry)
    return path


class Result(ABC):
    """A result of a public function, which can be saved as a directory of files."""

    @property
    def sources(self) -> Sequence[str]:
        """Paths of what the result was made from, which is never replaced by it."""
        return ()

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
            ValueError: It holds what the result was made from.
        """
        # Built before the directory is emptied, so that a page that fails leaves it as it was.
        files = self.build_files()
        output = open_output(directory, overwrite=overwrite, sources=self.sources)
        for name, content in files.items():
            write_atomically(output / name, content)


def compute_and_save(compute: Callable[[], Any], *, output: Path, overwrite: bool = False) -> Any:
    """Compute a `Result` for a command, save it, and return it.

    Args:
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    # A directory that can't be used is reported before minutes of work.
    check_output(output, overwrite=overwrite)
    result = compute()
    result.save(output, overwrite=overwrite)
    return result
