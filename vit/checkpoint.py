"""Training state on disk: written atomically, verified on reading, loaded without unpickling objects.

A checkpoint is a file `step-<global step>-<first 16 hex digits of its SHA-256>.pt`, or of a run whose weights are
sharded a directory `….sharded` with the shards and `state.pt`, the digits being those of all its files. The name
carries the checksum, so that one rename makes content and checksum appear together.
"""

import hashlib
import io
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.runtime.files import compute_sha256, read_tensors, remove, rename_durably, write_atomically

_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.(pt|sharded)")
_STATE_FILE = "state.pt"


@dataclass(frozen=True)
class CheckpointStore:
    """A run's checkpoints: the last two (so that a damaged last one has a fallback), the best, and of the ones to keep
    for good the newest `keep_limit`."""

    directory: Path
    keep_limit: int = 5

    def open_shards(self) -> Path:
        """A new directory that processes write their shards into, to be given to `save`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        return Path(tempfile.mkdtemp(prefix=".step-", suffix=".tmp", dir=self.directory))

    def save(
        self, state: dict[str, Any], *, step: int, best_step: int, keep_steps: list[int], shards: Path | None = None
    ) -> Path:
        """Write `state`, with the `shards` already written, as the checkpoint of global step `step`; delete what is no
        longer kept. Raises OSError (disk full, read-only, vanished mount) and leaves the earlier checkpoints as they
        were."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if shards is None:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
            path = self.directory / f"step-{step:08d}-{digest[:16]}.pt"
            write_atomically(path, lambda temporary: temporary.write_bytes(buffer.getbuffer()))
        else:
            torch.save(state, shards / _STATE_FILE)
            path = self.directory / f"step-{step:08d}-{_hash_directory(shards)[:16]}.sharded"
            remove(path)  # damaged, if it is there
            rename_durably(shards, path)
        entries = self._list()
        last_two = [number for number, _ in entries if number <= step][-2:]
        wanted = {best_step, *sorted(keep_steps)[-self.keep_limit :], *last_two}
        for number, old in entries:
            # later ones, or another of this step, are from before a fallback to an earlier checkpoint
            if number > step or (number == step and old != path) or number not in wanted:
                remove(old)
        self._clear_leftovers()
        return path

    def list_steps(self) -> list[int]:
        """The global steps of the checkpoints."""
        return [number for number, _ in self._list()]

    def load_latest(
        self, *, warn: Callable[[str], None], most_steps: int | None = None
    ) -> tuple[dict[str, Any], Path | None] | None:
        """The newest checkpoint that is whole, of at most `most_steps`, with the directory of its shards, or None where
        there is none. A damaged one is named through `warn` and passed over. Raises ValueError where all are."""
        entries = [(number, path) for number, path in self._list() if most_steps is None or number <= most_steps]
        for place, (number, _) in enumerate(reversed(entries)):
            if (found := self.load(number)) is not None:
                for _, path in entries[len(entries) - place :]:
                    warn(f"checkpoint {path.name} is damaged; falling back to the one before")
                return found
        if entries:
            raise ValueError(f"every checkpoint in {self.directory} is damaged; start again with --overwrite")
        return None

    def load(self, step: int) -> tuple[dict[str, Any], Path | None] | None:
        """The checkpoint of global step `step` if it is there and whole, with the directory of its shards."""
        for path in (path for number, path in self._list() if number == step):
            shards, digits = path if path.is_dir() else None, path.stem.rpartition("-")[2]
            try:
                if (_hash_directory(path) if shards else compute_sha256(path)).startswith(digits):
                    state = read_tensors(shards / _STATE_FILE if shards else path)
                    if isinstance(state, dict):
                        return state, shards
            except (OSError, ValueError):
                continue
        return None

    def _clear_leftovers(self) -> None:
        """Of a process that was killed, or failed, while writing."""
        for leftover in self.directory.glob(".step-*.tmp"):
            remove(leftover)

    def _list(self) -> list[tuple[int, Path]]:
        """(global step, path) of every checkpoint, oldest first."""
        entries = self.directory.iterdir() if self.directory.is_dir() else ()
        found = [(match, path) for path in entries if (match := _NAME.fullmatch(path.name))]
        return sorted((int(match[1]), path) for match, path in found)


def _hash_directory(path: Path) -> str:
    """SHA-256 of the names and the SHA-256 of a directory's files."""
    lines = [f"{entry.name} {compute_sha256(entry)}\n" for entry in sorted(path.iterdir())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
