"""Observers, which show a run to the user. The training loop calls them and knows none of them."""

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vit.runtime.console import echo
from vit.runtime.numbers import format_percent
from vit.runtime.progress import Advance, show_progress
from vit.training.run_directory import TENSORBOARD

# Fixed, so that the curves of a resumed run have the same points.
LOG_EVERY_STEPS = 20
# Seconds between updates of the progress bar: reading a result waits for the device.
_DISPLAY_SECONDS = 0.5


class Observer:
    """A callback of a run, called in the main process. Override the methods
    that you need.

    If `on_step` or `on_epoch` returns True, the run saves its state and ends;
    `resume` continues it. An exception ends the run as it is.

    Example:
        >>> class Stop(vit.Observer):
        ...     def on_epoch(self, metrics, model):
        ...         return metrics["val_top1"] > 0.9
        >>> vit.train("digits", output="runs/digits", callbacks=[Stop()])
    """

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        """The run begins, or goes on after `step` steps. `settings` has the
        values of its configuration by "section.key"."""

    def on_step(self, metrics: dict[str, Any]) -> bool | None:
        """A step has ended. `metrics` has epoch and step (counted from 1),
        learning_rate and images_per_second; and as tensors loss, top1 of the
        batch (0 to 1) and gradient_norm. float() of a tensor waits for the
        device."""

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> bool | None:
        """An epoch has ended. `metrics` is its line of metrics.jsonl;
        `val_loss` and `val_top1` are None without an evaluation. `model` is
        the model to evaluate, in evaluation mode."""

    def on_message(self, text: str) -> None:
        """There is a sentence for the user."""

    def on_end(self) -> None:
        """The run has ended or was stopped, also by an error."""


class ProgressBar(Observer):
    """Shows a bar with loss, images/s and time left, in a terminal only; and a line for each
    evaluation. The number of validation images tells the digits of an accuracy."""

    def __init__(self, num_validation: int) -> None:
        self._percent = partial(format_percent, count=num_validation)
        self._context = ExitStack()
        self._advance: Advance  # set by `on_start`
        self._displayed_at = 0.0

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        self._advance = self._context.enter_context(show_progress("epoch 1", total_steps))
        self._advance(step)

    def on_step(self, metrics: dict[str, Any]) -> None:
        title = None
        if time.perf_counter() - self._displayed_at > _DISPLAY_SECONDS:
            self._displayed_at = time.perf_counter()
            title = (
                f"epoch {metrics['epoch']}  loss {metrics['loss']:.3f}"
                f"  {metrics['images_per_second']:,.0f} images/s"
            )
        self._advance(1, title)

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        line = f"epoch {metrics['epoch']}  loss {metrics['train_loss']:.3f}"
        if metrics["val_loss"] is not None:
            name, title = ("map", "mAP") if "val_map" in metrics else ("top1", "top-1")
            line += (
                f"  validation loss {metrics['val_loss']:.3f}"
                f"  {title} {self._percent(metrics[f'val_{name}'])}"
                f"  macro F1 {self._percent(metrics['val_macro_f1'])}"
            )
        line += f"  {metrics['images_per_second']:,.0f} images/s"
        self.on_message(f"{line}  {metrics['elapsed_seconds']:.0f} s")

    def on_message(self, text: str) -> None:
        # a notebook shows standard error in red
        echo(text, err="ipykernel" not in sys.modules)

    def on_end(self) -> None:
        self._context.close()


class TensorBoard(Observer):
    """Writes curves for TensorBoard, into the folder `tensorboard` of a run. Those of a resumed run
    go on from its checkpoint."""

    def __init__(self, run_directory: Path) -> None:
        self.directory = run_directory / TENSORBOARD
        self.writer: Any = None  # a SummaryWriter; torch's types lack half of it

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        # takes a second to import
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None
        if step:
            # Lines that a killed process logged after its last checkpoint are replaced.
            purge_step = step + 1
            # Files are read in the order of their names, which begin with the second.
            time.sleep(1)
        self.writer = SummaryWriter(str(self.directory), purge_step=purge_step)

    def on_step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] % LOG_EVERY_STEPS == 0:
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
