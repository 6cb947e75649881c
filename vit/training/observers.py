"""What the user sees of a run. The loop tells observers what happened and knows none of them."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vit.runtime.progress import Advance, show_progress
from vit.training.remaining import RemainingTime
from vit.training.run_directory import METRICS_FILE, update_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

StepMetrics = dict[str, float]  # epoch and step (counted from 1), loss, top1 of the batch (0 to 1), gradient_norm, …


class Observer:
    """Told of a run's events; each method may be left as it is. `step` is the number of steps done."""

    is_essential = False  # whether the run ends where this fails; others are left out from then on

    def on_start(self, *, step: int, total_steps: int) -> None: ...  # begins, or goes on after `step` steps
    def on_step(self, metrics: StepMetrics) -> None: ...  # some steps, two a second at most: for a display
    def on_log(self, metrics: StepMetrics) -> None: ...  # at every log interval, always the same steps: for curves
    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None: ...  # the model that was evaluated
    def on_message(self, text: str) -> None: ...  # for the user
    def on_end(self) -> None: ...  # ended or stopped, also after an error


class MetricsFile(Observer):
    """`metrics.jsonl`: one object an epoch."""

    is_essential = True

    def __init__(self, directory: Path) -> None:
        self.path = directory / METRICS_FILE

    def on_start(self, *, step: int, total_steps: int) -> None:
        update_metrics(self.path, step=step)

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        # a run killed between this line and the epoch's checkpoint comes here again
        update_metrics(self.path, metrics, step=metrics["step"] - 1)


@dataclass(eq=False)
class TensorBoard(Observer):
    """Curves and images beside `metrics.jsonl`; a resumed run's curves go on where its checkpoint was taken."""

    directory: Path  # of the run
    at_start: Callable[["SummaryWriter"], None] | None = None
    at_evaluation: Callable[["SummaryWriter", nn.Module, int], None] | None = None

    def __post_init__(self) -> None:
        self.writer: SummaryWriter | None = None

    def on_start(self, *, step: int, total_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what a killed process logged after its last checkpoint is superseded
        self.writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=step + 1 if step else None)
        if step == 0 and self.at_start:
            self.at_start(self.writer)

    def on_log(self, metrics: StepMetrics) -> None:
        assert self.writer is not None
        for name in ("loss", "gradient_norm", "learning_rate"):
            self.writer.add_scalar(f"step/{name}", metrics[name], int(metrics["step"]))

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        assert self.writer is not None
        for key, value in metrics.items():
            if key not in ("epoch", "step") and value is not None:
                self.writer.add_scalar(f"epoch/{key}", value, metrics["step"])
        if self.at_evaluation and metrics["val_loss"] is not None:
            self.at_evaluation(self.writer, model, metrics["step"])
        self.writer.flush()

    def on_end(self) -> None:
        if self.writer is not None:
            self.writer.close()


class ProgressBar(Observer):
    """A bar with loss, accuracy, images/s and time left, and a line an epoch."""

    def __init__(self, remaining: RemainingTime) -> None:
        self.remaining = remaining
        self._context = ExitStack()
        self._advance: Advance | None = None
        self._step = 0

    def on_start(self, *, step: int, total_steps: int) -> None:
        self._advance = self._context.enter_context(show_progress("epoch 1", total_steps, timed=False))
        self.remaining.on_start(step=step)
        self._advance(step)
        self._step = step

    def on_step(self, metrics: StepMetrics) -> None:
        assert self._advance is not None
        self.remaining.on_step(int(metrics["step"]))
        title = f"epoch {metrics['epoch']}  loss {metrics['loss']:.3f}  top-1 {metrics['top1']:.1%}"
        title += f"  {metrics['images_per_second']:,.0f} images/s{self._describe_remaining()}"
        self._advance(int(metrics["step"]) - self._step, title)
        self._step = int(metrics["step"])

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        count = self.remaining.plan.batch_size * ((metrics["step"] - 1) % self.remaining.plan.steps_per_epoch + 1)
        seconds, is_evaluated = count / metrics["images_per_second"], metrics["val_loss"] is not None
        self.remaining.on_epoch(metrics["step"], train_seconds=seconds, is_evaluated=is_evaluated)
        line = f"epoch {metrics['epoch']}  loss {metrics['train_loss']:.3f}"
        if metrics["val_loss"] is not None:
            line += f"  validation loss {metrics['val_loss']:.3f}  top-1 {metrics['val_top1']:.2%}"
            line += f"  macro F1 {metrics['val_macro_f1']:.2%}"
        line += f"  {metrics['images_per_second']:,.0f} images/s  {metrics['elapsed_seconds']:.0f} s"
        self.on_message(line + self._describe_remaining())

    def _describe_remaining(self) -> str:
        seconds = self.remaining.estimate()
        return "" if seconds is None else f"  {seconds / 60:.1f} minutes left"

    def on_message(self, text: str) -> None:
        print(text, file=sys.stderr)

    def on_end(self) -> None:
        self._context.close()
