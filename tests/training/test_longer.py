"""A run that has ended is trained longer, and cross-validated as it is configured."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vit
from tests.training.conftest import MakeRun, run_until
from tests.training.test_resume import assert_equal_runs
from tests.training.test_user_objects import CONFIG, Arrays, arrays
from vit.bundle import load_bundle
from vit.training.trainer import Trainer

__all__ = ["arrays"]  # a fixture


def test_a_run_that_has_ended_is_trained_longer_and_resumes_exactly(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(tmp_path / "whole").trainer.train()
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    longer = make_run(tmp_path / "whole", "train.epochs=5").trainer
    assert longer.resume()
    assert (longer.progress.step, longer.plan.total_steps) == (15, 25)
    # the rates of a run of 5 epochs
    step = longer.train_step
    whole = make_run(tmp_path / "other", "train.epochs=5").trainer.train_step
    whole.num_steps = 15
    assert step.learning_rate == whole.learning_rate > 1e-6
    longer.train()
    assert step.learning_rate < 1e-9

    parts = make_run(tmp_path / "parts", "train.epochs=5")
    parts.trainer.resume()
    run_until(parts, 22)
    resumed = make_run(tmp_path / "parts", "train.epochs=5").trainer
    assert resumed.resume()
    resumed.train()
    assert_equal_runs(tmp_path / "whole", tmp_path / "parts")


def test_what_makes_no_run_longer_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    run_until(make_run(tmp_path / "half", "train.checkpoint_every_steps=5"), 12)
    with pytest.raises(ValueError, match=r"train\.epochs is 3 there, 5 here"):
        make_run(tmp_path / "half", "train.epochs=5").trainer.resume()
    ended = make_run(tmp_path / "run", "train.max_steps=6", "train.max_minutes=9")
    ended.trainer.train()
    with pytest.raises(ValueError, match=r"train\.max_steps is 6 there, 4 here"):
        make_run(tmp_path / "run", "train.max_steps=4", "train.max_minutes=9").trainer.resume()


def test_folds_of_a_run_are_trained_as_it_is_configured(
    arrays: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(name: str, **options: Any) -> np.ndarray:
        run = vit.train(CONFIG, output=tmp_path / name, dataset=arrays, folds=3, **options)
        # the model of the run has seen all images
        assert run.bundle.data["splits"]["train"]["num_images"] == 90
        assert not (tmp_path / name / "folds").exists()
        found = np.load(tmp_path / name / "predictions.npz")
        # two epochs of one block tell most colours
        assert (found["labels"] == found["predicted"]).mean() > 0.5
        return found["logits"]

    logits = train("whole")
    assert len(logits) == 90

    # killed in the second fold
    def fail(trainer: Trainer) -> None:
        if trainer.directory.name == "2":
            raise KeyboardInterrupt
        finish(trainer)

    finish = Trainer._finish_epoch
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_finish_epoch", fail)
        with pytest.raises(KeyboardInterrupt):
            train("parts")
    assert load_bundle(tmp_path / "parts" / "folds" / "1").metadata["step"] == 6
    assert np.array_equal(train("parts", resume=True), logits)
