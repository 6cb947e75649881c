"""A loss or gradient that is not finite stops the run where it happened, or is skipped and
counted."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.conftest import MakeRun, read_metrics
from vit.training.run import Run


def poison(run: Run, *, step: int) -> list[Tensor]:
    """Make one block's output NaN in step number `step`; returns where the weights before it will
    be put."""
    before: list[Tensor] = []

    def spoil(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if run.trainer.progress.step == step - 1 and module.training:
            if not before:
                before.append(run.trainer.train_step.module.head.weight.detach().clone())
            return output * float("nan")
        # the search for the first bad module runs when the step has been counted
        return (
            output * float("nan")
            if before and run.trainer.plan.settings.on_nonfinite == "stop"
            else output
        )

    run.trainer.train_step.module.blocks[1].mlp.register_forward_hook(spoil)
    return before


def test_the_run_stops_and_names_step_images_and_module(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path, "train.checkpoint_every_steps=1")
    before = poison(run, step=8)
    with pytest.raises(
        ValueError, match=r"step 8: .* first seen in blocks\.1\.mlp; images digits/\d+"
    ) as error:
        run.trainer.train()
    assert "(256)" in str(error.value)
    assert torch.equal(run.trainer.train_step.module.head.weight, before[0])
    again = make_run(tmp_path, "train.checkpoint_every_steps=1")
    assert again.trainer.resume()
    assert again.trainer.progress.step == 7


def test_the_named_images_are_those_of_the_failing_batch(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    poison(run, step=7)
    with pytest.raises(ValueError, match="step 7") as error:
        run.trainer.train()
    batch = list(run.trainer.train_batches.epoch(1))[1]  # five steps an epoch
    assert f"images {run.data.train.ids[int(batch.sample_ids[0])]}," in str(error.value)


def test_such_a_step_can_be_skipped_and_is_counted(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path, "train.on_nonfinite=skip")
    poison(run, step=8)
    run.trainer.train()
    lines = read_metrics(tmp_path)
    assert [metrics["skipped_steps"] for metrics in lines] == [0, 1, 1]
    assert all(0 < metrics["train_loss"] < 10 for metrics in lines)
    assert all(
        bool(value.isfinite().all())
        for value in run.trainer.train_step.module.state_dict().values()
    )
