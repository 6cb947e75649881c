"""Training state on disk: written atomically, verified on reading, loaded with `weights_only=True`.

A checkpoint is `step-<global step>-<first 16 hex digits of its SHA-256>.pt`: the name carries the checksum, so that
one rename makes file and checksum appear together.
"""

import hashlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.files import write_atomically

_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run.

    Kept are the last two (so that a damaged last one has a fallback), the best, and of the ones to keep for good
    the newest `keep_limit`.
    """

    directory: Path
    keep_limit: int = 5

    def save(self, state: dict[str, Any], *, step: int, best_step: int, keep_steps: list[int]) -> Path:
        """Write `state` as the checkpoint of global step `step`, then drop the ones no longer needed.

        Raises OSError (disk full, read-only, vanished mount) and leaves the earlier checkpoints as they were.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
        path = self.directory / f"step-{step:08d}-{digest[:16]}.pt"
        write_atomically(path, lambda temporary: _write(temporary, buffer))
        wanted = {best_step, *sorted(keep_steps)[-self.keep_limit :]}
        entries = self._list()
        last_two = [number for number, _ in entries if number <= step][-2:]
        for number, old in entries:
            # later ones, or another of this step, are from before a fallback to an earlier checkpoint
            stale = number > step or (number == step and old != path)
            if stale or number not in {*wanted, *last_two}:
                old.unlink(missing_ok=True)
        for leftover in self.directory.glob(".step-*.tmp"):  # of a process killed while writing
            leftover.unlink(missing_ok=True)
        return path

    def load_latest(self, *, warn: Callable[[str], None], map_location: str = "cpu") -> dict[str, Any] | None:
        """The newest checkpoint that is whole, or None where there is none at all.

        A damaged one is named through `warn` and passed over. Raises ValueError where all are damaged.
        """
        entries = self._list()
        for _, path in reversed(entries):
            content = path.read_bytes()
            match = _NAME.fullmatch(path.name)
            assert match is not None
            if hashlib.sha256(content).hexdigest().startswith(match[2]):
                state: dict[str, Any] = torch.load(
                    io.BytesIO(content), map_location=map_location, weights_only=True
                )
                return state
            warn(f"checkpoint {path.name} is damaged; falling back to the one before")
        if entries:
            raise ValueError(f"every checkpoint in {self.directory} is damaged; start again with --overwrite")
        return None

    def _list(self) -> list[tuple[int, Path]]:
        """(global step, path) of every checkpoint, oldest first."""
        if not self.directory.is_dir():
            return []
        found = [(match, path) for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted((int(match[1]), path) for match, path in found)


def _write(path: Path, buffer: io.BytesIO) -> None:
    with path.open("wb") as file:
        file.write(buffer.getbuffer())
