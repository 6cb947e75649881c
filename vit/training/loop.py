"""The training loop: epochs of steps, an evaluation, a checkpoint.

Everything random in a step is a function of (seed, step, rank), and the batches are one of (seed, epoch): a run that
stops anywhere and goes on from its last checkpoint ends, bit for bit, where an uninterrupted one ends.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from vit.checkpoint import CheckpointStore
from vit.data.loaders import Batch, ResidentLoader, WorkerLoader
from vit.data.random import seed_step
from vit.runtime.arguments import first_line
from vit.runtime.device import autocast
from vit.runtime.processes import Process, is_lost
from vit.training.identity import RunIdentity
from vit.training.nonfinite import find_nonfinite
from vit.training.observers import LOG_EVERY_STEPS, Observer
from vit.training.plan import Progress, TrainingPlan, Validation
from vit.training.signals import Stopped, stop_on_signals
from vit.training.state import collect_state, restore_state
from vit.training.step import StepResult, TrainStep
from vit.training.stragglers import Stragglers


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Runs `plan` with the given parts."""

    step: TrainStep
    plan: TrainingPlan
    train_batches: ResidentLoader | WorkerLoader
    evaluate: Callable[[nn.Module], Validation] | None  # on the validation images; called in all processes
    checkpoints: CheckpointStore
    save_model: Callable[[nn.Module], None]  # writes the model file, of the best model so far
    observers: list[Observer]
    process: Process
    has_model: Callable[[], bool] = lambda: True  # whether the model file is there, whole, and of this run
    identity: RunIdentity | None = None  # kept in every checkpoint
    sharded: bool = False  # each process writes its own part of a checkpoint
    sample_name: Callable[[int], str] = str

    def __post_init__(self) -> None:
        self.progress = Progress().to(self.step.device)
        self._stop_requested = self._signalled = self._extends = False
        self._started_at = 0.0
        self._unchecked: list[tuple[int, StepResult]] = []  # reading them waits for the device
        self._stragglers = Stragglers(self.process)

    def resume(self, *, most_steps: int | None = None) -> bool:
        """Go back to the newest whole checkpoint; False where there is none. A model file that is gone or damaged is
        written again from the best checkpoint. Raises ValueError where the checkpoint is of another run. With
        `most_steps` it is of no more, it may be of a run of fewer epochs, and becomes the last one of this."""
        is_main, broadcast = self.process.is_main, self.process.broadcast
        self._extends = most_steps is not None
        found = broadcast(self.checkpoints.load_latest(warn=self._say, most_steps=most_steps) if is_main else None)
        if found is None:
            return False
        self._restore(*found)
        best_step, is_done = self.progress.best_step, self.progress.is_done(self.plan)
        if best_step and not broadcast(self.has_model() if is_main else None):
            best = broadcast(self.checkpoints.load(best_step) if is_main else None)
            if best is not None:
                self._restore(*best)
                self.save_model(self.step.averaged_model.eval())
                self._restore(*found)
                self._say(f"the model file was missing or damaged; it is written again from step {best_step}")
            elif is_done:
                lost = f"the model file is missing or damaged, and so is the checkpoint of its step, {best_step}"
                raise ValueError(f"{lost}; train again with --overwrite")
            else:
                self.progress.forget_best()
        if self._extends:
            self._started_at = time.perf_counter() - self.progress.elapsed_seconds
            self._save()
        return True

    def _restore(self, state: dict[str, Any], shards: Path | None) -> None:
        try:
            if self.identity is not None and "identity" in state:  # older checkpoints have none
                origin = f"the checkpoint of step {state['progress']['step']}"
                self.identity.check(state["identity"], origin=origin, extends=self._extends)
            progress = Progress(**state["progress"]).to(self.step.device)
            self.train_batches.dataset.restore(state.get("images", {}))
            restore_state(self.step, state["state"], shards)
        except ValueError as error:  # ours, or torch's
            raise ValueError(first_line(error)) from error
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            if is_lost(error):
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"a checkpoint does not hold the state of this run ({reason}); remove it") from error
        self.progress = progress

    def run(self) -> Progress:
        """Train to the end of the plan, or until an observer asks to stop. Raises Stopped after SIGINT or SIGTERM, with
        the state saved."""
        self._started_at = time.perf_counter() - self.progress.elapsed_seconds
        self.process.limit_waits(self.plan.timeout_seconds)
        with stop_on_signals(self._request_stop):
            try:
                start: dict[str, Any] = {"step": self.progress.step, "total_steps": self.plan.total_steps}
                start["settings"] = self.identity.settings if self.identity else {}
                self._tell(lambda observer: observer.on_start(**start))
                self._train_epochs()
            except RuntimeError as error:  # torch raises it wherever the loop is when a worker was killed
                if "DataLoader worker" not in str(error):
                    raise
                cure = "continue with --resume, perhaps with fewer data.workers"
                raise OSError(f"a process that decodes images was killed, for want of memory? {cure}") from error
            finally:
                self._tell(lambda observer: observer.on_end())
        return self.progress

    def _train_epochs(self) -> None:
        try:
            while not self.progress.is_done(self.plan) and self._train_epoch():
                self._finish_epoch()
                if not self.progress.is_done(self.plan) and self._stop_early():
                    break
        except (ConnectionError, EOFError) as error:
            # a killed worker's pipe ends before torch's handler of its signal is called, which raises as well
            raise RuntimeError("a DataLoader worker was killed while it sent a batch") from error
        finally:
            self.train_batches.close()

    def _train_epoch(self) -> bool:
        """The rest of the running epoch, or of the plan; whether it was finished."""
        progress, plan = self.progress, self.plan
        self.step.model.train()
        if plan.patch_drop_rates:
            cast(Any, self.step.module).patch_drop_rate = plan.patch_drop_rate(progress.epoch)
        before = time.perf_counter() - progress.epoch_seconds
        (timer := self.step.timer).start()
        for batch in self._batches(start_step=progress.step_in_epoch):
            timer.stop()
            seed_step(plan.seed, progress.step, self.process.rank)
            result = self.step(batch.images, batch.targets)
            progress.step += 1
            progress.step_in_epoch += 1
            progress.loss_sum += torch.where(result.finite, result.loss, 0)
            progress.correct += result.correct
            progress.finite_steps += result.finite
            progress.epoch_seconds = time.perf_counter() - before
            self._log(result)
            if self._stop_early():
                return False
            if self.process.world_size > 1 and progress.step % LOG_EVERY_STEPS == 0:
                self._say(*self._stragglers.check(self.step.timer))
            if progress.step >= plan.total_steps:
                break
            # an epoch's last step is saved with its metrics: a kill between the two would log them twice
            if self._is_checkpoint_due() and progress.step_in_epoch < len(self.train_batches):
                self._save()
            timer.start()
        return True

    def _stop_early(self) -> bool:
        """Whether the run was asked to end; its state is saved then. Raises Stopped after a signal."""
        if not self.process.any(self._stop_requested):
            return False
        self._save()
        text = f"stopped after step {self.progress.step}; continue with --resume"
        if self.process.any(self._signalled):
            raise Stopped(text)
        if not self.progress.best_step:  # else the result would have no model
            self.save_model(self.step.averaged_model.eval())
        self._say(text)
        return True

    def _batches(self, *, start_step: int) -> Iterator[Batch]:
        epoch, plan = self.progress.epoch, self.plan
        mix = epoch < plan.mix_until * plan.epochs
        return self.train_batches.epoch(epoch, start_step=start_step, image_size=plan.image_size(epoch), mix=mix)

    def _finish_epoch(self) -> None:
        """Evaluate, keep the best model, tell the observers, save."""
        progress, plan = self.progress, self.plan
        self._check_finite()
        if progress.step_in_epoch == len(self.train_batches):
            self.train_batches.dataset.finish_epoch(self.process)
        is_due = progress.step >= plan.total_steps or (progress.epoch + 1) % plan.evaluate_every_epochs == 0
        model = self.step.averaged_model.eval()
        found = self.evaluate(model) if is_due and self.evaluate else None
        progress.elapsed_seconds = time.perf_counter() - self._started_at
        metrics = {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "train_loss": float(progress.loss_sum) / max(int(progress.finite_steps), 1),
            "train_top1": int(progress.correct) / (progress.step_in_epoch * plan.batch_size),
            **{f"val_{name}": found and getattr(found, name) for name in Validation._fields},
            **self._measure_speed(),
            "elapsed_seconds": progress.elapsed_seconds,
            "skipped_steps": int(self.step.nonfinite_steps),
        }
        if is_due and progress.record_best(found, select_by=plan.select_by):
            self.save_model(model)
        self._tell(lambda observer: observer.on_epoch(metrics, model))
        if progress.is_done(plan) and progress.step < plan.total_steps:
            count, measure = progress.evaluations_since_best, plan.select_by.replace("_", " ")
            self._say(f"stopped early: {measure} was best at step {progress.best_step}, {count} evaluations ago")
        next_due = progress.step + plan.evaluate_every_epochs * plan.steps_per_epoch
        ends_plateau = is_due and progress.step <= plan.plateau_steps < next_due
        if ends_plateau or (plan.keep_every_epochs and (progress.epoch + 1) % plan.keep_every_epochs == 0):
            progress.keep_steps.append(progress.step)
        progress.start_epoch()
        if is_due or self._is_checkpoint_due():
            self._save()

    def _is_checkpoint_due(self) -> bool:
        every = self.plan.checkpoint_every_steps
        return every is not None and self.progress.step % every == 0

    def _measure_speed(self) -> dict[str, float]:
        images = self.progress.step_in_epoch * self.plan.batch_size
        learning_rate = float(self.step.schedule.get_last_lr()[0])
        return {"learning_rate": learning_rate, "images_per_second": images / self.progress.epoch_seconds}

    def _log(self, result: StepResult) -> None:
        self._unchecked.append((self.progress.step, result))
        # on a CPU there is nothing to wait for
        if self.step.device.type == "cpu" or self.progress.step % LOG_EVERY_STEPS == 0:
            self._check_finite()
        metrics = {
            "epoch": self.progress.epoch + 1,
            "step": self.progress.step,
            "loss": result.loss,
            "top1": result.correct / self.plan.batch_size,
            "gradient_norm": result.grad_norm,
            **self._measure_speed(),
        }
        self._tell(lambda observer: observer.on_step(metrics))

    def _check_finite(self) -> None:
        """Stop at the first non-finite step. The step has kept the weights as they were before it."""
        unchecked, self._unchecked = self._unchecked, []
        flags = torch.stack([result.finite for _, result in unchecked]).tolist() if unchecked else []
        for number in (number for (number, _), finite in zip(unchecked, flags, strict=True) if not finite):
            if self.plan.on_nonfinite == "stop":
                raise ValueError(self._diagnose(number))
            self._say(f"step {number}: loss or gradient not finite; skipped")

    def _diagnose(self, number: int) -> str:
        """Build the failing batch again and look for the first module that is not finite on it."""
        start = self.progress.step_in_epoch - (self.progress.step - number) - 1
        batch = next(self._batches(start_step=start))
        seed_step(self.plan.seed, number - 1, self.process.rank)
        with autocast(self.step.device, self.step.precision):
            module = find_nonfinite(self.step.module, batch.images, batch.targets)
        names = ", ".join(self.sample_name(int(i)) for i in batch.sample_ids[:8])
        more = f", … ({len(batch.sample_ids)})" if len(batch.sample_ids) > 8 else ""
        return (
            f"step {number}: the loss or a gradient is not finite; first seen in {module or 'the optimizer step'}; "
            f"images {names}{more}; the last good checkpoint is kept. Lower optimizer.lr, set train.clip_grad, "
            "or skip such steps with train.on_nonfinite=skip"
        )

    def _save(self) -> None:
        self._check_finite()
        images = self.train_batches.dataset.collect(self.process)
        self._say(*self.train_batches.dataset.take_news())
        progress = self.progress
        progress.elapsed_seconds = time.perf_counter() - self._started_at
        shards = self.checkpoints.open_shards() if self.sharded and self.process.is_main else None
        shards = self.process.broadcast(shards) if self.sharded else None
        state = collect_state(self.step, shards)
        if self.process.is_main:
            identity = {} if self.identity is None else {"identity": self.identity.to_dict()}
            whole = {"progress": vars(progress), "state": state, "images": images, **identity}
            self.checkpoints.save(
                whole, step=progress.step, best_step=progress.best_step, keep_steps=progress.keep_steps, shards=shards
            )
        self.process.wait()

    def _say(self, *texts: str) -> None:
        for text in texts:
            self._tell(methodcaller("on_message", text))

    def _tell(self, event: Callable[[Observer], bool | None]) -> None:
        """Tell every observer. One that fails is told nothing more, and training goes on."""
        for observer in list(self.observers):
            try:
                if event(observer):
                    self._stop_requested = True
            except Exception as error:
                if observer.is_essential:
                    raise
                self.observers.remove(observer)
                self._say(f"{type(observer).__name__} failed ({first_line(error)}); training goes on without it")

    def _request_stop(self, signal_name: str) -> None:
        self._stop_requested = self._signalled = True
        self._say(f"{signal_name}: finishing this step and saving; once more stops at once")
