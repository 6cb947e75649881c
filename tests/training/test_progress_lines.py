"""The lines of epochs that a run prints."""

from pathlib import Path

import pytest
from torch import nn

from tests.training.conftest import MakeRun, read_metrics
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


def test_an_epoch_at_a_reduced_size_says_so(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "train.image_sizes=[[0.5,0.5],[1,1]]"
    run = make_run(tmp_path, sizes)
    run.trainer.observers.append(ProgressBar())
    run.trainer.train()
    heights = [line["train_image_height"] for line in read_metrics(tmp_path)]
    size = run.config.data.size[0]
    assert heights[0] == size // 2
    assert heights[-1] == size
    assert f"at {size // 2}×{size // 2} px" in capsys.readouterr().err
