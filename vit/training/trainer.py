"""The training loop: epochs of steps, an evaluation, a checkpoint.

Everything random in a step is a function of (seed, step, rank), and the batches are one of (seed,
epoch): a run that stops anywhere and goes on from its last checkpoint ends, bit for bit, where an
uninterrupted one ends. That holds on the same kind of device, in the same precision and with the
same torch; on a GPU with `train.deterministic`, without which its kernels add up in any order.
"""

import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from vit.data.loader import Batch, TrainLoader
from vit.data.random import seed_step
from vit.model.checkpoint import Checkpoint, CheckpointStore
from vit.runtime.arguments import first_line
from vit.runtime.background_writer import BackgroundWriter
from vit.runtime.device import autocast
from vit.runtime.processes import Process
from vit.training.identity import RunIdentity
from vit.training.nonfinite import find_nonfinite
from vit.training.observers import LOG_EVERY_STEPS, Observer
from vit.training.plan import Progress, TrainingPlan, Validation
from vit.training.signals import TrainingInterrupted, stop_on_signals
from vit.training.train_step import StepResult, TrainStep

T = TypeVar("T")

# how often in a run its speed is measured, and by what fraction its length must change to be changed
_NUM_SPEED_CHECKS = 10
_MIN_LENGTH_CHANGE = 0.05


class Validator(Protocol):
    """Measures a model on the validation images (`vit.training.validation`)."""

    def validate(self, model: nn.Module, *, warn: Callable[[str], None]) -> Validation:
        """Called in all processes; `warn` is told of images that turn out to be unreadable."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it keeps from one validation to the next, for a checkpoint."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` gave."""


class ModelWriter(Protocol):
    """Writes the model file of a run (`vit.training.model_writer`)."""

    def write(self, model: nn.Module) -> None:
        """Called in all processes, with the best model so far."""

    def has_written(self) -> bool:
        """Whether the model file is there, intact, and of this run."""
        ...


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Runs a plan.

    Args:
        train_step: trains the model by one batch.
        plan: how long, and what happens when.
        train_batches: of this process.
        validator: None without validation images.
        checkpoints: of the run.
        model_writer: keeps the best model.
        observers: told what happens; in the main process alone.
        process: this process's place in the run.
        identity: kept in every checkpoint.
        writer: of checkpoints, and of what others write beside the loop.
        keeps_first_model: whether the model is worth keeping before it is trained, as a probe is:
            it is validated and written as the first best one.
    """

    train_step: TrainStep
    plan: TrainingPlan
    train_batches: TrainLoader
    validator: Validator | None
    checkpoints: CheckpointStore
    model_writer: ModelWriter
    observers: list[Observer]
    process: Process
    identity: RunIdentity
    writer: BackgroundWriter
    keeps_first_model: bool = False

    def __post_init__(self) -> None:
        self.progress = Progress()
        # `plan` and the step's schedule change where the time is too short for it
        self._full_plan = self.plan
        self._full_lr_factor = self.train_step.lr_factor
        # when this process began to train, and after how many steps of the run
        self._speed_start = (0.0, 0)
        self._stop_requested = False
        self._signalled = False
        self._started_at = 0.0
        # step → whether it was finite, which was not read yet: reading waits for the device
        self._unchecked: dict[int, Tensor] = {}
        # done when the last checkpoint is on disk
        self._saving: Future[None] | None = None

    def train(self) -> Progress:
        """Train to the end of the plan, or until an observer asks to stop.

        Raises:
            TrainingInterrupted: after SIGINT or SIGTERM, with the state saved.
            OSError: a process that decodes images was killed, or a file can't be written.
            ValueError: a loss or gradient is not finite, and the plan says to stop there.
        """
        self._started_at = time.perf_counter() - self.progress.elapsed_seconds
        self.process.set_timeout(self.plan.timeout_seconds)
        with stop_on_signals(self._request_stop):
            try:
                self._notify(
                    lambda observer: observer.on_start(
                        step=self.progress.step,
                        total_steps=self.plan.total_steps,
                        settings=self.identity.settings,
                    )
                )
                if self.keeps_first_model and not self._has_model():
                    self._keep_first_model()
                self._speed_start = (time.perf_counter(), self.progress.step)
                while not self.progress.is_done(self.plan):
                    if not self._train_epoch():
                        break
                    self._finish_epoch()
                    if not self.progress.is_done(self.plan) and self._stop_if_requested():
                        break
                self._wait_for_files()
            except (RuntimeError, ConnectionError, EOFError) as error:
                # torch's handler of a killed worker's signal raises wherever the loop is, unless
                # the worker's pipe ends before
                if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                    raise
                raise OSError(
                    "a process that decodes images was killed, for want of memory?"
                    " continue with --resume, perhaps with fewer data.workers"
                ) from error
            finally:
                # first: nothing may be written once this run is said to have ended
                self.writer.finish()
                self.train_batches.close()
                self._notify(lambda observer: observer.on_end())
        return self.progress

    def _has_model(self) -> bool:
        """Whether a model was kept already: with validation images one of step 0 has measures."""
        return self.progress.best_step > 0 or self.progress.best.top1 >= 0

    def _keep_first_model(self) -> None:
        """Validate and write the model as it is before the first step."""
        model = self.train_step.averaged_model.eval()
        validation = None
        if self.validator is not None:
            validation = self.validator.validate(model, warn=self._message)
            seconds = time.perf_counter() - self._started_at
            self._message(
                f"the probe's top-1 on the validation images is {validation.top1:.2%}, macro F1"
                f" {validation.macro_f1:.2%}; kept until a better model is found  {seconds:.0f} s"
            )
        best = validation
        if best is not None and self.plan.select_by != "loss":
            # of equally accurate models the trained one is kept: few images tell no difference, and
            # a loss that label smoothing has raised tells none either
            best = best._replace(loss=math.inf)
        self.progress.record_best(best, select_by=self.plan.select_by)
        self.model_writer.write(model)
        self._save()

    def _train_epoch(self) -> bool:
        """The rest of the running epoch, or of the plan; whether it was finished."""
        progress = self.progress
        plan = self.plan
        self.train_step.model.train()
        if plan.patch_drop_rates:
            # of our models alone, as was checked when the run was built
            model = cast(Any, self.train_step.module)
            model.patch_drop_rate = plan.patch_drop_rate(progress.epoch)

        progress.epoch_sums = progress.epoch_sums.to(self.train_step.device)
        epoch_started_at = time.perf_counter() - progress.epoch_seconds
        for batch in self._batches(start_step=progress.step_in_epoch):
            self._fit_length()
            seed_step(plan.seed, progress.step, self.process.rank)
            result = self.train_step(batch.images, batch.targets)

            progress.step += 1
            progress.step_in_epoch += 1
            finite_loss = torch.where(result.finite, result.loss, 0)
            progress.epoch_sums += torch.stack([finite_loss, result.correct, result.finite])
            progress.epoch_seconds = time.perf_counter() - epoch_started_at
            self._log(result)
            self.writer.check()

            if self._stop_if_requested():
                return False
            if progress.step >= self.plan.total_steps:
                break
            # an epoch's last step is saved with its metrics: a kill between the two would log them
            # twice
            is_last = progress.step_in_epoch == len(self.train_batches)
            if self._is_checkpoint_due() and not is_last:
                self._save()
        return True

    def _fit_length(self) -> None:
        """Ten times a run, change its length to what its time holds at its speed so far, at most to
        that of its full plan. A new length is saved at once: whoever resumes the run goes on with it.
        """
        full_plan = self._full_plan
        step = self.progress.step
        started_at, start_step = self._speed_start
        is_due = step % max(full_plan.total_steps // _NUM_SPEED_CHECKS, 1) == 0
        if full_plan.max_seconds is None or not is_due or step == start_step:
            return
        now = time.perf_counter()
        step_seconds = (now - started_at) / (step - start_step)
        seconds_left = full_plan.max_seconds - (now - self._started_at)
        total_steps = step + max(int(seconds_left / step_seconds), 1)
        total_steps = self.process.broadcast(min(total_steps, full_plan.total_steps))
        change = abs(total_steps - self.plan.total_steps) / self.plan.total_steps
        if change > _MIN_LENGTH_CHANGE:
            self._set_length(total_steps)
            self._message(
                f"{total_steps} of {full_plan.total_steps} steps fit in the"
                f" {full_plan.max_seconds / 60:.2g} minutes of train.max_minutes"
            )
            self._save()

    def _set_length(self, total_steps: int) -> None:
        """End after so many steps; the learning rate falls faster by as much as there are fewer."""
        full_lr_factor = self._full_lr_factor
        pace = self._full_plan.total_steps / total_steps
        self.plan = self._full_plan.with_steps(total_steps)
        self.train_step.lr_factor = lambda step: full_lr_factor(step * pace)
        self.progress.total_steps = total_steps

    def _finish_epoch(self) -> None:
        """Evaluate, keep the best model, tell the observers, save."""
        progress = self.progress
        plan = self.plan
        self._check_finite()

        is_last = progress.step >= plan.total_steps
        is_due = is_last or (progress.epoch + 1) % plan.evaluate_every_epochs == 0
        model = self.train_step.averaged_model.eval()
        validation = None
        if is_due and self.validator is not None:
            validation = self.validator.validate(model, warn=self._message)

        progress.elapsed_seconds = time.perf_counter() - self._started_at
        loss_sum, num_correct, num_finite = progress.epoch_sums.tolist()
        metrics = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "train_loss": loss_sum / max(num_finite, 1),
            "train_top1": num_correct / (progress.step_in_epoch * plan.batch_size),
            **{f"val_{name}": getattr(validation, name, None) for name in Validation._fields},
            **self._measure_speed(),
            "elapsed_seconds": progress.elapsed_seconds,
            "skipped_steps": int(self.train_step.nonfinite_steps),
        }
        # validation is at the size of the data, as the model file is: a change of the other size
        # bends its curve
        image_size = plan.image_size(progress.epoch)
        if image_size is not None:
            metrics["train_image_height"], metrics["train_image_width"] = image_size
        if is_due and progress.record_best(validation, select_by=plan.select_by):
            self.model_writer.write(model)
        self._notify(lambda observer: observer.on_epoch(metrics, model))
        if progress.is_done(plan) and not is_last:
            self._message(
                f"stopped early: {plan.select_by.replace('_', ' ')} was best at step"
                f" {progress.best_step}, {progress.evaluations_since_best} evaluations ago"
            )

        progress.start_epoch()
        if is_due or self._is_checkpoint_due():
            self._save()

    def _batches(self, *, start_step: int) -> Iterator[Batch]:
        """The batches of the running epoch, from its step number `start_step` on."""
        epoch = self.progress.epoch
        return self.train_batches.epoch(
            epoch,
            start_step=start_step,
            image_size=self.plan.image_size(epoch),
            mix=epoch < self.plan.mix_until * self.plan.epochs,
            # only the main process has observers; what others can't read is named, too
            on_warning=self._message if self.process.is_main else warnings.warn,
        )

    def _is_checkpoint_due(self) -> bool:
        every = self.plan.checkpoint_every_steps
        return every is not None and self.progress.step % every == 0

    def _save(self) -> None:
        """Have a checkpoint of the state as it is now written while training goes on."""
        self._check_finite()

        progress = self.progress
        progress.elapsed_seconds = time.perf_counter() - self._started_at
        if self.process.is_main:
            # memory holds one that is not written yet, and a crash loses no more than its steps
            if self._saving is not None:
                self._saving.result()
            checkpoint = Checkpoint(
                # A plain tuple, because a checkpoint holds no classes.
                progress=vars(progress) | {"best": tuple(progress.best)},
                state=self.train_step.state_dict(),
                identity=self.identity.to_record(),
                validator=None if self.validator is None else self.validator.state_dict(),
            )
            save = partial(
                self.checkpoints.save,
                checkpoint.serialize(),
                step=progress.step,
                best_step=progress.best_step,
            )
            self._saving = self.writer.submit(save)

    def _wait_for_files(self) -> None:
        """Return, in all processes, when all files of the run are on disk: torchrun ends the others
        when the first process ends with a code that is not 0."""
        self.writer.wait()
        self.process.wait()

    def resume(self) -> bool:
        """Go back to the newest intact checkpoint; False where there is none. A model file that is
        gone or damaged is written again from the best checkpoint.

        Raises:
            ValueError: the checkpoint is of another run, or no model file can be had.
        """
        values = self._from_main(lambda: self.checkpoints.load_latest(warn=self._message))
        if values is None:
            return False
        checkpoint = self._restore(values)
        if changes := self.identity.describe_changed_conditions(checkpoint.identity):
            self._message(changes)

        best_step = self.progress.best_step
        if not self._has_model() or self._from_main(self.model_writer.has_written):
            return True

        best_values = self._from_main(lambda: self.checkpoints.load(best_step))
        if best_values is None:
            raise ValueError(
                "the model file is missing or damaged, and so is the checkpoint of its step,"
                f" {best_step}; train again with --overwrite"
            )
        self._restore(best_values)
        self.model_writer.write(self.train_step.averaged_model.eval())
        # what fails before the first step must not leave a thread that writes
        self.writer.wait()
        self._restore(values)
        self._message(
            f"the model file was missing or damaged; it is written again from step {best_step}"
        )
        return True

    def _from_main(self, read: Callable[[], T]) -> T:
        """What the main process reads, in every process."""
        value = read() if self.process.is_main else None
        return self.process.broadcast(cast(T, value))

    def _restore(self, values: dict[str, Any]) -> Checkpoint:
        """Go back to the state that a checkpoint holds, and return it by name."""
        try:
            checkpoint = Checkpoint(**values)
            self.identity.check(
                checkpoint.identity,
                origin=f"the checkpoint of step {checkpoint.progress['step']}",
            )
            self.progress = Progress(**checkpoint.progress)
            if self.progress.total_steps is not None:
                self._set_length(self.progress.total_steps)
            self.train_step.load_state_dict(checkpoint.state)
            if self.validator is not None:
                self.validator.load_state_dict(cast(dict[str, Any], checkpoint.validator))
            return checkpoint
        except (LookupError, TypeError, AttributeError, RuntimeError, ValidationError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(
                f"a checkpoint does not hold the state of this run ({reason}); remove it"
            ) from error

    def _log(self, result: StepResult) -> None:
        """Tell the observers of a step."""
        step = self.progress.step
        self._unchecked[step] = result.finite
        # on a CPU there is nothing to wait for
        if self.train_step.device.type == "cpu" or step % LOG_EVERY_STEPS == 0:
            self._check_finite()
        metrics = {
            "epoch": self.progress.epoch + 1,
            "step": step,
            "loss": result.loss,
            "top1": result.correct / self.plan.batch_size,
            "gradient_norm": result.grad_norm,
            **self._measure_speed(),
        }
        self._notify(lambda observer: observer.on_step(metrics))

    def _measure_speed(self) -> dict[str, float]:
        """Of the running epoch."""
        images = self.progress.step_in_epoch * self.plan.batch_size
        return {
            "learning_rate": self.train_step.learning_rate,
            "images_per_second": images / self.progress.epoch_seconds,
        }

    def _check_finite(self) -> None:
        """Stop at the first step that was not finite, or say that it was skipped. It has left the
        weights as they were."""
        if not self._unchecked:
            return
        steps = list(self._unchecked)
        # one tensor, so that the device is waited for once
        flags = torch.stack(list(self._unchecked.values())).tolist()
        self._unchecked.clear()
        for step, is_finite in zip(steps, flags, strict=True):
            if is_finite:
                continue
            if self.plan.on_nonfinite == "stop":
                raise ValueError(self._diagnose(step))
            self._message(f"step {step}: loss or gradient not finite; skipped")

    def _diagnose(self, step: int) -> str:
        """Build the failing batch again and look for the first module that is not finite on it."""
        steps_ago = self.progress.step - step
        start_step = self.progress.step_in_epoch - steps_ago - 1
        batch = next(self._batches(start_step=start_step))
        seed_step(self.plan.seed, step - 1, self.process.rank)
        with autocast(self.train_step.device, self.train_step.precision):
            module = find_nonfinite(self.train_step.module, batch.images, batch.targets)

        image_names = self.train_batches.dataset.ids
        names = ", ".join(str(image_names[int(number)]) for number in batch.sample_ids[:8])
        if len(batch.sample_ids) > 8:
            names += f", … ({len(batch.sample_ids)})"
        return (
            f"step {step}: the loss or a gradient is not finite; first seen in"
            f" {module or 'the optimizer step'}; images {names}; the last good checkpoint is kept."
            " Lower optimizer.lr, set train.clip_grad, or skip such steps with"
            " train.on_nonfinite=skip"
        )

    def _request_stop(self, signal_name: str) -> None:
        self._stop_requested = True
        self._signalled = True
        self._message(f"{signal_name}: finishing this step and saving; once more stops at once")

    def _stop_if_requested(self) -> bool:
        """Whether the run was asked to end; its state is saved then. Raises TrainingInterrupted
        after a signal."""
        if not self.process.any_rank(self._stop_requested):
            return False
        self._save()
        self._wait_for_files()
        text = f"stopped after step {self.progress.step}; continue with --resume"
        if self.process.any_rank(self._signalled):
            raise TrainingInterrupted(text)
        if not self._has_model():  # else the result would have no model
            self.model_writer.write(self.train_step.averaged_model.eval())
        self._message(text)
        return True

    def _message(self, text: str) -> None:
        self._notify(lambda observer: observer.on_message(text))

    def _notify(self, event: Callable[[Observer], bool | None]) -> None:
        """Call every observer. One that fails is told nothing more, and training goes on."""
        for observer in list(self.observers):
            try:
                if event(observer):
                    self._stop_requested = True
            except Exception as error:
                if observer.is_essential:
                    raise
                self.observers.remove(observer)
                # whoever wrote it needs the line; ours fail for want of a disk
                if not type(observer).__module__.startswith("vit."):
                    traceback.print_exception(error)
                self._message(
                    f"{type(observer).__name__} failed ({first_line(error)});"
                    " training goes on without it"
                )
