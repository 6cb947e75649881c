"""A loss or gradient that is not finite stops the run where it happened, or is skipped and
counted. Attention scores are logged, and a warning comes before they are too large."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.conftest import MakeRun, read_curves, read_metrics
from vit.training.attention_scores import measure_scores
from vit.training.observers import Observer
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


class Messages(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


class Grow(Observer):
    """Multiplies the queries of the second block by a number after each epoch."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        layer = self.run.trainer.train_step.module.blocks[1].attn
        with torch.no_grad():
            layer.qkv.weight[:16] *= self.factor

    run: Run


def test_the_largest_attention_scores_are_those_of_the_formula(
    make_run: MakeRun, tmp_path: Path
) -> None:
    model = make_run(tmp_path).trainer.train_step.module.double()
    images = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    expected = {}
    with torch.no_grad():
        tokens = model.eval()._embed(images[:4])
        for number, block in enumerate(model.blocks):
            packed = block.attn.qkv(block.norm1(tokens)).unflatten(-1, (3, 2, 8))
            query, key = packed[:, :, 0].transpose(1, 2), packed[:, :, 1].transpose(1, 2)
            expected[f"blocks.{number}.attn"] = float((query @ key.mT).abs().max()) / 8**0.5
            tokens = block(tokens)
    assert measure_scores(model.train(), images, precision="float32") == pytest.approx(expected)
    assert model.training
    assert measure_scores(nn.Linear(2, 2), torch.zeros(1, 2), precision="float32") == {}


def test_attention_scores_are_logged_and_growing_ones_warned_of_once(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for folder, factor in (("grown", 1e4), ("kept", 1.0)):
        run = make_run(tmp_path / folder)
        grow, messages = Grow(factor), Messages()
        grow.run = run
        run.trainer.observers += [grow, messages]
        run.trainer.train()
        lines = read_metrics(tmp_path / folder)
        logged = [metrics["largest_attention_score"] for metrics in lines]
        curves = read_curves(tmp_path / folder)
        assert [value for _, value in curves["epoch/largest_attention_score"]] == pytest.approx(
            logged
        )
        warnings = [text for text in messages.texts if "attention scores" in text]
        if factor == 1.0:
            assert max(logged) < 100
            assert warnings == []
        else:
            assert logged[1] > 100
            assert len(warnings) == 1
            assert warnings[0].startswith("attention scores of blocks.1.attn have grown to ")
