"""A run goes on from its own checkpoints alone."""

import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_RUN, BuildOnce, Launcher
from tests.training.conftest import MakeRun, read_curves, read_metrics, run_until
from tests.training.test_resume import assert_equal_runs
from vit.bundle import load_bundle
from vit.config import load_config
from vit.training.identity import compute_run_id, identify_run


@pytest.fixture
def half(make_run: MakeRun, build_once: BuildOnce, tmp_path: Path) -> Path:
    """A run of 15 steps that was killed in step 12, after its checkpoint of step 10."""
    half = build_once("half", lambda folder: run_until(make_run(folder), 12))
    return shutil.copytree(half, tmp_path / "half")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=1", "train.seed is 1 there, 0 here"),
        ("optimizer.lr=1e-2", "optimizer.lr is 0.01 there"),
        ("data.split_seed=1", "fingerprint of the training images is"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(
    make_run: MakeRun, half: Path, tmp_path: Path, override: str, message: str
) -> None:
    run_until(make_run(tmp_path / "other", override), 12)
    shutil.rmtree(half / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", half / "checkpoints")
    with pytest.raises(ValueError, match=message):
        make_run(half).trainer.resume()


def test_the_same_run_elsewhere_may_go_on_from_it(
    make_run: MakeRun, half: Path, tmp_path: Path
) -> None:
    make_run(tmp_path / "whole").trainer.train()
    shutil.copytree(half, tmp_path / "copy")
    harmless = ["data.workers=1", "train.checkpoint_every_steps=3", "train.device=cpu"]
    copy = make_run(tmp_path / "copy", *harmless, "data.max_unreadable_fraction=0.1")
    assert copy.trainer.resume()
    copy.trainer.train()
    assert_equal_runs(tmp_path / "whole", tmp_path / "copy")


def test_without_checkpoints_a_run_starts_anew_and_says_so(
    cli: Launcher, tiny_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(tiny_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    (run / "predictions.npz").write_bytes(b"")
    outcome = cli.succeed("train", "--resume", "train.max_steps=9", "--output", run)
    assert f"{run} holds no checkpoint; the run starts anew" in outcome.text
    assert not (run / "predictions.npz").exists()
    assert [line["step"] for line in read_metrics(run)] == [9]
    assert [step for step, _ in read_curves(run)["epoch/val_loss"]] == [9]
    assert load_bundle(run).metadata["step"] == 9


@pytest.mark.parametrize("options", [[], ["--resume"], ["--overwrite"]])
@pytest.mark.parametrize("name", ["model.safetensors", "metrics.jsonl"])
def test_a_strangers_file_is_not_taken_for_a_run(
    cli: Launcher, empty_yaml: Path, tmp_path: Path, name: str, options: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("{}\n")
    message = cli.fail("train", empty_yaml, *TINY_RUN, "--output", tmp_path / "run", *options)
    assert f"holds {name}, which is not part of a run" in message
    assert (tmp_path / "run" / name).read_text() == "{}\n"


def test_a_killed_worker_is_named_and_resume_goes_on(make_run: MakeRun, tmp_path: Path) -> None:
    overrides = [
        "data.pipeline=workers",
        "data.workers=1",
        "train.checkpoint_every_steps=1",
        "train.epochs=1",
    ]
    overrides += ["data.mean=[0.5, 0.5, 0.5]", "data.std=[0.5, 0.5, 0.5]"]
    make_run(tmp_path / "whole", *overrides).trainer.train()
    run = make_run(tmp_path / "run", *overrides)
    whole_step = type(run.trainer.train_step).__call__

    class Killing(type(run.trainer.train_step)):  # type: ignore[misc]
        def __call__(self, *arguments: Any) -> Any:
            if run.trainer.progress.step == 1:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, signal.SIGKILL)
            return whole_step(self, *arguments)

    run.trainer.train_step.__class__ = Killing
    # from Python 3.14 on its socket may be closed before torch looks
    with pytest.raises((RuntimeError, ConnectionResetError), match=r"DataLoader worker|reset"):
        run.trainer.train()
    resumed = make_run(tmp_path / "run", *overrides)
    assert resumed.trainer.resume()
    resumed.trainer.train()
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


def test_another_value_of_a_key_that_changes_numbers_is_another_run() -> None:
    def identify(*overrides: str) -> str:
        config = load_config(None, overrides)
        return compute_run_id(identify_run(config, "0" * 64, {}))

    assert identify("train.evaluate_every_epochs=2", "train.max_minutes=3") == identify()
    assert len({identify(), identify("train.seed=1"), identify("train.select_by=macro_f1")}) == 3
