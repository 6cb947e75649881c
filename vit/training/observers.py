"""What the user sees of a run. The loop tells observers what happened and knows none of them."""

import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vit.runtime.background_writer import BackgroundWriter
from vit.runtime.metrics_file import METRICS_FILE, append_metrics
from vit.runtime.progress import Advance, show_progress

LOG_EVERY_STEPS = 20  # fixed, so that a resumed run's curves have the same points
_LINE_SECONDS = 10  # between lines of epochs: a run of half a minute has a few, metrics.jsonl all
_DISPLAY_SECONDS = 0.5  # between updates of the progress bar: reading a result waits for the device


class Observer:
    """A callback of a run: told of its events, in the main process. Each method may be left as it
    is. Where `on_step` or `on_epoch` returns True, the run saves its state and ends there, as
    `vit.train` does at the end of the plan; `resume` continues it. One that raises an exception is
    told nothing more, and training goes on without it.

    Example:
        >>> class Stop(vit.Observer):
        ...     def on_epoch(self, metrics, model): return metrics["val_top1"] > 0.9
        >>> vit.train("digits", output="runs/digits", callbacks=[Stop()])
    """

    is_essential = False  # whether the run ends where this fails

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        """The run begins, or goes on after `step` steps; `settings`: "section.key" → value of its
        configuration."""

    def on_step(self, metrics: dict[str, Any]) -> bool | None:
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
    """`metrics.jsonl`: one object an epoch.

    Args:
        directory: of the run.
        writer: of the run's files; None writes at once.
    """

    is_essential = True

    def __init__(self, directory: Path, writer: BackgroundWriter | None = None) -> None:
        self.path = directory / METRICS_FILE
        self._writer = writer

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        # other observers get the same dictionary
        append = partial(append_metrics, self.path, dict(metrics))
        if self._writer is None:
            append()
        else:
            self._writer.submit(append)


class TensorBoard(Observer):
    """Curves and the configuration, beside `metrics.jsonl`; a resumed run's curves go on where its
    checkpoint was taken.

    Args:
        run_directory: the files are in `tensorboard` below it.
    """

    def __init__(self, run_directory: Path) -> None:
        self.directory = run_directory / "tensorboard"
        self.writer: Any = None  # a SummaryWriter; torch's types lack half of it

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        # takes a second to import
        from torch.utils.tensorboard import SummaryWriter

        # what a killed process logged after its last checkpoint is superseded
        purge_step = step + 1 if step else None
        # files are read in the order of their names, which begin with the second, and end with a
        # process and a number that order nothing
        while any(self.directory.glob(f"events.out.tfevents.{int(time.time())}.*")):
            time.sleep(0.01)
        self.writer = SummaryWriter(str(self.directory), purge_step=purge_step)
        text = "\n".join(f"    {key}: {value}" for key, value in settings.items())
        self.writer.add_text("configuration", text, step)
        self.writer.flush()

    def on_step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] % LOG_EVERY_STEPS:
            return
        for name in ("loss", "gradient_norm", "learning_rate"):
            self.writer.add_scalar(f"step/{name}", float(metrics[name]), metrics["step"])

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        for key, value in metrics.items():
            if key not in ("epoch", "step") and value is not None:
                self.writer.add_scalar(f"epoch/{key}", value, metrics["step"])
        self.writer.flush()

    def on_end(self) -> None:
        if self.writer is not None:
            self.writer.close()


class ProgressBar(Observer):
    """A bar with loss, accuracy, images/s and time left, in a terminal only, and lines of epochs, at
    most one in 10 seconds, and of the last."""

    def __init__(self) -> None:
        self._context = ExitStack()
        self._advance: Advance  # since `on_start`
        self._displayed_at = 0.0
        self._printed_at = -math.inf
        # of the last epoch, that is not printed yet
        self._line = ""

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        self._advance = self._context.enter_context(show_progress("epoch 1", total_steps))
        self._advance(step)

    def on_step(self, metrics: dict[str, Any]) -> None:
        title = None
        if time.perf_counter() - self._displayed_at > _DISPLAY_SECONDS:
            self._displayed_at = time.perf_counter()
            title = (
                f"epoch {metrics['epoch']}  loss {metrics['loss']:.3f}"
                f"  top-1 {metrics['top1']:.1%}  {metrics['images_per_second']:,.0f} images/s"
            )
        self._advance(1, title)

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        line = f"epoch {metrics['epoch']}  loss {metrics['train_loss']:.3f}"
        # validation is at the size of the data
        if "train_image_height" in metrics:
            line += f" at {metrics['train_image_height']}×{metrics['train_image_width']} px"
        if metrics["val_loss"] is not None:
            line += (
                f"  validation loss {metrics['val_loss']:.3f}  top-1 {metrics['val_top1']:.2%}"
                f"  macro F1 {metrics['val_macro_f1']:.2%}"
            )
        line += f"  {metrics['images_per_second']:,.0f} images/s"
        self._line = f"{line}  {metrics['elapsed_seconds']:.0f} s"
        if time.perf_counter() - self._printed_at >= _LINE_SECONDS:
            self._print_line()

    def on_message(self, text: str) -> None:
        print(text, file=sys.stderr)

    def on_end(self) -> None:
        self._print_line()
        self._context.close()

    def _print_line(self) -> None:
        if self._line:
            self.on_message(self._line)
        self._line = ""
        self._printed_at = time.perf_counter()
