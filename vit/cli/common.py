"""What the commands share: where output may go."""

import shutil
from pathlib import Path


def prepare_output(path: Path, *, overwrite: bool = False) -> Path:
    """Create the output directory `path`.

    Raises FileExistsError where it already holds something and `overwrite` is false, NotADirectoryError where it
    is a file.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; --output takes a directory")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise FileExistsError(f"{path} already holds files; choose another --output or add --overwrite")
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    return path
