"""The output directory of one run: its lock, its configuration and its metrics file."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vit.runtime.files import remove, write_text

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
_OURS = (CONFIG_FILE, METRICS_FILE, "model.safetensors", "checkpoints", "tensorboard", "dry_run.png", ".lock")


@contextmanager
def open_run_directory(path: Path, *, resume: bool, overwrite: bool, is_main: bool = True) -> Iterator[None]:
    """Create and lock `path` for one run, for as long as the context lasts.

    Raises FileExistsError where it holds another run and neither `resume` nor `overwrite` is given, or holds files
    that are no part of one; ValueError where a living process trains into it. The lock is the kernel's
    (flock): it goes with the process, however that ends. Of several processes the main one opens it for all.
    """
    if not is_main:
        yield
        return
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; --output takes a directory")
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another process is training into {path}; wait for it or choose another --output"
            raise ValueError(message) from None
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in _OURS)
        if (path / CONFIG_FILE).exists():
            if overwrite:
                _clear(path)
            elif not resume:
                raise FileExistsError(
                    f"{path} already holds a run; continue it with --resume or replace it with --overwrite"
                )
        elif foreign and not resume:
            raise FileExistsError(
                f"{path} holds {foreign[0]}, which is not part of a training run; choose another --output"
            )
        yield


def _clear(path: Path) -> None:
    """Remove what a run leaves; anything else in the directory stays."""
    for name in _OURS[:-1]:
        remove(path / name)


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Add one line to a metrics file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, one dictionary an epoch; none where there is no such file."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break  # a run that is being written, or was killed
    return [metrics for metrics in found if isinstance(metrics, dict)]


def truncate_metrics(path: Path, *, step: int) -> None:
    """Drop the lines after global step `step`, and a half-written last one: a resumed run writes them again."""
    if path.exists():
        kept = [metrics for metrics in load_metrics(path) if metrics["step"] <= step]
        write_text(path, "".join(json.dumps(metrics) + "\n" for metrics in kept))
