"""Training state on disk: written atomically, verified on reading, loaded without unpickling
objects.

A checkpoint is a file `step-<global step>-<first 16 hex digits of its SHA-256>.pt`. The name
carries the checksum, so that one rename makes content and checksum appear together. Its keys are
"progress" (`vit.training.plan.Progress`), "state" (`vit.training.train_step.TrainStep`) and
"identity" (`vit.training.identity.RunIdentity`).
"""

import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.runtime.files import TEMPORARIES, compute_sha256, read_tensors, remove, write_atomically

# the global step and the first digits of the SHA-256
_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")


def serialize_state(state: dict[str, Any]) -> memoryview:
    """Return the content of a file: tensors, numbers and text, in dictionaries and lists, in the
    host's memory, where later steps don't change them."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def _read(path: Path) -> Any:
    """Return the content of a checkpoint; None if it is damaged."""
    try:
        # Its name says the checksum.
        is_intact = compute_sha256(path).startswith(path.stem.rpartition("-")[2])
        return read_tensors(path) if is_intact else None
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class CheckpointStore:
    """A run's checkpoints: the last two, so that a damaged last one has a fallback, and the best.

    Args:
        directory: Their directory, made when the first checkpoint is saved.
    """

    directory: Path

    def save(self, content: memoryview, *, step: int, best_step: int) -> Path:
        """Write a checkpoint, delete those that are no longer kept, and return its path.

        Args:
            content: See `serialize_state`.
            step: Global step after which the state was taken.
            best_step: Step of the best model so far, whose checkpoint stays; 0 for none.

        Raises:
            OSError: It can't be written. The earlier checkpoints are as they were.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(content).hexdigest()
        path = self.directory / f"step-{step:08d}-{digest[:16]}.pt"
        write_atomically(path, content)

        checkpoints = self._list()
        last_two = [number for number, _ in checkpoints if number <= step][-2:]
        for number, old in checkpoints:
            # Later checkpoints, or another one of this step, are from before the run fell back to
            # an earlier checkpoint.
            is_superseded = number > step or (number == step and old != path)
            if is_superseded or number not in {best_step, *last_two}:
                remove(old)
        # A process that was killed, or failed, while writing has left these.
        for leftover in self.directory.glob(TEMPORARIES):
            remove(leftover)
        return path

    def load_latest(self, *, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """Load the newest intact checkpoint; None if there is no checkpoint at all. Raises
        ValueError if all are damaged. `warn` gets a sentence for each that is passed over."""
        paths = [path for _, path in self._list()]
        for path in reversed(paths):
            state: dict[str, Any] | None = _read(path)
            if state is not None:
                return state
            warn(f"checkpoint {path.name} is damaged; falling back to the one before")
        if paths:
            raise ValueError(
                f"every checkpoint in {self.directory} is damaged; start again with --overwrite"
            )
        return None

    def load(self, step: int) -> dict[str, Any] | None:
        """Load the checkpoint of global step `step`. None if it is missing or damaged."""
        found = (_read(path) for number, path in self._list() if number == step)
        return next((state for state in found if state is not None), None)

    def _list(self) -> list[tuple[int, Path]]:
        """(global step, file) of every checkpoint, oldest first."""
        # Not glob, for which a directory that may not be read is empty.
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        matches = [(_NAME.fullmatch(path.name), path) for path in paths]
        return sorted((int(match[1]), path) for match, path in matches if match)
