"""The lines of epochs that a run prints."""

import pytest
from torch import nn

from vit.training.observers import ProgressBar


def test_a_short_run_prints_its_first_and_its_last_epoch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    monkeypatch.setattr("vit.training.observers.time.perf_counter", lambda: seconds)
    observer = ProgressBar()
    observer.on_start(step=0, total_steps=60, settings={})
    for epoch in range(1, 31):
        seconds = float(epoch)
        metrics = {"epoch": epoch, "step": 2 * epoch, "train_loss": 1.0, "val_loss": None}
        metrics |= {"images_per_second": 100.0, "elapsed_seconds": seconds}
        observer.on_epoch(metrics, nn.Identity())
    observer.on_end()
    lines = capsys.readouterr().err.splitlines()
    # one in 10 seconds, and the last
    assert [line.split()[1] for line in lines] == ["1", "11", "21", "30"]
