"""TensorBoard's files in order."""

import time
from pathlib import Path

import pytest

from tests.training.conftest import read_curves
from vit.training.observers import TensorBoard


def test_a_run_that_goes_on_in_the_same_second_continues_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard reads files in the order of their names, which end with a number: 10 would come
    before 9."""
    # a clock that only waiting moves, for the names of the files too
    clock = [1_700_000_000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))

    for first in range(12):
        board = TensorBoard(tmp_path)
        board.on_start(step=first, total_steps=12, settings={})
        board.writer.add_scalar("epoch/loss", float(first), first + 1)
        values = {"loss": 0.5, "gradient_norm": 2.0, "learning_rate": 0.25}
        board.on_step({"step": 20, **values})
        board.on_end()
    curves = read_curves(tmp_path)
    assert curves["epoch/loss"] == [(step + 1, float(step)) for step in range(12)]
    for name, value in values.items():
        assert curves[f"step/{name}"] == [(20, value)]
