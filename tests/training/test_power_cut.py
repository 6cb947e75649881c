"""Whatever a power cut leaves of a run's directory, --resume ends at the same bytes or refuses with
a reason.

The writes, renames, deletions and fsyncs of a short run are recorded. After each of them the
directory is rebuilt as a file system may leave it: a file's content is sure after its own fsync,
its name after its directory's.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import vit
from tests.training.conftest import TINY, read_metrics
from vit.bundle import load_bundle

pytestmark = pytest.mark.chaos

OVERRIDES = [*TINY, "train.epochs=2", "train.max_steps=8", "train.checkpoint_every_steps=2"]


class Event(NamedTuple):
    """What happened to a path below the run's directory."""

    kind: str  # sync, sync directory, rename, delete
    path: str
    target: str = ""
    content: bytes = b""


@contextmanager
def record(root: Path, events: list[Event]) -> Iterator[None]:
    """Note what happens below `root`, but for TensorBoard's files, which nothing is resumed from."""
    fsync, replace, unlink, rmtree = os.fsync, Path.replace, Path.unlink, shutil.rmtree

    def below(path: object) -> str | None:
        text = os.path.relpath(os.fspath(path), root)  # type: ignore[call-overload]
        return None if text.startswith(("..", "tensorboard")) else text

    def noting_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if (name := below(path)) is not None:
            if os.path.isdir(path):
                events.append(Event("sync directory", name))
            else:
                events.append(Event("sync", name, content=Path(path).read_bytes()))

    def noting_replace(self: Path, target: Path) -> Path:
        if (name := below(self)) is not None:
            events.append(Event("rename", name, os.path.relpath(target, root)))
        return replace(self, target)

    def noting_unlink(self: Path, missing_ok: bool = False) -> None:
        if (name := below(self)) is not None and self.exists():
            events.append(Event("delete", name))
        unlink(self, missing_ok)

    def noting_rmtree(path: Any, *arguments: Any, **options: Any) -> None:
        assert below(path) is None, "a tree of the run is deleted: not recorded"
        rmtree(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noting_fsync)
        patch.setattr(Path, "replace", noting_replace)
        patch.setattr(Path, "unlink", noting_unlink)
        patch.setattr(shutil, "rmtree", noting_rmtree)
        yield


Files = dict[str, bytes]


def apply(files: Files, event: Event) -> None:
    if event.kind == "rename":
        files[event.target] = files.pop(event.path, b"")  # content that was never flushed is lost
    elif event.kind == "delete":
        files.pop(event.path, None)


def list_outcomes(events: list[Event]) -> list[Files]:
    """What may be on disk after these events: with all that was not yet sure, without it, and with
    parts of it."""
    sure: Files = {}
    contents: Files = {}
    pending: list[Event] = []
    for event in events:
        if event.kind == "sync":
            contents[event.path] = event.content
        elif event.kind == "sync directory":
            for done in [
                other
                for other in pending
                if os.path.dirname(other.target or other.path) in (event.path, "")
            ]:
                if os.path.normpath(
                    os.path.dirname(done.target or done.path) or "."
                ) == os.path.normpath(event.path):
                    sure.setdefault(done.path, contents.get(done.path, b""))
                    apply(sure, done)
                    pending.remove(done)
        else:
            pending.append(event)
    outcomes = []
    for chosen in (
        [],
        pending,
        *([each] for each in pending),
        *(pending[:count] for count in range(1, len(pending))),
    ):
        files = dict(sure)
        for event in chosen:
            if event.kind == "rename":
                files.setdefault(event.path, contents.get(event.path, b""))
            apply(files, event)
        # a temporary file that was being written may be there, half of it
        half = {
            name: contents[name][: len(contents[name]) // 2]
            for name in contents
            if name.endswith(".tmp")
        }
        outcomes += [files, half | files] if chosen is pending else [files]
    return outcomes


def rebuild(directory: Path, files: Files) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_every_state_that_a_power_cut_leaves_resumes_to_the_same_bytes(
    tmp_path: Path, empty_yaml: Path
) -> None:
    whole, events = tmp_path / "whole", list[Event]()
    with record(whole, events):
        vit.train(empty_yaml, output=whole, overrides=OVERRIDES)
    assert {event.kind for event in events} == {"sync", "sync directory", "rename", "delete"}
    states: dict[frozenset[tuple[str, bytes]], Files] = {}
    for count in range(len(events) + 1):
        for files in list_outcomes(events[:count]):
            kept = {name: content for name, content in files.items() if not name.endswith(".tmp")}
            states.setdefault(frozenset(kept.items()), files)
    assert len(states) > 15
    expected, metrics = load_bundle(whole).model.state_dict(), read_metrics(whole)
    for number, files in enumerate(states.values()):
        broken = tmp_path / "broken"
        rebuild(broken, files)
        vit.train(
            empty_yaml, output=broken, overrides=OVERRIDES, resume=True
        )  # none of them is refused
        weights = load_bundle(broken).model.state_dict()
        assert all(torch.equal(weights[name], expected[name]) for name in expected), (
            number,
            sorted(files),
        )
        assert read_metrics(broken) == metrics, (number, sorted(files))
        assert not list(broken.glob("checkpoints/.step-*")), sorted(files)
