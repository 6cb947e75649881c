"""Checkpoints: whole or absent, verified, with a fallback."""

import os
from pathlib import Path

import pytest
import torch

from vit.checkpoint import CheckpointStore


@pytest.fixture(params=["one file", "shards"])
def is_sharded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "shards")


def save(
    store: CheckpointStore, step: int, *, is_sharded: bool = False, best: int = 0, keep: list[int] | None = None
) -> Path:
    shards = store.open_shards() if is_sharded else None
    if shards:
        (shards / "shard-1").write_text(f"the tensors of step {step}")
    state = {"value": torch.tensor(step)}
    return store.save(state, step=step, best_step=best, keep_steps=keep or [], shards=shards)


def load(store: CheckpointStore) -> tuple[int | None, list[str]]:
    messages: list[str] = []
    found = store.load_latest(warn=messages.append)
    if found is None:
        return None, messages
    state, shards = found
    if shards:
        assert (shards / "shard-1").read_text() == f"the tensors of step {state['value']}"
    return int(state["value"]), messages


def steps(store: CheckpointStore) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in store.directory.glob("step-*"))


def test_the_newest_is_loaded_and_none_is_no_error(tmp_path: Path, is_sharded: bool) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert load(store) == (None, [])
    for step in (9, 10, 100):
        save(store, step, is_sharded=is_sharded)
    assert load(store) == (100, [])


def test_last_two_best_and_kept_ones_stay(tmp_path: Path, is_sharded: bool) -> None:
    store = CheckpointStore(tmp_path, keep_limit=2)
    keep: list[int] = []
    for step in range(1, 11):
        if step in (2, 4, 6):
            keep.append(step)
        save(store, step, best=3, keep=keep, is_sharded=is_sharded)
    assert steps(store) == [3, 4, 6, 9, 10]


@pytest.mark.parametrize("fault", ["truncate", "flip", "empty"])
def test_a_faultd_last_falls_back_to_the_one_before_and_says_so(tmp_path: Path, is_sharded: bool, fault: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, is_sharded=is_sharded)
    path = save(store, 2, is_sharded=is_sharded)
    file = path / "shard-1" if is_sharded else path
    content = bytearray(file.read_bytes())
    if fault == "truncate":
        content = content[: len(content) // 2]
    elif fault == "flip":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray()
    file.write_bytes(content)
    step, messages = load(store)
    assert step == 1
    assert len(messages) == 1
    assert path.name in messages[0]
    # going on from the fallback supersedes the faultd one
    save(store, 2, is_sharded=is_sharded)
    assert load(store) == (2, [])
    assert not file.exists() or file.read_bytes() != bytes(content)


def test_a_lost_shard_is_fault(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, is_sharded=True)
    (save(store, 2, is_sharded=True) / "shard-1").unlink()
    assert load(store)[0] == 1


def test_all_faultd_is_an_error_with_a_cure(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1).write_bytes(b"no")
    with pytest.raises(ValueError, match="--overwrite"):
        load(store)


def test_a_failed_write_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sharded: bool
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, is_sharded=is_sharded)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            save(store, 2, is_sharded=is_sharded)
    assert load(store) == (1, [])
    assert steps(store) == [1]
    save(store, 3, is_sharded=is_sharded)
    assert len(list(tmp_path.iterdir())) == 2  # nothing is left of the failed one


def test_leftovers_of_a_killed_writer_are_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / ".step-00000001-0123456789abcdef.pt.xyz.tmp").write_bytes(b"half")
    save(store, 1)
    assert [path.suffix for path in tmp_path.iterdir()] == [".pt"]
