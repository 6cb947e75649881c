"""What a person sees of a run. The loop tells observers what happened and knows none of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vit.training.run_directory import METRICS_FILE, append_metrics, truncate_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class StepReport:
    """One training step, read from the device."""

    epoch: int
    step: int  # global, counted from 1
    loss: float
    top1: float  # 0 to 1, of the batch
    grad_norm: float
    learning_rate: float
    images_per_second: float
    seconds_left: float


class Observer:
    """Told of a run's events; each method may be left as it is. `step` is the number of steps done."""

    def on_start(self, *, step: int, total_steps: int) -> None:
        """The run begins, or goes on after `step` steps."""

    def on_step(self, report: StepReport) -> None:
        """Some steps, a few a second: for the eye."""

    def on_log(self, report: StepReport) -> None:
        """Every so many steps, always the same ones: for the record."""

    def on_epoch(self, row: dict[str, Any], model: nn.Module) -> None:
        """An epoch ended. `model` is the one that was evaluated, in evaluation mode."""

    def on_message(self, text: str) -> None:
        """Something a person should read."""

    def on_end(self) -> None:
        """The run ended or stopped; also after an error."""


class MetricsFile(Observer):
    """`metrics.jsonl`: one object an epoch."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / METRICS_FILE

    def on_start(self, *, step: int, total_steps: int) -> None:
        truncate_metrics(self.path, step=step)

    def on_epoch(self, row: dict[str, Any], model: nn.Module) -> None:
        # a run killed between this row and the epoch's checkpoint comes here again
        truncate_metrics(self.path, step=row["step"] - 1)
        append_metrics(self.path, row)


class TensorBoard(Observer):
    """Curves and pictures beside `metrics.jsonl`; a resumed run's curves go on where its checkpoint was taken."""

    def __init__(
        self,
        directory: Path,
        *,
        at_start: Callable[["SummaryWriter"], None] | None = None,
        at_evaluation: Callable[["SummaryWriter", nn.Module, int], None] | None = None,
    ) -> None:
        self.directory = directory / "tensorboard"
        self.at_start = at_start
        self.at_evaluation = at_evaluation
        self.writer: SummaryWriter | None = None

    def on_start(self, *, step: int, total_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what a killed process logged after its last checkpoint is superseded
        self.writer = SummaryWriter(str(self.directory), purge_step=step + 1 if step else None)
        if step == 0 and self.at_start:
            self.at_start(self.writer)

    def on_log(self, report: StepReport) -> None:
        assert self.writer is not None
        self.writer.add_scalar("step/loss", report.loss, report.step)
        self.writer.add_scalar("step/gradient_norm", report.grad_norm, report.step)
        self.writer.add_scalar("step/learning_rate", report.learning_rate, report.step)

    def on_epoch(self, row: dict[str, Any], model: nn.Module) -> None:
        assert self.writer is not None
        for key, value in row.items():
            if key not in ("epoch", "step") and value is not None:
                self.writer.add_scalar(f"epoch/{key}", value, row["step"])
        if self.at_evaluation and row["val_loss"] is not None:
            self.at_evaluation(self.writer, model, row["step"])
        self.writer.flush()

    def on_end(self) -> None:
        if self.writer is not None:
            self.writer.close()


class ProgressBar(Observer):
    """A live bar with loss, accuracy, images/s and time left; plain lines where there is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps  {task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=None, epoch=1, figures="")

    def on_start(self, *, step: int, total_steps: int) -> None:
        self.bar.start()
        self.bar.update(self.task, completed=step, total=total_steps)

    def on_step(self, report: StepReport) -> None:
        figures = f"loss {report.loss:.3f}  top-1 {report.top1:.1%}  {report.images_per_second:,.0f} images/s"
        self.bar.update(self.task, completed=report.step, epoch=report.epoch + 1, figures=figures)

    def on_epoch(self, row: dict[str, Any], model: nn.Module) -> None:
        validation = (
            f"  validation loss {row['val_loss']:.3f}  top-1 {row['val_top1']:.2%}"
            if row["val_loss"] is not None
            else ""
        )
        self.console.print(
            f"epoch {row['epoch']}  loss {row['train_loss']:.3f}{validation}  "
            f"{row['images_per_second']:,.0f} images/s  {row['elapsed_seconds']:.0f} s",
            highlight=False,
        )

    def on_message(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def on_end(self) -> None:
        self.bar.stop()
