"""The output directory of one run: its lock, its configuration and its metrics file."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vit.runtime.documents import check_schema, parse_json
from vit.runtime.files import read_text, remove, write_text

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
_OURS = (CONFIG_FILE, METRICS_FILE, "model.safetensors", "checkpoints", "tensorboard", "dry_run.png", ".lock")


@contextmanager
def open_run_directory(path: Path, *, resume: bool, overwrite: bool, is_main: bool = True) -> Iterator[None]:
    """Create and lock `path` for one run, for as long as the context lasts. Raises FileExistsError where it holds
    another run and neither `resume` nor `overwrite` is given, or holds files that are no part of one; ValueError where
    a living process trains into it. The lock is the kernel's (flock): it goes with the process, however that ends. Of
    several processes the main one opens it for all."""
    if not is_main:
        yield
        return
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; --output takes a directory")
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"another process is training into {path}; wait for it or choose another --output"
            raise ValueError(text) from None
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in _OURS)
        if (path / CONFIG_FILE).exists():
            if overwrite:
                for name in _OURS[:-1]:  # anything else in the directory stays
                    remove(path / name)
            elif not resume:
                text = f"{path} already holds a run; continue it with --resume or replace it with --overwrite"
                raise FileExistsError(text)
        elif foreign and not resume:
            raise FileExistsError(f"{path} holds {foreign[0]}, which is no part of a run; choose another --output")
        yield


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, one dictionary an epoch; none where there is no such file. Raises ValueError
    for a line that is no object of numbers with its epoch and step."""
    found = []
    # what stands behind the last line break was being written when its run was killed
    for number, line in enumerate((read_text(path) if path.is_file() else "").split("\n")[:-1], start=1):
        origin = f"{path} line {number}"
        found.append(parse_json(line, origin=origin))
        check_schema(_Metrics, found[-1], origin=origin)
    return found


class _Metrics(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, float | None]
    epoch: int = Field(ge=0, lt=2**53)
    step: int = Field(ge=0, lt=2**53)


def update_metrics(path: Path, *more: dict[str, Any], step: int) -> None:
    """Drop the lines after global step `step`, and a half-written one: a resumed run writes them again. Add `more`."""
    kept = [metrics for metrics in load_metrics(path) if metrics["step"] <= step]
    if path.exists() or more:
        write_text(path, "".join(json.dumps(metrics) + "\n" for metrics in (*kept, *more)))
