"""Training state on disk: written atomically, verified on reading, loaded without unpickling
objects.

A checkpoint is a file `step-<global step>-<first 16 hex digits of its SHA-256>.pt`. The name carries
the checksum, so that one rename makes content and checksum appear together.
"""

import hashlib
import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.model.model_file import CHECKPOINT_NAME
from vit.runtime.files import compute_sha256, read_tensors, remove, write_atomically


def serialize_state(state: dict[str, Any]) -> memoryview:
    """The content of a checkpoint, in the host's memory: later steps don't change it.

    Args:
        state: tensors, numbers and text, in dictionaries and lists.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


@dataclass(frozen=True)
class CheckpointStore:
    """A run's checkpoints: the last two (so that a damaged last one has a fallback) and the best.

    Args:
        directory: made when the first checkpoint is saved.
    """

    directory: Path

    def save(self, content: memoryview, *, step: int, best_step: int) -> Path:
        """Write a checkpoint and delete those that are no longer kept.

        Args:
            content: of `serialize_state`.
            step: the global step after which the state was taken.
            best_step: the step of the best model so far, whose checkpoint stays; 0 for none.

        Returns:
            The file.

        Raises:
            OSError: the disk is full or read-only, or its mount has vanished; the earlier
                checkpoints are as they were.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(content).hexdigest()
        path = self.directory / f"step-{step:08d}-{digest[:16]}.pt"
        write_atomically(path, lambda temporary: temporary.write_bytes(content))

        checkpoints = self._list()
        last_two = [number for number, _ in checkpoints if number <= step][-2:]
        for number, old in checkpoints:
            # later ones, or another of this step, are from before a fallback to an earlier
            # checkpoint
            is_superseded = number > step or (number == step and old != path)
            if is_superseded or number not in {best_step, *last_two}:
                remove(old)

        # of a process that was killed, or failed, while writing
        for leftover in self.directory.glob(".step-*.tmp"):
            remove(leftover)
        return path

    def load_latest(self, *, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """The newest intact checkpoint, or None where there is none at all.

        Args:
            warn: called with a sentence for each damaged checkpoint that was passed over.

        Raises:
            ValueError: all checkpoints are damaged.
        """
        damaged = []
        for number, path in reversed(self._list()):
            state = self.load(number)
            if state is None:
                damaged.append(path.name)
                continue
            for name in damaged:
                warn(f"checkpoint {name} is damaged; falling back to the one before")
            return state

        if damaged:
            raise ValueError(
                f"every checkpoint in {self.directory} is damaged; start again with --overwrite"
            )
        return None

    def load(self, step: int) -> dict[str, Any] | None:
        """The checkpoint of global step `step`, or None where it is missing or damaged."""
        for number, path in self._list():
            if number != step:
                continue
            digits = path.stem.rpartition("-")[2]
            # one that isn't a file, or is damaged all the same
            with suppress(OSError, ValueError):
                if compute_sha256(path).startswith(digits):
                    state = read_tensors(path)
                    if isinstance(state, dict):
                        return state
        return None

    def _list(self) -> list[tuple[int, Path]]:
        """(global step, file) of every checkpoint, oldest first."""
        matches = [
            (CHECKPOINT_NAME.fullmatch(path.name), path)
            for path in self.directory.glob("step-*.pt")
        ]
        return sorted((int(match[1]), path) for match, path in matches if match)
