"""More epochs than a run was to have: it ends as one of so many ends, bit for bit, or says what to do instead."""

from pathlib import Path

import pytest

from tests.conftest import Launcher
from tests.training.conftest import TINY
from tests.training.test_resume import assert_equal_runs

CONSTANT = [*TINY, "schedule.name=constant-cooldown", "schedule.cooldown_fraction=0.5", "train.device=cpu"]


def train(cli: Launcher, yaml: Path, output: Path, *overrides: str) -> Path:
    cli.succeed("train", yaml, *CONSTANT, *overrides, "--output", output)
    return output


def test_a_finished_run_goes_on_to_more_epochs(cli: Launcher, empty_yaml: Path, tmp_path: Path) -> None:
    whole = train(cli, empty_yaml, tmp_path / "whole", "train.epochs=8")
    run = train(cli, empty_yaml, tmp_path / "run", "train.epochs=4")
    before = (run / "model.safetensors").read_bytes()
    text = cli.succeed("train", "--resume", "--output", run, "train.epochs=8").text
    assert "resuming after step 10 of 40" in text  # of 20, the last 10 were its cooldown
    assert_equal_runs(whole, run)
    assert (run / "config.yaml").read_text() == (whole / "config.yaml").read_text()
    assert (run / "model-4-epochs.safetensors").read_bytes() == before
    # from now on it is a run of eight epochs
    assert "resuming after step 40 of 40" in cli.succeed("train", "--resume", "--output", run).text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.name=cosine"], "only a schedule constant-cooldown goes on to more epochs"),
        (["augment.mixup=0.2", "augment.mix_until=0.2"], "has no checkpoint of the first"),
        (["train.evaluate_every_epochs=4"], "has no checkpoint of the first 10 steps"),
    ],
    ids=["cosine", "mixing ended", "never saved"],
)
def test_others_are_refused_and_left_as_they_were(
    cli: Launcher, empty_yaml: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    run = train(cli, empty_yaml, tmp_path / "run", "train.epochs=4", *overrides)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    text = cli.fail("train", "--resume", "--output", run, "train.epochs=8")
    assert message in text
    assert f"--init {run}" in text
    assert {path: path.read_bytes() for path in before} == before
    assert "train.epochs differ" in cli.fail("train", "--resume", "--output", run, "train.epochs=2")
    assert "train.seed differ" in cli.fail("train", "--resume", "--output", run, "train.epochs=8", "train.seed=1")
