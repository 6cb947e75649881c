"""TensorBoard's files in order."""

from pathlib import Path

from tests.training.conftest import read_curves
from vit.training.observers import TensorBoard


def test_a_run_that_goes_on_in_the_same_second_continues_its_curves(tmp_path: Path) -> None:
    """TensorBoard reads files in the order of their names, which end with a number: 10 would come
    before 9."""
    for first in range(12):
        board = TensorBoard(tmp_path)
        board.on_start(step=first, total_steps=12, settings={})
        board.writer.add_scalar("epoch/loss", float(first), first + 1)
        board.on_end()
    assert read_curves(tmp_path)["epoch/loss"] == [(step + 1, float(step)) for step in range(12)]
