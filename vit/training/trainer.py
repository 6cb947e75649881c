"""The training loop: epochs of steps, an evaluation, a checkpoint.

All random numbers of a step are a function of (seed, step, rank), and the batches are a function of
(seed, epoch). A run that stops anywhere and goes on from its last checkpoint therefore ends, bit
for bit, as an uninterrupted run does. This holds on the same kind of device, in the same precision
and with the same torch; on a GPU with `train.deterministic`, because its kernels otherwise add up
in any order.
"""

import contextlib
import copy
import dataclasses
import io
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vit.config import list_overrides, values_to_save
from vit.data.loader import Batch, TrainLoader
from vit.data.random import seed_step
from vit.runtime.processes import current_process
from vit.training.background_writer import BackgroundWriter
from vit.training.checkpoint import CheckpointStore
from vit.training.data import TrainingData
from vit.training.identity import LENGTHS, check_same_run, compute_run_id
from vit.training.metrics_file import METRICS_FILE, append_metrics
from vit.training.model_writer import write_bundle
from vit.training.observers import LOG_EVERY_STEPS, Observer
from vit.training.plan import Progress, TrainingPlan
from vit.training.probe import uses_probe
from vit.training.run_directory import CHECKPOINTS
from vit.training.signals import TrainingInterrupted, stop_on_signals
from vit.training.train_step import StepResult, TrainStep
from vit.training.validation import list_measures, validate

# A run's speed is measured this number of times; a smaller change of its length is ignored.
_NUM_SPEED_CHECKS = 10
_MIN_LENGTH_CHANGE = 0.05


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Runs a plan, and writes metrics, checkpoints and the best model into the run's directory.

    Args:
        observers: In the main process only.
        identity: See `identify_run`.
        seconds_before: Seconds of `train.max_minutes` that passed before the training.
    """

    train_step: TrainStep
    plan: TrainingPlan
    train_batches: TrainLoader
    data: TrainingData
    directory: Path
    observers: list[Observer]
    identity: dict[str, Any]
    seconds_before: float = 0.0

    def __post_init__(self) -> None:
        self.process = current_process()
        self.progress = Progress()
        self.writer = BackgroundWriter()
        self._checkpoints = CheckpointStore(self.directory / CHECKPOINTS)
        self._write_model = partial(
            write_bundle,
            directory=self.directory,
            data=self.data,
            run_id=compute_run_id(self.identity),
            writer=self.writer,
        )
        # `plan` changes if the time is too short for the full plan.
        self._full_plan = self.plan
        # steps and minutes
        self._planned_length = (self.plan.total_steps, self.plan.settings.max_minutes or math.inf)
        self._started_at = 0.0
        # time at which this process began to train, and the run's step at that time
        self._speed_start = (0.0, 0)
        self._stop_requested = False
        self._signalled = False
        # Flags of the last steps that are not read yet, because reading waits for the device.
        self._unchecked: list[Tensor] = []
        # step of the last checkpoint, and a future that is done when it is on disk
        self._saved_step: int | None = None
        self._saving: Future[None] | None = None
        # name of the fraction of images that are right
        self._accuracy = list_measures(self.data)[0]

    def train(self) -> Progress:
        """Train to the end of the plan, or until an observer asks to stop.

        Raises TrainingInterrupted after SIGINT or SIGTERM, RuntimeError if a data-loading worker
        was killed, ValueError if a loss or gradient is not finite.
        """
        progress = self.progress
        self._started_at = time.perf_counter() - progress.elapsed_seconds
        with stop_on_signals(self._stop_on_signal):
            try:
                settings = list_overrides(values_to_save(self.data.config))
                length = {"step": progress.step, "total_steps": self.plan.total_steps}
                self._notify("on_start", **length, settings=settings)
                if uses_probe(self.data.config) and not progress.has_model:
                    self._keep_first_model()
                self._speed_start = (time.perf_counter(), progress.step)
                # A run that was stopped after its last step has an epoch to finish.
                while progress.step_in_epoch or not self.is_done():
                    if not self._train_epoch():
                        break
                    self._finish_epoch()
                    if not self.is_done() and self._stop_if_requested():
                        break
                self._wait_for_files()
            finally:
                # This comes first: nothing may be written after observers hear of the end.
                self.writer.finish()
                try:
                    self._notify("on_end")
                finally:
                    # If a worker was killed and its pipe ended first, torch says so only now.
                    self.train_batches.close()
        return progress

    def _wait_for_files(self) -> None:
        self.writer.wait()
        # torchrun ends the others as soon as the first process ends with a code that is not 0.
        self.process.wait()

    def is_done(self) -> bool:
        """Return whether the plan has no more steps."""
        return self.progress.step >= self.plan.total_steps

    def _keep_first_model(self) -> None:
        """Validate and write the model before the first step."""
        model = self.train_step.averaged_model.eval()
        best = validate(self.data, model, self.train_step.device)
        if best:
            measures = ", ".join(f"{name} {value:.3f}" for name, value in best.items())
            self._notify("on_message", f"linear probe: {measures} on the validation images")
            # If a trained model is equally accurate it replaces the probe: with few images, and
            # with a loss that label smoothing has raised, the two can't be told apart.
            best["loss"] = math.inf
        self.progress.record_best(best, select_by=self.plan.settings.select_by)
        self._write_model(model, self.progress.step)
        self._save()

    def _train_epoch(self) -> bool:
        """Train the rest of the current epoch, or of the plan. Returns whether it was finished."""
        progress = self.progress
        self.train_step.model.train()
        device = self.train_step.device
        if device.type == "mps":  # which has no float64
            progress.epoch_sums = progress.epoch_sums.float()
        progress.epoch_sums = progress.epoch_sums.to(device)
        epoch_started_at = time.perf_counter() - progress.epoch_seconds
        batches = self._batches()
        batch = next(batches, None)
        while batch is not None:
            self._fit_length()
            if self.plan.settings.patch_drop_rates:
                # Only our models have it, as was checked when the run was built.
                model = cast(Any, self.train_step.module)
                model.patch_drop_rate = self.plan.find_phase(progress.step).patch_drop_rate
            seed_step(self.plan.settings.seed, progress.step, self.process.rank)
            result = self.train_step(batch.images, batch.targets)

            progress.step += 1
            progress.step_in_epoch += 1
            progress.epoch_sums += torch.stack([result.loss, result.correct])
            progress.epoch_seconds = time.perf_counter() - epoch_started_at
            # The next batch is made while the device computes the step; a report may wait for it.
            batch = next(batches, None)
            self._report(result)
            self.writer.check()
            if self._stop_if_requested():
                return False
            # The last step of an epoch is saved with its metrics: if the process were killed
            # between the two, they would be logged twice.
            if batch is not None and self._is_checkpoint_due():
                self._save()
        return True

    def _batches(self) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch, each phase of the plan by itself."""
        progress = self.progress
        first = progress.step - progress.step_in_epoch
        step = progress.step
        while step < self.plan.total_steps and step - first < len(self.train_batches):
            start = step
            phase = self.plan.find_phase(start)
            batches: Any = self.train_batches.epoch(
                progress.epoch,
                start_step=step - first,
                image_size=phase.image_size,
                mix=phase.mixes,
            )
            with contextlib.closing(batches):
                for batch in batches:
                    yield batch
                    step += 1
                    # anew, because the plan may have become shorter
                    if step >= self.plan.find_phase(start).end:
                        break

    def _fit_length(self) -> None:
        """Fit the length of the run to its time at its speed so far, ten times a run and at most to
        the full plan, and save it at once for a resumed run. A plan that is much too long has no
        tenth within its time: powers of two are due, too, once a tenth of the time has passed."""
        full_steps = self._full_plan.total_steps
        step = self.progress.step
        started_at, start_step = self._speed_start
        is_tenth = step % max(full_steps // _NUM_SPEED_CHECKS, 1) == 0
        max_minutes = self.plan.settings.max_minutes
        if max_minutes is None or step == start_step or not (is_tenth or step.bit_count() == 1):
            return
        now = time.perf_counter()
        step_seconds = (now - started_at) / (step - start_step)
        seconds = 60 * max_minutes - self.seconds_before
        seconds_left = seconds - (now - self._started_at)
        total_steps = self.plan.total_steps
        if is_tenth or seconds_left < seconds * (1 - 1 / _NUM_SPEED_CHECKS):
            total_steps = step + max(int(seconds_left / step_seconds), 1)
        total_steps = self.process.broadcast(min(total_steps, full_steps))
        if abs(total_steps / self.plan.total_steps - 1) > _MIN_LENGTH_CHANGE:
            if self.progress.total_steps is None:
                self._notify(
                    "on_message",
                    f"shortened to about {total_steps:,} of {full_steps:,} steps, which fit into"
                    f" {max_minutes:.2g} minutes",
                )
            self._set_length(total_steps)
            self._save()

    def _set_length(self, total_steps: int) -> None:
        """End after this number of steps. The learning rate falls faster accordingly."""
        self.plan = dataclasses.replace(self._full_plan, total_steps=total_steps)
        self.train_step.pace = self._full_plan.total_steps / total_steps
        self.progress.total_steps = total_steps

    def _finish_epoch(self) -> None:
        """Evaluate, keep the best model, notify the observers, save."""
        progress = self.progress
        settings = self.plan.settings
        self._check_finite()
        is_due = self.is_done() or (progress.epoch + 1) % settings.evaluate_every_epochs == 0
        model = self.train_step.averaged_model.eval()
        measures: dict[str, float] = {}
        if is_due:
            measures = validate(self.data, model, self.train_step.device)

        progress.elapsed_seconds = time.perf_counter() - self._started_at
        loss_sum, num_correct = progress.epoch_sums.tolist()
        num_images = progress.step_in_epoch * self.plan.batch_size
        metrics = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "train_loss": loss_sum / progress.step_in_epoch,
            f"train_{self._accuracy}": num_correct / num_images,
            **{f"val_{name}": measures.get(name) for name in ("loss", *list_measures(self.data))},
            **self._measure_speed(),
            "elapsed_seconds": progress.elapsed_seconds,
        }
        if self.process.is_main:
            # A copy, because observers get the same dictionary.
            path = self.directory / METRICS_FILE
            self.writer.submit(partial(append_metrics, path, dict(metrics)))
        if is_due and progress.record_best(measures, select_by=settings.select_by):
            self._write_model(model, progress.step)
        self._notify("on_epoch", metrics, model)
        progress.start_epoch()
        if is_due or self._is_checkpoint_due():
            self._save()

    def _is_checkpoint_due(self) -> bool:
        every = self.plan.settings.checkpoint_every_steps
        return every is not None and self.progress.step % every == 0

    def _save(self) -> None:
        """Write a checkpoint of the current state while training goes on."""
        self._check_finite()
        progress = self.progress
        progress.elapsed_seconds = time.perf_counter() - self._started_at
        if not self.process.is_main:
            return
        # At most one unwritten checkpoint is in memory, and a crash loses only its steps.
        if self._saving is not None:
            self._saving.result()
        state = {
            "progress": vars(progress),
            "state": self.train_step.state_dict(),
            "identity": self.identity,
            "length": self._planned_length,
        }
        # in the host's memory, where later steps don't change it
        content = io.BytesIO()
        torch.save(state, content)
        steps = {"step": progress.step, "best_step": progress.best_step}
        save = partial(self._checkpoints.save, content.getvalue(), **steps)
        self._saving = self.writer.submit(save)
        self._saved_step = progress.step

    def resume(self) -> bool:
        """Go back to the newest intact checkpoint. The model file, which may be of a later step, is
        written again from the best one. A run that has ended is trained longer if it has more steps
        or minutes now. Returns False if there is no checkpoint, and raises ValueError if it is of
        another run."""
        values = None
        if self.process.is_main:
            values = self._checkpoints.load()
        values = self.process.broadcast(values)
        if values is None:
            return False
        origin = f"the checkpoint of step {values['progress']['step']}"
        self.progress = Progress(**values["progress"])
        recorded = values["identity"]
        if self._is_longer(*values["length"]):
            self.progress.total_steps = None
            recorded |= {name: self.identity[name] for name in LENGTHS}
        check_same_run(self.identity, recorded, origin=origin)
        self._saved_step = self.progress.step
        if self.progress.total_steps is not None:
            self._set_length(self.progress.total_steps)
        self.train_step.load_state_dict(values["state"])

        if self.process.is_main and self.progress.has_model:
            best = self._checkpoints.load(self.progress.best_step)
            if best is not None:
                model = copy.deepcopy(self.train_step.averaged_model).eval()
                model.load_state_dict(best["state"]["average"])
                self._write_model(model, self.progress.best_step)
                # An error before the first step must not leave a thread that writes.
                self.writer.wait()
        return True

    def _is_longer(self, old_steps: int, old_minutes: float) -> bool:
        """Return whether the run of a checkpoint has ended, and has more steps or minutes now."""
        progress = self.progress
        steps, minutes = self._planned_length
        has_ended = progress.step >= (progress.total_steps or old_steps)
        if not has_ended or progress.step_in_epoch or progress.step >= steps:
            return False
        was_shortened = progress.total_steps is not None
        return minutes > old_minutes if was_shortened else steps > old_steps

    def _report(self, result: StepResult) -> None:
        """Report a step to the observers."""
        step = self.progress.step
        self._unchecked.append(result.finite)
        # On a CPU there is nothing to wait for.
        if self.train_step.device.type == "cpu" or step % LOG_EVERY_STEPS == 0:
            self._check_finite()
        metrics = {
            "epoch": self.progress.epoch + 1,
            "step": step,
            "loss": result.loss,
            self._accuracy: result.correct / self.plan.batch_size,
            "gradient_norm": result.grad_norm,
            **self._measure_speed(),
        }
        self._notify("on_step", metrics)

    def _measure_speed(self) -> dict[str, float]:
        """Return the learning rate, and the images per second in the current epoch."""
        images = self.progress.step_in_epoch * self.plan.batch_size
        return {
            "learning_rate": self.train_step.learning_rate,
            "images_per_second": images / self.progress.epoch_seconds,
        }

    def _check_finite(self) -> None:
        """Stop at the first step that was not finite. It has not changed the weights."""
        if not self._unchecked:
            return
        # With one tensor the host waits for the device once.
        flags = torch.stack(self._unchecked).tolist()
        self._unchecked.clear()
        if all(flags):
            return
        step = self.progress.step - len(flags) + flags.index(False) + 1
        kept = "there is no checkpoint yet"
        if self._saved_step is not None:
            kept = f"the checkpoint of step {self._saved_step} is kept"
        raise ValueError(
            f"step {step}: the loss or a gradient is not finite, and {kept}; lower optimizer.lr or"
            " set train.clip_grad, and look for a logarithm or a division in a loss of your own"
        )

    def _stop_on_signal(self, name: str) -> None:
        self._stop_requested = True
        self._signalled = True
        self._notify(
            "on_message", f"{name}: finishing this step and saving; once more stops at once"
        )

    def _stop_if_requested(self) -> bool:
        """Return whether the run was asked to end; if so, its state is saved. Raises
        TrainingInterrupted after a signal."""
        if not self.process.any_rank(self._stop_requested):
            return False
        self._save()
        self._wait_for_files()
        step = self.progress.step
        text = f"stopped after step {step}; continue with --resume --output {self.directory}"
        if self.process.any_rank(self._signalled):
            raise TrainingInterrupted(text)
        if not self.progress.has_model:  # the result needs a model
            self.progress.best_step = step
            self._write_model(self.train_step.averaged_model.eval(), step)
        self._notify("on_message", text)
        return True

    def _notify(self, event: str, *values: Any, **named: Any) -> None:
        """Call a method of each observer."""
        for observer in self.observers:
            if getattr(observer, event)(*values, **named):
                self._stop_requested = True
