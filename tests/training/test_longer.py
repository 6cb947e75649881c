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

__all__ = ["arrays"]  # a fixture


def test_a_run_that_has_ended_is_trained_longer_and_resumes_exactly(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(tmp_path / "whole").trainer.train()
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    longer = make_run(tmp_path / "whole", "train.epochs=5").trainer
    assert longer.resume()
    assert (longer.is_longer, longer.progress.step, longer.plan.total_steps) == (True, 15, 25)
    # the rate falls from its highest value again
    step = longer.train_step
    assert step.learning_rate == step.optimizer.param_groups[0]["initial_lr"]
    longer.train()
    assert step.learning_rate < 1e-9

    parts = make_run(tmp_path / "parts", "train.epochs=5")
    parts.trainer.resume()
    run_until(parts, 22)
    resumed = make_run(tmp_path / "parts", "train.epochs=5").trainer
    assert resumed.resume()
    assert not resumed.is_longer
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
    with pytest.raises(ValueError, match=r"the run has used its 1e-05 minutes; .*give more"):
        make_run(tmp_path / "run", "train.max_steps=8", "train.max_minutes=1e-5").trainer.resume()


def test_folds_of_a_run_are_trained_as_it_is_configured(arrays: Arrays, tmp_path: Path) -> None:
    def train(**options: Any) -> np.ndarray:
        run = vit.train(CONFIG, output=tmp_path, dataset=arrays, folds=3, **options)
        # the model of the run has seen all images
        assert run.bundle.data["splits"]["train"]["num_images"] == 90
        steps = [load_bundle(folder).metadata["step"] for folder in tmp_path.glob("folds/*")]
        assert steps == [8, 8, 8]
        found = np.load(tmp_path / "predictions.npz")
        # two epochs of one block tell most colours
        assert (found["labels"] == found["predicted"]).mean() > 0.5
        return found["logits"]

    logits = train()
    assert len(logits) == 90
    # a fold that was lost is trained again, the others are kept
    shutil.rmtree(tmp_path / "folds" / "2")
    assert np.array_equal(train(resume=True), logits)
