"""Where a result may be written: only into a new or empty directory, or one that we made."""

import shutil
from pathlib import Path

_MARK = ".vit-output"  # in a directory that we made, and may therefore clear


def check_output(path: Path, *, overwrite: bool = False) -> None:
    """Raise FileExistsError where `path` already holds something, unless `overwrite` is given and we made it, and
    NotADirectoryError where it is a file: to be called before the work whose result goes there."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; --output takes a directory")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise FileExistsError(f"{path} already holds files; choose another --output or add --overwrite")
        if not (path / _MARK).exists():
            raise FileExistsError(f"{path} holds files that no command of ours made; choose another --output")


def prepare_output(path: Path, *, overwrite: bool = False) -> Path:
    """Create the output directory `path`, empty; refuses what `check_output` refuses."""
    check_output(path, overwrite=overwrite)
    if path.is_dir():
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / _MARK).touch()
    return path
