"""Validation while a model trains gives what `vit evaluate` reports of it."""

import json
import os
from pathlib import Path

import pytest

from tests.conftest import TINY_RUN, Launcher
from vit.build.recipe import resolve_config
from vit.build.run import build_run
from vit.runtime.processes import Process


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_best_model_is_chosen_by_the_reports_numbers(
    cli: Launcher, empty_yaml: Path, tmp_path: Path, precision: str
) -> None:
    run, output = tmp_path / "run", tmp_path / "evaluation"
    overrides = [*TINY_RUN, f"train.precision={precision}", "train.epochs=2", "train.ema_decay=0.9"]
    cli.succeed("train", empty_yaml, *overrides, "--output", run)
    cli.succeed(
        *("evaluate", run, "--split", "validation", "--device", "cpu", "--precision", precision), *("--output", output)
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max(lines, key=lambda metrics: (metrics["val_top1"], -metrics["val_loss"]))
    evaluation = json.loads((output / "evaluation.json").read_text())
    assert evaluation["num_images"] == 143
    assert evaluation["top1"] == best["val_top1"]
    assert evaluation["loss"] == pytest.approx(best["val_loss"], abs=1e-6)


@pytest.mark.parametrize(("compiled", "kept"), [("true", True), ("false", False)])
def test_compiled_code_is_kept_in_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str, kept: bool
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    overrides = [*TINY_RUN, f"train.compile={compiled}", f"data.cache_dir={tmp_path / 'cache'}"]
    config = resolve_config({}, overrides, tmp_path / "run", resume=False)
    build_run(config, directory=tmp_path / "run", process=Process(), device_name="cpu")
    directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    assert (str(tmp_path / "cache" / "compiled") in directory) is kept
