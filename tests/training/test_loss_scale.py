"""float16 and its loss scale."""

import copy
from pathlib import Path

import pytest
import torch

from tests.training.conftest import MakeRun, flatten, read_metrics, run_until
from tests.training.test_train_step import build_step, draw_batch, weights
from vit.runtime.threads import BatchThreads
from vit.training.train_step import TrainStep


def build_half_step(*, factor: float | None = None, **arguments) -> TrainStep:
    """A step in float16."""
    step = build_step(precision="float16", **arguments)
    if factor is not None:
        step.loss_scale.fill_(factor)
    return step


def read_factor(step: TrainStep) -> float:
    return float(step.loss_scale)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "lr": 1e-3},
        {"optimizer": "muon", "lr": 1e-3, "clip_grad": 0.1},
        {"optimizer": "sgd", "lr": 0.05, "clip_grad": 0.1, "grad_accum_steps": 3},
        {"optimizer": "sgd", "lr": 0.05, "threads": 2, "grad_accum_steps": 3},
        {"optimizer": "muon", "lr": 1e-3, "threads": 2, "clip_grad": 0.1},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
def test_float16_follows_float32(options):
    losses = {"float16": [], "float32": []}
    norms = copy.deepcopy(losses)
    for precision in losses:
        arguments = options | {"precision": precision}
        if count := options.get("threads"):
            arguments["threads"] = BatchThreads(count)
        step = build_step(**arguments)
        for seed in range(10):
            result = step(*draw_batch(32, seed=seed))
            losses[precision].append(float(result.loss))
            norms[precision].append(float(result.grad_norm))
    assert losses["float16"] == pytest.approx(losses["float32"], rel=2e-3)
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_gradients_that_overflow_change_nothing_but_the_factor(optimizer):
    step = build_half_step(optimizer=optimizer, lr=1e-3, ema_decay=0.9, clip_grad=1.0)
    step(*draw_batch())
    step.loss_scale.fill_(2.0**32)
    kept = copy.deepcopy(flatten(step.state_dict()))
    result = step(*draw_batch(seed=1))
    assert not torch.isfinite(result.grad_norm)
    assert result.finite  # a smaller factor may do
    assert read_factor(step) == 2**31
    changed = {"/loss_scale/factor", "/loss_scale/steps", "/num_steps"}
    # the learning rates are those of the next step
    for name, value in flatten(step.state_dict()).items():
        if name not in changed:
            assert torch.equal(value, kept[name]), name
    before = weights(step)
    num_skipped = 0
    while torch.equal(weights(step), before):
        step(*draw_batch(seed=1))
        num_skipped += 1
        assert num_skipped < 32
    assert 1 < read_factor(step) < 2**31


OVERRIDES = ["train.precision=float16", "train.checkpoint_every_steps=4"]


@pytest.mark.extended
def test_a_killed_run_is_resumed_to_the_same_bits_with_its_factor(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """It begins with steps that overflow."""

    def make(name: str, *, factor: float = 2.0**32):
        run = make_run(tmp_path / name, *OVERRIDES)
        run.trainer.train_step.loss_scale.fill_(factor)
        return run

    whole = make("whole")
    whole.trainer.train()
    run_until(make("broken"), 5)
    resumed = make("broken", factor=3.0)
    assert resumed.trainer.resume()
    assert resumed.trainer.progress.step == 4
    assert read_factor(resumed.trainer.train_step) == 2.0**28
    resumed.trainer.train()

    states = [flatten(run.trainer.train_step.state_dict()) for run in (whole, resumed)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
    metrics = read_metrics(tmp_path / "whole")
    assert metrics == read_metrics(tmp_path / "broken")
    assert 1 < read_factor(whole.trainer.train_step) < 2.0**28
