"""The commands, from training to export, on the pretend device and on the CPU: with equal results."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TINY_RUN, Launcher
from tests.device.conftest import Counter
from vit.evaluation import cost


@pytest.fixture
def both(npu: Counter, cli: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """both(command, …) runs it on "npu" and on the CPU; gives its two outcomes and directories."""
    monkeypatch.setattr(cost, "_MOST", 3)
    monkeypatch.setattr(cost, "_WARM_UP", 1)

    def run(*command: object, output: bool = True) -> list[Any]:
        found = []
        for device in ("npu", "cpu"):
            directory = tmp_path / f"{command[0]}-{device}"
            written = ["--output", directory] if output else []
            found.append((cli.succeed(*command, "--device", device, *written), directory))
        return found

    return run


def test_train_resume_and_export(npu: Counter, cli: Launcher, empty_yaml: Path, tmp_path: Path) -> None:
    """With all that a run shows: pages, curves, attention maps of validation images."""
    overrides = [*TINY_RUN, "train.max_steps=6", "train.epochs=1", "train.ema_decay=0.9", "train.attention_maps=2"]
    for device in ("npu", "cpu"):
        cli.succeed("train", empty_yaml, *overrides, f"train.device={device}", "--output", tmp_path / device)
    found, expected = (json.loads((tmp_path / device / "metrics.jsonl").read_text()) for device in ("npu", "cpu"))
    for key in ("train_loss", "train_top1", "val_loss", "val_top1"):
        assert found[key] == pytest.approx(expected[key], rel=1e-3), key
    npu.clear()
    cli.succeed("train", "--output", tmp_path / "npu", "--resume", "train.device=npu")
    for form in ("timm", "torch-export"):
        cli.succeed("export", tmp_path / "npu", "--to", form, "--output", tmp_path / form)


def test_evaluate(both: Any, tiny_run: Path) -> None:
    options = ("--mirrored", "--shift", "--rotate", "--precision", "float32", "--pictures", 2)
    (_, found), (_, expected) = both("evaluate", tiny_run, *options)
    of_npu, of_cpu = (json.loads((path / "evaluation.json").read_text()) for path in (found, expected))
    for key in ("top1", "loss", "ece", "sweeps", "reliability"):
        assert np.allclose(*map(numbers, (of_npu[key], of_cpu[key])), atol=1e-3), key


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [x for child in (value.values() if isinstance(value, dict) else value) for x in numbers(child)]
    return [float(value)] if isinstance(value, int | float) else []


def test_predict(both: Any, tiny_run: Path, photo: Path) -> None:
    (found, _), (expected, _) = both("predict", tiny_run, photo, "--format", "csv", output=False)
    rows = [list(csv.reader(io.StringIO(outcome.out))) for outcome in (found, expected)]
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]]


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    from PIL import Image

    path = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    return path


def test_attention_with_pages_and_curves(both: Any, tiny_run: Path) -> None:
    options = ("--method", "rollout,libra-removal", "--format", "png,npz,html,tensorboard", "--images", 4)
    (_, found), (_, expected) = both("attention", tiny_run, *options)
    with np.load(found / "maps.npz") as maps, np.load(expected / "maps.npz") as others:
        assert maps.files == others.files
        for name in maps.files:
            if maps[name].dtype.kind == "f":
                assert np.abs(maps[name] - others[name]).max() <= 1e-3 * np.abs(others[name]).max(), name


def test_faithfulness(both: Any, tiny_run: Path) -> None:
    """Which failed on CUDA: orders of patches were made on the host and met logits of the device."""
    options = ("--methods", "rollout,gae", "--images", 8)
    (_, found), (_, expected) = both("faithfulness", tiny_run, *options)
    of_npu, of_cpu = (json.loads((path / "faithfulness.json").read_text())["metrics"] for path in (found, expected))
    for metric in of_cpu:
        means = [[of[metric]["methods"][name]["mean"] for name in of_cpu[metric]["methods"]] for of in (of_npu, of_cpu)]
        assert np.allclose(*means, atol=1e-2, equal_nan=True), (metric, means)
