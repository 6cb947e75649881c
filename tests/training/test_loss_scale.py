"""float16 and its loss scale."""

import copy

import pytest
import torch

from tests.training.conftest import flatten
from tests.training.test_train_step import build_step, draw_batch, weights
from vit.runtime.threads import BatchThreads


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
    step = build_step(
        precision="float16", optimizer=optimizer, lr=1e-3, ema_decay=0.9, clip_grad=1.0
    )
    step(*draw_batch())
    step.loss_scale.fill_(2.0**32)
    kept = copy.deepcopy(flatten(step.state_dict()))
    result = step(*draw_batch(seed=1))
    assert not torch.isfinite(result.grad_norm)
    assert result.finite  # a smaller factor may do
    assert float(step.loss_scale) == 2**31
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
    assert 1 < float(step.loss_scale) < 2**31
