"""The output directory of one run: its lock, its configuration and its metrics file."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vit.runtime.documents import check_schema, parse_json
from vit.runtime.files import read_text, remove, remove_temporaries, write_text

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
_LOCK_FILE = ".lock"
# what a run writes, and --overwrite removes; anything else in the directory stays
_RUN_FILES = (
    CONFIG_FILE,
    METRICS_FILE,
    "model.safetensors",
    "checkpoints",
    "tensorboard",
    "dry_run.png",
    "cross_validation.json",
    "learning_curve.json",
)


@contextmanager
def open_run_directory(
    path: Path, *, resume: bool, overwrite: bool, is_main: bool = True
) -> Iterator[None]:
    """Create and lock a directory for one run, for as long as the context lasts. The lock is the
    kernel's (flock): it goes with the process, however that ends.

    Args:
        path: of the directory.
        resume: a run that is there may be continued.
        overwrite: a run that is there is removed.
        is_main: of several processes the main one opens the directory for all.

    Raises:
        NotADirectoryError: `path` is a file.
        FileExistsError: another run is there, and neither `resume` nor `overwrite` is set, or files
            that are not part of a run.
        ValueError: a living process trains into it.
    """
    if not is_main:
        yield
        return
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; --output takes a directory")
    path.mkdir(parents=True, exist_ok=True)
    with (path / _LOCK_FILE).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is training into {path}; wait for it or choose another --output"
            ) from None

        holds_run = (path / CONFIG_FILE).exists()
        foreign = {entry.name for entry in path.iterdir()}.difference(_RUN_FILES, [_LOCK_FILE])
        if foreign and not holds_run and not resume:
            raise FileExistsError(
                f"{path} holds {min(foreign)}, which is not part of a run; choose another --output"
            )
        if holds_run and not overwrite and not resume:
            raise FileExistsError(
                f"{path} already holds a run;"
                " continue it with --resume or replace it with --overwrite"
            )
        # of a run that was killed: nobody else writes here
        remove_temporaries(path)
        if holds_run and overwrite:
            for name in _RUN_FILES:
                remove(path / name)
        yield


class _EpochMetrics(BaseModel):
    """A line of the metrics file."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, float | None]
    epoch: int = Field(ge=0, lt=2**53)
    step: int = Field(ge=0, lt=2**53)


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file, one dictionary an epoch; none where there is no file.

    Raises:
        ValueError: a line is not an object of numbers with its epoch and step.
    """
    if not path.is_file():
        return []
    # what stands behind the last line break was being written when its run was killed
    lines = read_text(path).split("\n")[:-1]
    epochs: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        origin = f"{path} line {number}"
        metrics = parse_json(line, origin=origin)
        check_schema(_EpochMetrics, metrics, origin=origin)
        epochs.append(metrics)
    return epochs


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Add an epoch's line. Lines of this step and later ones go, as does a half-written one: they
    are of a process that was killed before it saved the step."""
    earlier = [line for line in load_metrics(path) if line["step"] < metrics["step"]]
    write_text(path, "".join(json.dumps(line) + "\n" for line in [*earlier, metrics]))
