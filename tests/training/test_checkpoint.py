"""Checkpoints: whole or absent, verified, with a fallback."""

import io
from pathlib import Path

import pytest
import torch

from vit.training.checkpoint import CheckpointStore


def save(store: CheckpointStore, step: int, *, best: int = 0) -> Path:
    content = io.BytesIO()
    torch.save({"value": torch.tensor(step)}, content)
    return store.save(content.getbuffer(), step=step, best_step=best)


def load(store: CheckpointStore) -> int | None:
    state = store.load()
    return None if state is None else int(state["value"])


def steps(store: CheckpointStore) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in store.directory.glob("step-*"))


def test_the_last_two_and_the_best_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(1, 11):
        save(store, step, best=3)
    assert steps(store) == [3, 9, 10]


@pytest.mark.parametrize("fault", ["truncate", "flip", "empty"])
def test_a_damaged_last_falls_back_to_the_one_before_and_says_so(
    tmp_path: Path, fault: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    file = save(store, 2)
    content = bytearray(file.read_bytes())
    if fault == "truncate":
        content = content[: len(content) // 2]
    elif fault == "flip":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray()
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=f"{file.name} is damaged"):
        assert load(store) == 1
    # going on from the fallback supersedes the damaged one
    save(store, 2)
    assert load(store) == 2
    assert not file.exists() or file.read_bytes() != bytes(content)


def test_only_damaged_ones_are_an_error_with_a_hint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1).write_bytes(b"no")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match="--overwrite"):
        load(store)
