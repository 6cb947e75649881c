"""Validation while a model trains gives what `vit evaluate` reports of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY_RUN, Launcher, change_metadata
from vit.config import load_config
from vit.training.print_plan import summarize_run
from vit.training.run import build_run


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


@pytest.mark.parametrize(
    ("wanted", "chosen"), [("auto", "weights"), ("weights", "weights"), ("none", "none")]
)
def test_the_plan_says_what_is_done_about_classes_of_other_sizes(
    tmp_path: Path, wanted: str, chosen: str
) -> None:
    for number in range(44):
        file = tmp_path / "images" / ("ant" if number < 40 else "bee") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (5 * number, 0, 0)).save(file)
    data = ["data.name=folder", f"data.root={tmp_path / 'images'}", "train.batch_size=8"]
    overrides = [*TINY_RUN, *data, f"train.class_balance={wanted}"]
    config = load_config({}, overrides)
    run = build_run(config, directory=tmp_path / "run", device_name="cpu")
    assert np.bincount(run.data.train.labels).tolist() == [
        29,
        2,
    ]  # after the test and the validation split
    assert summarize_run(run).get("class balance", "none") == chosen
