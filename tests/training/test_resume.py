"""A run that dies anywhere and is resumed ends where an uninterrupted one ends, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import Killed, MakeRun, flatten, read_curves, read_metrics, run_until
from vit.bundle import load_bundle
from vit.training.observers import Observer


@pytest.fixture(scope="module")
def overrides() -> list[str]:
    return [
        "train.checkpoint_every_steps=2",
        "augment.mixup=0.2",
        "train.grad_accum_steps=2",
        "train.patch_drop_rates=[[0.5,0.5],[1,0]]",
    ]


def assert_equal_runs(first: Path, second: Path) -> None:
    weights = [load_bundle(path).model.state_dict() for path in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert read_metrics(first) == read_metrics(second)
    assert read_curves(first) == read_curves(second)


@pytest.fixture(scope="module")
def whole(
    make_run: MakeRun, overrides: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    """An uninterrupted run, and its state at its end."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    run = make_run(directory, *overrides)
    run.trainer.train()
    return directory, flatten(run.trainer.train_step.state_dict())


@pytest.mark.parametrize(
    "steps", [(3, 6, 11, 15), pytest.param((1, 2, 5), marks=pytest.mark.extended)]
)
def test_a_run_that_is_killed_again_and_again_equals_an_uninterrupted_run(
    make_run: MakeRun,
    whole: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    overrides: list[str],
    steps: tuple[int, ...],
) -> None:
    directory, whole_state = whole
    run = make_run(tmp_path / "broken", *overrides)
    for step in steps:
        run_until(run, step)
        run = make_run(tmp_path / "broken", *overrides)
        run.trainer.resume()
        done = step - 1  # checkpoints are written every second step, and after each epoch of five
        assert run.trainer.progress.step == max(done // 2 * 2, done // 5 * 5)
    run.trainer.train()
    assert_equal_runs(directory, tmp_path / "broken")
    state = flatten(run.trainer.train_step.state_dict())
    assert whole_state.keys() == state.keys()
    assert all(torch.equal(whole_state[name], state[name]) for name in state)


def test_a_run_stopped_after_the_last_step_of_an_epoch_and_of_the_run_goes_on(
    make_run: MakeRun,
    whole: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    overrides: list[str],
) -> None:
    class Stop(Observer):
        def on_step(self, metrics: dict[str, Any]) -> bool:
            return metrics["step"] in (5, 15)

    run = make_run(tmp_path / "stopped", *overrides)
    for step in (5, 15):
        run.trainer.observers.append(Stop())
        run.trainer.train()
        assert run.trainer.progress.step_in_epoch == 5
        run = make_run(tmp_path / "stopped", *overrides)
        assert run.trainer.resume()
        assert run.trainer.progress.step == step
    run.trainer.train()
    assert_equal_runs(whole[0], tmp_path / "stopped")


def test_a_kill_between_an_epochs_metrics_and_its_checkpoint_logs_them_once(
    make_run: MakeRun, tmp_path: Path
) -> None:
    overrides = ["train.checkpoint_every_steps=5"]  # an epoch's steps
    make_run(tmp_path / "whole", *overrides).trainer.train()
    broken = make_run(tmp_path / "broken", *overrides)
    save = broken.trainer._save

    def die_after_the_metrics() -> None:
        broken.trainer.writer.wait()
        if len(read_metrics(tmp_path / "broken")) == 2:
            raise Killed
        save()

    broken.trainer._save = die_after_the_metrics  # type: ignore[method-assign]
    with pytest.raises(Killed):
        broken.trainer.train()
    resumed = make_run(tmp_path / "broken", *overrides)
    assert resumed.trainer.resume()
    assert resumed.trainer.progress.epoch == 1
    resumed.trainer.train()
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")


def test_the_model_file_is_written_again_from_the_best_checkpoint(
    make_run: MakeRun,
    whole: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    overrides: list[str],
) -> None:
    run_until(make_run(tmp_path / "run", *overrides), 14)
    # what a kill while the model file was written would leave
    written = (tmp_path / "run" / "model.safetensors").read_bytes()
    (tmp_path / "run" / "model.safetensors").unlink()
    resumed = make_run(tmp_path / "run", *overrides)
    resumed.trainer.resume()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == written
    resumed.trainer.train()
    assert_equal_runs(whole[0], tmp_path / "run")


def test_a_run_that_has_ended_is_trained_longer_and_resumes_exactly(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(tmp_path / "whole").trainer.train()
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    longer = make_run(tmp_path / "whole", "train.epochs=5").trainer
    longer.resume()
    assert (longer.progress.step, longer.plan.total_steps) == (15, 25)
    # the rate of a run of 5 epochs at this step
    other = make_run(tmp_path / "other", "train.epochs=5").trainer.train_step
    other.num_steps = 15
    assert longer.train_step.learning_rate == other.learning_rate > 1e-6
    longer.train()

    parts = make_run(tmp_path / "parts", "train.epochs=5")
    parts.trainer.resume()
    run_until(parts, 22)
    resumed = make_run(tmp_path / "parts", "train.epochs=5").trainer
    resumed.resume()
    resumed.train()
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_a_run_that_has_not_ended_keeps_its_length(make_run: MakeRun, tmp_path: Path) -> None:
    run_until(make_run(tmp_path, "train.checkpoint_every_steps=5"), 12)
    with pytest.raises(ValueError, match=r"train\.epochs is 3 there, 5 here"):
        make_run(tmp_path, "train.epochs=5").trainer.resume()
