"""What version 0.1 wrote is read as it was meant: the same metrics, the same maps, the same run continued.

`data_files/v0.1-*` are two run directories of commit 87603b9 without the checkpoints of the last epoch; their
configurations, model files and optimizer states use that version's names. `expected.json` and `maps.npz` hold what it
computed from them.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Launcher
from vit.config import load_config
from vit.runtime.device import cpu_flags
from vit.training.identity import find_changes

RUNS = sorted((Path(__file__).parent / "data_files").glob("v0.1-*"))

pytestmark = pytest.mark.parametrize("old", RUNS, ids=lambda path: path.name)


def read_expected(old: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((old / "expected.json").read_text())
    return expected


def evaluate(cli: Launcher, run: Path, output: Path, *options: str) -> dict[str, Any]:
    cli.succeed(*("evaluate", run, "--output", output, "--precision", "float32", "--device", "cpu", *options))
    evaluation: dict[str, Any] = json.loads((output / "evaluation.json").read_text())
    return evaluation


def test_it_evaluates_to_the_same_metrics(cli: Launcher, old: Path, tmp_path: Path) -> None:
    expected = read_expected(old)["evaluation"]
    evaluation = evaluate(cli, old, tmp_path / "test")
    recipe = expected.pop("recipe")  # seeds that were evaluated by either version are one group of runs
    assert evaluation["recipe"] == recipe
    assert {name: evaluation[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    logged = json.loads((old / "metrics.jsonl").read_text().splitlines()[-1])
    validation = evaluate(cli, old, tmp_path / "validation", "--split", "validation")
    assert validation["top1"] == pytest.approx(logged["val_top1"])
    assert validation["loss"] == pytest.approx(logged["val_loss"], abs=1e-5)


def test_it_is_explained_by_the_same_maps(cli: Launcher, old: Path, tmp_path: Path) -> None:
    output = tmp_path / "maps"
    cli.succeed(*("attention", old, "--output", output, "--images", 2, "--method", "rollout,gae", "--device", "cpu"))
    with np.load(old / "maps.npz") as expected, np.load(output / "maps.npz") as maps:
        assert set(maps) == set(expected)
        for name in expected:
            np.testing.assert_allclose(maps[name], expected[name], atol=1e-5, err_msg=name)


def test_it_is_resumed_to_the_same_weights(cli: Launcher, old: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(old, run)
    (run / "model.safetensors").unlink()  # of the last epoch, which is trained again
    finished = cli.finish(cli.start("train", "--resume", "--output", run))
    assert "resuming after step 30 of 40" in finished.text
    weights, expected = (load_file(path / "model.safetensors") for path in (run, old))
    assert weights.keys() == expected.keys()
    recorded, flags = read_expected(old), " ".join(sorted(cpu_flags()))
    is_same_machine = recorded["torch"] == torch.__version__
    is_same_machine &= recorded["cpu_flags_sha256"] == hashlib.sha256(flags.encode()).hexdigest()
    for name in expected:  # another processor or library may add numbers in another order
        tolerance, found, before = 0.0 if is_same_machine else 1e-5, weights[name], expected[name]
        if not is_same_machine and name.endswith("attn.qkv.bias"):
            # the softmax doesn't depend on the keys' bias: its gradient is rounding alone, which AdamW scales up
            found, before = (
                torch.cat([third for i, third in enumerate(b.chunk(3)) if i != 1]) for b in (found, before)
            )
        torch.testing.assert_close(found, before, rtol=0, atol=tolerance)
    lines, logged = ((path / "metrics.jsonl").read_text().splitlines() for path in (run, old))
    assert len(lines) == len(logged)
    assert lines[0] == logged[0]


def test_its_configuration_has_not_changed(old: Path) -> None:
    assert find_changes(load_config(old / "config.yaml"), old / "config.yaml") == []
    config = load_config(old / "config.yaml")
    assert (config.model.global_pool, config.augment.re_prob) == ("avg", 0.1)
    assert (config.train.grad_accum_steps, config.train.grad_checkpointing) == (2, True)


def test_another_optimizer_is_refused_by_name(cli: Launcher, old: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(old, run)
    message = cli.fail("train", "optimizer.name=sgd", "--resume", "--output", run)
    assert "optimizer.name" in message
