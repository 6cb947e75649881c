"""What the user sees of a run. The loop tells observers what happened and knows none of them."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vit.runtime.progress import Advance, show_progress
from vit.training.remaining import RemainingTime
from vit.training.run_directory import METRICS_FILE, update_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG_EVERY_STEPS = 20  # fixed, so that a resumed run's curves have the same points
_DISPLAY_SECONDS = 0.5  # between updates of the progress bar: reading a result waits for the device


StepMetrics = dict[str, Any]


class Observer:
    """A callback of a run: told of its events, in the main process. Each method may be left as it is. Where `on_step`
    or `on_epoch` returns True, the run saves its state and ends there, as `vit.train` does at the end of the plan;
    `resume` continues it. One that raises an exception is told nothing more, and training goes on without it."""

    is_essential = False  # whether the run ends where this fails

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        """The run begins, or goes on after `step` steps; `settings`: "section.key" → value of its configuration."""

    def on_step(self, metrics: StepMetrics) -> bool | None:
        """A step was done: its epoch and step (counted from 1), learning_rate, images_per_second; loss, top1 of the
        batch (0 to 1) and gradient_norm as tensors: float() of one waits for the device."""

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> bool | None:
        """An epoch has ended: its line of metrics.jsonl, and the model that was evaluated, in evaluation mode;
        `val_loss` and `val_top1` are None after an epoch without an evaluation."""

    def on_message(self, text: str) -> None:
        """A sentence for the user."""

    def on_end(self) -> None:
        """The run has ended or was stopped, also by an error."""


class MetricsFile(Observer):
    """`metrics.jsonl`: one object an epoch."""

    is_essential = True

    def __init__(self, directory: Path) -> None:
        self.path = directory / METRICS_FILE

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        update_metrics(self.path, step=step)

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        # a run killed between this line and the epoch's checkpoint comes here again
        update_metrics(self.path, metrics, step=metrics["step"] - 1)


@dataclass(eq=False)
class TensorBoard(Observer):
    """Curves, images and the configuration, as text and as hyper-parameters, beside `metrics.jsonl`; a resumed run's
    curves go on where its checkpoint was taken."""

    directory: Path  # of the run
    at_start: Callable[["SummaryWriter"], None] | None = None
    at_evaluation: Callable[["SummaryWriter", nn.Module, int], None] | None = None
    at_end: Callable[["SummaryWriter", int], None] | None = None  # with the last epoch's step

    def __post_init__(self) -> None:
        self.writer: Any = None  # a SummaryWriter; torch's types lack half of it
        self._step: int | None = None
        self._end: Any = None  # the message that ends a session of hyper-parameters

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # what a killed process logged after its last checkpoint is superseded
        self.writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=step + 1 if step else None)
        if step == 0 and self.at_start:
            self.at_start(self.writer)
        # what `add_hparams` writes, but into this run
        kinds = bool | int | float | str
        plain = {key: value if isinstance(value, kinds) else str(value) for key, value in settings.items()}
        *begin, self._end = hparams(plain, {"epoch/val_top1": 0.0})  # type: ignore[no-untyped-call]
        for message in begin if step == 0 else ():
            self.writer.file_writer.add_summary(message)
        self.writer.add_text("configuration", "\n".join(f"    {key}: {value}" for key, value in settings.items()), step)
        self.writer.flush()

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics["step"] % LOG_EVERY_STEPS:
            return
        for name in ("loss", "gradient_norm", "learning_rate"):
            self.writer.add_scalar(f"step/{name}", float(metrics[name]), metrics["step"])

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        for key, value in metrics.items():
            if key not in ("epoch", "step") and value is not None:
                self.writer.add_scalar(f"epoch/{key}", value, metrics["step"])
        if self.at_evaluation and metrics["val_loss"] is not None:
            self.at_evaluation(self.writer, model, metrics["step"])
        self.writer.flush()
        self._step = metrics["step"]

    def on_end(self) -> None:
        if self.writer is not None:
            with closing(self.writer):
                if self._step is not None:
                    self.writer.file_writer.add_summary(self._end)
                    if self.at_end:
                        self.at_end(self.writer, self._step)


class ProgressBar(Observer):
    """A bar with loss, accuracy, images/s and time left, and a line an epoch."""

    def __init__(self, remaining: RemainingTime) -> None:
        self.remaining = remaining
        self._context = ExitStack()
        self._advance: Advance | None = None
        self._step, self._displayed_at = 0, 0.0

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        self._advance = self._context.enter_context(show_progress("epoch 1", total_steps, timed=False))
        self.remaining.on_start(step=step)
        self._advance(step)
        self._step = step

    def on_step(self, metrics: StepMetrics) -> None:
        assert self._advance is not None
        if time.perf_counter() - self._displayed_at < _DISPLAY_SECONDS:
            return
        self._displayed_at = time.perf_counter()
        self.remaining.on_step(metrics["step"])
        title = f"epoch {metrics['epoch']}  loss {metrics['loss']:.3f}  top-1 {metrics['top1']:.1%}"
        title += f"  {metrics['images_per_second']:,.0f} images/s{self._describe_remaining()}"
        self._advance(metrics["step"] - self._step, title)
        self._step = metrics["step"]

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
