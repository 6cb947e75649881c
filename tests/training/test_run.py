"""Validation while a model trains gives what `vit evaluate` reports of it."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY_RUN, Launcher, change_metadata


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_best_model_is_chosen_by_the_reports_numbers(
    cli: Launcher, empty_yaml: Path, tmp_path: Path, precision: str
) -> None:
    run, output = tmp_path / "run", tmp_path / "evaluation"
    overrides = [*TINY_RUN, f"train.precision={precision}", "train.epochs=2", "train.ema_decay=0.9"]
    cli.succeed("train", empty_yaml, *overrides, "--output", run)
    # The report's loss is that of the probabilities, to which the temperature belongs.
    change_metadata(run / "model.safetensors", {"temperature": 1.0})
    cli.succeed(
        *("evaluate", run, "--split", "validation", "--device", "cpu", "--precision", precision),
        *("--output", output),
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max(lines, key=lambda metrics: (metrics["val_top1"], -metrics["val_loss"]))
    evaluation = json.loads((output / "evaluation.json").read_text())
    assert evaluation["num_images"] == 143
    assert evaluation["metrics"]["top1"] == best["val_top1"]
    assert evaluation["metrics"]["loss"] == pytest.approx(best["val_loss"], abs=1e-6)
