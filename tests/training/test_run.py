"""Validation while a model trains gives what `vit evaluate` reports of it."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY_RUN, Launcher, change_metadata
from tests.training.conftest import MakeRun


@pytest.mark.parametrize(
    "precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.extended)]
)
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


def test_a_warm_up_is_no_longer_than_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path, "schedule.warmup_epochs=5", "train.max_steps=4")
    factors = [run.trainer.train_step.lr_factor(step) for step in range(4)]
    assert factors == [0.25, 0.5, 0.75, 1.0]
