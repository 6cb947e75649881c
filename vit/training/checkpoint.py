"""Training state on disk: written atomically, verified on reading, loaded without unpickling
objects.

A checkpoint is a file `step-<global step>-<first 16 hex digits of its SHA-256>.pt`. The name
carries the checksum, so that one rename makes content and checksum appear together.
"""

import hashlib
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.runtime.files import compute_sha256, read_tensors, remove, write_atomically

# the global step and the first digits of the SHA-256
_NAME = re.compile(r"step-(\d+)-([0-9a-f]{16})\.pt")


@dataclass(frozen=True)
class CheckpointStore:
    """A run's last two checkpoints, so that a damaged last one has a fallback, and that of its best
    model, in a directory that is made when the first one is saved."""

    directory: Path

    def save(self, content: bytes, *, step: int, best_step: int) -> Path:
        """Write the state after a global step, delete checkpoints that are no longer kept, and
        return its path. If it raises OSError, the earlier checkpoints are as they were."""
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
        return path

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """Load the newest intact checkpoint, or that of a step; None if there is none. Warns of
        damaged ones, and raises ValueError if all are."""
        checkpoints = [found for found in self._list() if step in (None, found[0])]
        for _, path in reversed(checkpoints):
            try:
                # Its name says the checksum.
                if compute_sha256(path).startswith(path.stem.rpartition("-")[2]):
                    state: dict[str, Any] = read_tensors(path)
                    return state
            except PermissionError:
                raise
            except (OSError, ValueError):
                pass
            warnings.warn(f"checkpoint {path.name} is damaged and is passed over", stacklevel=2)
        if checkpoints and step is None:
            raise ValueError(
                f"every checkpoint in {self.directory} is damaged; start again with --overwrite"
            )
        return None

    def _list(self) -> list[tuple[int, Path]]:
        """Return the global step and the file of each checkpoint, oldest first."""
        # Not glob, for which a directory that may not be read is empty.
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        matches = [(_NAME.fullmatch(path.name), path) for path in paths]
        return sorted((int(match[1]), path) for match, path in matches if match)
