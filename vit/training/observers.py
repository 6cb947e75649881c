"""What the user sees of a run. The loop tells observers what happened and knows none of them."""

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vit.runtime.progress import Advance, show_progress
from vit.training.plan import TrainingPlan
from vit.training.run_directory import METRICS_FILE, update_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG_EVERY_STEPS = 20  # fixed, so that a resumed run's curves have the same points
_DISPLAY_SECONDS = 0.5  # between updates of the progress bar: reading a result waits for the device


StepMetrics = dict[str, Any]


class Observer:
    """A callback of a run: told of its events, in the main process. Each method may be left as it
    is. Where `on_step` or `on_epoch` returns True, the run saves its state and ends there, as
    `vit.train` does at the end of the plan; `resume` continues it. One that raises an exception is
    told nothing more, and training goes on without it."""

    is_essential = False  # whether the run ends where this fails

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        """The run begins, or goes on after `step` steps; `settings`: "section.key" → value of its
        configuration."""

    def on_step(self, metrics: StepMetrics) -> bool | None:
        """A step was done: its epoch and step (counted from 1), learning_rate, images_per_second;
        loss, top1 of the batch (0 to 1) and gradient_norm as tensors: float() of one waits for the
        device."""

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> bool | None:
        """An epoch has ended: its line of metrics.jsonl, and the model that was evaluated, in
        evaluation mode; `val_loss` and `val_top1` are None after an epoch without an evaluation."""

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


class TrainingPictures:
    """What TensorBoard shows beside the curves. Each method may be left as it is."""

    def draw_start(self, writer: "SummaryWriter") -> None:
        """The run begins."""

    def draw_evaluation(self, writer: "SummaryWriter", model: nn.Module, step: int) -> None:
        """`model` was evaluated after `step` steps."""

    def draw_end(self, writer: "SummaryWriter", step: int) -> None:
        """The run has ended; its last epoch ended after `step` steps."""


class TensorBoard(Observer):
    """Curves, pictures and the configuration, as text and as hyper-parameters, beside
    `metrics.jsonl`; a resumed run's curves go on where its checkpoint was taken.

    Args:
        run_directory: the files are in `tensorboard` below it.
        pictures: what is drawn beside the curves; by default nothing.
    """

    def __init__(self, run_directory: Path, pictures: TrainingPictures | None = None) -> None:
        self.directory = run_directory / "tensorboard"
        self.pictures = pictures or TrainingPictures()
        self.writer: Any = None  # a SummaryWriter; torch's types lack half of it
        self._last_epoch_step: int | None = None
        self._end_message: Any = None  # ends a session of hyper-parameters

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        # takes a second to import
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # what a killed process logged after its last checkpoint is superseded
        purge_step = step + 1 if step else None
        _wait_for_new_file_name(self.directory)
        self.writer = SummaryWriter(str(self.directory), purge_step=purge_step)
        if step == 0:
            self.pictures.draw_start(self.writer)

        # what `add_hparams` writes, but into this run
        values = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in settings.items()
        }
        *start_messages, self._end_message = hparams(  # type: ignore[no-untyped-call]  # torch's
            values, {"epoch/val_top1": 0.0}
        )
        if step == 0:
            for message in start_messages:
                self.writer.file_writer.add_summary(message)
        text = "\n".join(f"    {key}: {value}" for key, value in settings.items())
        self.writer.add_text("configuration", text, step)
        self.writer.flush()

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics["step"] % LOG_EVERY_STEPS:
            return
        for name in ("loss", "gradient_norm", "learning_rate"):
            self.writer.add_scalar(f"step/{name}", float(metrics[name]), metrics["step"])

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        step = metrics["step"]
        for key, value in metrics.items():
            if key not in ("epoch", "step") and value is not None:
                self.writer.add_scalar(f"epoch/{key}", value, step)
        if metrics["val_loss"] is not None:
            self.pictures.draw_evaluation(self.writer, model, step)
        self.writer.flush()
        self._last_epoch_step = step

    def on_end(self) -> None:
        if self.writer is None:
            return
        with closing(self.writer):
            if self._last_epoch_step is not None:
                self.writer.file_writer.add_summary(self._end_message)
                self.pictures.draw_end(self.writer, self._last_epoch_step)


def _wait_for_new_file_name(directory: Path) -> None:
    """Wait until the next second where another writer began in this one. TensorBoard reads files in
    the order of their names, which begin with the second, and end with a process and a number that
    order nothing."""
    names = [path.name for path in directory.glob("events.out.tfevents.*")]
    newest = max((int(name.split(".")[3]) for name in names), default=0)
    while int(time.time()) == newest:
        time.sleep(0.01)


class ProgressBar(Observer):
    """A bar with loss, accuracy, images/s and time left, and a line an epoch.

    Args:
        plan: of the run.
        image_size: (height, width) of the data.
    """

    def __init__(self, plan: TrainingPlan, *, image_size: tuple[int, int]) -> None:
        self.plan = plan
        self.image_size = image_size
        self._context = ExitStack()
        self._advance: Advance | None = None
        self._displayed_step = 0
        self._displayed_at = 0.0

        # where this process began
        self._first_step = 0
        self._started_at = 0.0

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        self._advance = self._context.enter_context(
            show_progress("epoch 1", total_steps, timed=False)
        )
        self._advance(step)
        self._displayed_step = step
        self._first_step = step
        self._started_at = time.perf_counter()

    def on_step(self, metrics: StepMetrics) -> None:
        assert self._advance is not None
        if time.perf_counter() - self._displayed_at < _DISPLAY_SECONDS:
            return
        self._displayed_at = time.perf_counter()
        step = metrics["step"]
        self._advance(
            step - self._displayed_step,
            f"epoch {metrics['epoch']}  loss {metrics['loss']:.3f}  top-1 {metrics['top1']:.1%}"
            f"  {metrics['images_per_second']:,.0f} images/s"
            f"  {self.estimate_remaining_seconds(step) / 60:.1f} minutes left",
        )
        self._displayed_step = step

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        line = f"epoch {metrics['epoch']}  loss {metrics['train_loss']:.3f}"
        if metrics["val_loss"] is not None:
            line += (
                f"  validation loss {metrics['val_loss']:.3f}  top-1 {metrics['val_top1']:.2%}"
                f"  macro F1 {metrics['val_macro_f1']:.2%}"
            )
        line += (
            f"  {metrics['images_per_second']:,.0f} images/s  {metrics['elapsed_seconds']:.0f} s"
            f"  {self.estimate_remaining_seconds(metrics['step']) / 60:.1f} minutes left"
        )
        self.on_message(line)

    def on_message(self, text: str) -> None:
        print(text, file=sys.stderr)

    def on_end(self) -> None:
        self._context.close()

    def estimate_remaining_seconds(self, step: int) -> float:
        """Seconds from the end of step number `step`, counted from 1, to the end of the plan, where
        its steps and evaluations take what those of this process took."""
        done = self.plan.count_full_steps(self._first_step, step, self.image_size)
        remaining = self.plan.count_full_steps(step, self.plan.total_steps, self.image_size)
        return (time.perf_counter() - self._started_at) * remaining / done
