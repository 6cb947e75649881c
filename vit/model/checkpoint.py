"""Training state on disk: written atomically, verified on reading, loaded without unpickling
objects. This file alone knows what a checkpoint holds.

A checkpoint is a file `step-<global step>-<first 16 hex digits of its SHA-256>.pt`. The name
carries the checksum, so that one rename makes content and checksum appear together. A checkpoint is
also a file of weights, which `--init` and `load_bundle` read; that is why this file lies beside
theirs.
"""

import hashlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from vit.runtime.files import compute_sha256, read_tensors, remove, write_atomically

# the global step and the first digits of the SHA-256
CHECKPOINT_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")


class StepState(TypedDict):
    """The state of a `vit.training.train_step.TrainStep`. The tensors are the step's own.

    Attributes:
        average: Weights of the model to evaluate: their average, or those of `model` again.
        grad_accum_steps: Micro-batches, which the memory that was free decided.
    """

    model: dict[str, Any]
    average: dict[str, Any]
    optimizer: dict[str, Any]
    num_steps: int
    grad_accum_steps: int
    loss_scale: dict[str, Any] | None


class IdentityRecord(TypedDict):
    """The record of a `vit.training.identity.RunIdentity`."""

    run_id: str
    settings: Mapping[str, Any]


class Checkpoint(NamedTuple):
    """The content of a checkpoint; a file has these names as keys.

    Attributes:
        progress: Fields of `vit.training.plan.Progress`.
    """

    progress: dict[str, Any]
    state: StepState
    identity: IdentityRecord

    def serialize(self) -> memoryview:
        """Return the content of the file."""
        return serialize_state(self._asdict())


def serialize_state(state: dict[str, Any]) -> memoryview:
    """Return the content of a file in the host's memory, where later steps don't change it.

    Args:
        state: Tensors, numbers and text, in dictionaries and lists.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def read_averaged_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read the averaged weights of a checkpoint, and the id of its run.

    Raises:
        ValueError: The file is damaged, or not a checkpoint.
    """
    if not _is_intact(path):
        raise ValueError(f"{path} is damaged: its name says another checksum; use an earlier one")
    try:
        values = read_tensors(path)
        return values["state"]["average"], values["identity"]["run_id"]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint of vit") from error


def _is_intact(path: Path) -> bool:
    """Return whether a checkpoint has the checksum that its name says."""
    return compute_sha256(path).startswith(path.stem.rpartition("-")[2])


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a checkpoint; None if it is damaged. See `read_tensors`."""
    try:
        if not _is_intact(path):
            return None
        content = read_tensors(path)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@dataclass(frozen=True)
class CheckpointStore:
    """A run's checkpoints: the last two, so that a damaged last one has a fallback, and the best.

    Args:
        directory: Their directory, made when the first checkpoint is saved.
    """

    directory: Path

    def save(self, content: memoryview, *, step: int, best_step: int) -> Path:
        """Write a checkpoint and delete those that are no longer kept.

        Args:
            content: Content of the file. See `Checkpoint.serialize`.
            step: Global step after which the state was taken.
            best_step: Step of the best model so far, whose checkpoint stays; 0 for none.

        Returns:
            The file.

        Raises:
            OSError: The disk is full or read-only, or its mount has vanished. The earlier
                checkpoints are as they were.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(content).hexdigest()
        path = self.directory / f"step-{step:08d}-{digest[:16]}.pt"
        write_atomically(path, lambda temporary: temporary.write_bytes(content))

        checkpoints = self._list()
        last_two = [number for number, _ in checkpoints if number <= step][-2:]
        for number, old in checkpoints:
            # Later checkpoints, or another one of this step, are from before the run fell back to
            # an earlier checkpoint.
            is_superseded = number > step or (number == step and old != path)
            if is_superseded or number not in {best_step, *last_two}:
                remove(old)

        # A process that was killed, or failed, while writing has left these.
        for leftover in self.directory.glob(".step-*.tmp"):
            remove(leftover)
        return path

    def load_latest(self, *, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """Load the newest intact checkpoint: the values of a `Checkpoint` by name. None if there is
        no checkpoint at all.

        Args:
            warn: Called with a sentence for each damaged checkpoint that was passed over.

        Raises:
            ValueError: All checkpoints are damaged.
        """
        damaged: list[Path] = []
        for _, path in reversed(self._list()):
            state = _read(path)
            if state is not None:
                for each in damaged:
                    warn(f"checkpoint {each.name} is damaged; falling back to the one before")
                return state
            damaged.append(path)
        if damaged:
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
        matches = [(CHECKPOINT_NAME.fullmatch(path.name), path) for path in paths]
        return sorted((int(match[1]), path) for match, path in matches if match)
