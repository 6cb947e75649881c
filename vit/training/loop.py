"""The training loop: epochs of steps, an evaluation, a checkpoint.

Everything random in a step is a function of (seed, step, rank), and the batches are one of (seed, epoch): a run that
stops anywhere and goes on from its last checkpoint ends, bit for bit, where an uninterrupted one ends.
"""

import dataclasses
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vit.checkpoint import CheckpointStore
from vit.runtime.processes import Process
from vit.training.observers import Observer, StepReport
from vit.training.state import collect_state, load_shards, load_state, save_shards
from vit.training.step import StepResult, TrainStep, find_nonfinite

LOG_EVERY_STEPS = 20  # for the record; fixed, so that a resumed run's curves have the same points
SECONDS_BETWEEN_GLANCES = 0.5  # reading a result waits for the device


class Batch(Protocol):
    """What the loop needs of a batch."""

    @property
    def images(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def sample_ids(self) -> Tensor: ...


class Batches(Protocol):
    """A loader: `len()` steps an epoch, in an order that is a function of the epoch alone."""

    def __len__(self) -> int: ...
    def epoch(
        self, epoch: int, *, start_step: int = 0, image_size: tuple[int, int] | None = None, mix: bool = True
    ) -> Iterator[Any]: ...


@dataclass(frozen=True)
class Plan:
    """How long, and what happens when."""

    epochs: int
    total_steps: int
    seed: int
    batch_size: int  # images a step, over all processes
    evaluate_every_epochs: int = 1
    checkpoint_every_steps: int | None = None
    keep_every_epochs: int | None = None
    image_sizes: tuple[tuple[float, tuple[int, int]], ...] = ()  # (share of the run until which, (H, W))
    mix_until: float = 1.0  # share of the run after which mixup and cutmix stop
    on_nonfinite: str = "stop"

    def image_size(self, epoch: int) -> tuple[int, int] | None:
        """The size of epoch number `epoch`, counted from 0; None for the data's own."""
        for until, size in self.image_sizes:
            if epoch < until * self.epochs:
                return size
        return None


@dataclass
class Progress:
    """Where a run is; with the step's state, all that continuing it takes."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    best_step: int = 0
    best_top1: float = -1.0
    best_loss: float = float("inf")
    keep_steps: list[int] = field(default_factory=list)
    elapsed_seconds: float = 0.0
    # of the running epoch, on the device until the epoch ends
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    correct: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    finite_steps: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    epoch_seconds: float = 0.0


class Stopped(Exception):
    """The run was asked to stop and has saved its state; it can be requeued."""


class Trainer:
    """Runs `plan` with the given parts. `save_model` writes the model file of the best model; `sharded` has
    each process write its own part of a checkpoint."""

    def __init__(
        self,
        step: TrainStep,
        *,
        plan: Plan,
        train_batches: Batches,
        validation_batches: Batches | None,
        checkpoints: CheckpointStore,
        save_model: Callable[[nn.Module], None],
        observers: list[Observer],
        process: Process,
        sharded: bool = False,
        sample_name: Callable[[int], str] = str,
    ) -> None:
        self.step = step
        self.plan = plan
        self.train_batches = train_batches
        self.validation_batches = validation_batches
        self.checkpoints = checkpoints
        self.save_model = save_model
        self.observers = observers
        self.process = process
        self.sharded = sharded
        self.sample_name = sample_name
        self.progress = Progress()
        self._move_sums()
        self._stop_requested = False
        self._last_glance = 0.0
        self._resumed_at = 0.0
        self._recent: list[
            tuple[int, StepResult]
        ] = []  # not yet looked at: reading them waits for the device

    def resume(self) -> bool:
        """Go back to the newest whole checkpoint; False where there is none."""
        found = self.checkpoints.load_latest(warn=self._say) if self.process.is_main else None
        found = self.process.broadcast(found)
        if found is None:
            return False
        state, shards = found
        self.progress = Progress(**state["progress"])
        self._move_sums()
        if shards is None:
            load_state(self.step, state["state"])
        else:
            load_shards(self.step, shards, state["state"])
        return True

    def run(self) -> Progress:
        """Train to the end of the plan. Raises Stopped after SIGINT or SIGTERM, with the state saved."""
        progress, plan = self.progress, self.plan
        self._resumed_at = time.perf_counter() - progress.elapsed_seconds
        with self._signals():
            try:
                for observer in self.observers:
                    observer.on_start(step=progress.step, total_steps=plan.total_steps)
                while progress.step < plan.total_steps:
                    self._train_epoch()
                    self._finish_epoch()
            finally:
                for observer in self.observers:
                    observer.on_end()
        return progress

    def _train_epoch(self) -> None:
        """The rest of the running epoch, or of the plan."""
        progress, plan = self.progress, self.plan
        self.step.model.train()
        before = time.perf_counter() - progress.epoch_seconds
        for batch in self._batches(start_step=progress.step_in_epoch):
            seed_step(plan.seed, progress.step, self.process.rank)
            result = self.step(batch.images, batch.targets)
            progress.step += 1
            progress.step_in_epoch += 1
            progress.loss_sum += torch.where(result.finite, result.loss, 0)
            progress.correct += result.correct
            progress.finite_steps += result.finite
            progress.epoch_seconds = time.perf_counter() - before
            self._watch(result)
            if self.process.any(self._stop_requested, self.step.device):
                self._check_finite()
                self._save()
                raise Stopped(f"stopped after step {progress.step}; continue with --resume")
            if progress.step >= plan.total_steps:
                break
            # an epoch's last step is saved when its figures are: a kill between the two would log them twice
            if self._is_checkpoint_due() and progress.step_in_epoch < len(self.train_batches):
                self._check_finite()
                self._save()

    def _batches(self, *, start_step: int) -> Iterator[Batch]:
        epoch, plan = self.progress.epoch, self.plan
        return self.train_batches.epoch(
            epoch,
            start_step=start_step,
            image_size=plan.image_size(epoch),
            mix=epoch < plan.mix_until * plan.epochs,
        )

    def _finish_epoch(self) -> None:
        """Evaluate, keep the best model, tell the observers, save."""
        progress, plan = self.progress, self.plan
        self._check_finite()
        is_last = progress.step >= plan.total_steps
        is_due = is_last or (progress.epoch + 1) % plan.evaluate_every_epochs == 0
        model = self.step.averaged_model
        val_loss, val_top1 = self.evaluate(model) if is_due and self.validation_batches else (None, None)
        row = self._row(val_loss=val_loss, val_top1=val_top1)
        if is_due and self._is_best(val_loss, val_top1):
            progress.best_step = progress.step
            if val_loss is not None and val_top1 is not None:
                progress.best_loss, progress.best_top1 = val_loss, val_top1
            self.save_model(model)
        for observer in self.observers:
            observer.on_epoch(row, model)
        if plan.keep_every_epochs and (progress.epoch + 1) % plan.keep_every_epochs == 0:
            progress.keep_steps.append(progress.step)
        progress.epoch += 1
        progress.step_in_epoch = 0
        progress.epoch_seconds = 0.0
        for total in (progress.loss_sum, progress.correct, progress.finite_steps):
            total.zero_()
        if is_due or self._is_checkpoint_due():
            self._save()

    def _is_checkpoint_due(self) -> bool:
        every = self.plan.checkpoint_every_steps
        return every is not None and self.progress.step % every == 0

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """(mean cross-entropy, top-1 from 0 to 1) on the validation images, over all processes."""
        assert self.validation_batches is not None
        model.eval()
        device = self.step.device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        correct = torch.zeros((), dtype=torch.int64, device=device)
        seen = torch.zeros((), dtype=torch.int64, device=device)
        for batch in self.validation_batches.epoch(0):
            with self.step.autocast():
                logits = model(batch.images)
            loss += nn.functional.cross_entropy(logits.float(), batch.labels, reduction="sum")
            correct += (logits.argmax(dim=1) == batch.labels).sum()
            seen += len(batch.labels)
        loss, correct, seen = self.process.sum(loss, correct, seen)
        return float(loss / seen), float(correct / seen)

    def _is_best(self, val_loss: float | None, val_top1: float | None) -> bool:
        """The held-out accuracy decides, the loss breaks ties; without held-out images the last is the best."""
        if val_loss is None or val_top1 is None:
            return True
        return (val_top1, -val_loss) > (self.progress.best_top1, -self.progress.best_loss)

    def _row(self, *, val_loss: float | None, val_top1: float | None) -> dict[str, Any]:
        progress = self.progress
        progress.elapsed_seconds = time.perf_counter() - self._resumed_at
        images = progress.step_in_epoch * self.plan.batch_size
        return {
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "train_loss": float(progress.loss_sum) / max(int(progress.finite_steps), 1),
            "train_top1": int(progress.correct) / images,
            "val_loss": val_loss,
            "val_top1": val_top1,
            "learning_rate": float(self.step.schedule.get_last_lr()[0]),
            "images_per_second": images / progress.epoch_seconds,
            "elapsed_seconds": progress.elapsed_seconds,
            "skipped_steps": int(self.step.nonfinite_steps),
        }

    def _watch(self, result: StepResult) -> None:
        """Show progress now and then, and log the steps that are always logged."""
        self._recent.append((self.progress.step, result))
        now = time.perf_counter()
        is_log = self.progress.step % LOG_EVERY_STEPS == 0
        is_glance = now - self._last_glance > SECONDS_BETWEEN_GLANCES
        if self.step.device.type == "cpu" or is_log:  # on a CPU looking costs nothing
            self._check_finite()
        if not (is_log or is_glance):
            return
        self._last_glance = now
        report = self._report(result)
        for observer in self.observers:
            if is_log:
                observer.on_log(report)
            if is_glance:
                observer.on_step(report)

    def _report(self, result: StepResult) -> StepReport:
        progress, plan = self.progress, self.plan
        rate = progress.step_in_epoch * plan.batch_size / progress.epoch_seconds
        return StepReport(
            epoch=progress.epoch,
            step=progress.step,
            loss=float(result.loss),
            top1=int(result.correct) / plan.batch_size,
            grad_norm=float(result.grad_norm),
            learning_rate=float(self.step.schedule.get_last_lr()[0]),
            images_per_second=rate,
            seconds_left=(plan.total_steps - progress.step) * plan.batch_size / rate,
        )

    def _check_finite(self) -> None:
        """Stop at the first non-finite step. The step's guard has kept the weights as they were before it."""
        recent, self._recent = self._recent, []
        for number, result in recent:
            if bool(result.finite):
                continue
            if self.plan.on_nonfinite == "skip":
                self._say(f"step {number}: loss or gradient not finite; skipped")
                continue
            raise ValueError(self._describe_nonfinite(number))

    def _describe_nonfinite(self, number: int) -> str:
        """Draw the failing batch again and look for the first module that breaks on it."""
        progress = self.progress
        start = progress.step_in_epoch - (progress.step - number) - 1
        batch = next(self._batches(start_step=start))
        seed_step(self.plan.seed, number - 1, self.process.rank)
        with self.step.autocast():
            module = find_nonfinite(self.step.module, batch.images, batch.targets)
        ids = ", ".join(self.sample_name(int(i)) for i in batch.sample_ids[:8])
        more = f", … ({len(batch.sample_ids)})" if len(batch.sample_ids) > 8 else ""
        return (
            f"step {number}: the loss or a gradient is not finite; first seen in {module or 'the optimizer step'}; "
            f"images {ids}{more}; the last good checkpoint is kept. Lower optimizer.lr, set train.clip_grad, "
            "or pass over such steps with train.on_nonfinite=skip"
        )

    def _move_sums(self) -> None:
        for name in ("loss_sum", "correct", "finite_steps"):
            setattr(self.progress, name, getattr(self.progress, name).to(self.step.device))

    def _save(self) -> None:
        progress = self.progress
        progress.elapsed_seconds = time.perf_counter() - self._resumed_at
        shards = None
        if self.sharded:
            shards = self.process.broadcast(self.checkpoints.open_shards() if self.process.is_main else None)
        state = save_shards(self.step, shards) if shards else collect_state(self.step)
        if self.process.is_main:
            self.checkpoints.save(
                {"progress": _as_plain(progress), "state": state},
                step=progress.step,
                best_step=progress.best_step,
                keep_steps=progress.keep_steps,
                shards=shards,
            )
        self.process.wait()

    def _say(self, text: str) -> None:
        for observer in self.observers:
            observer.on_message(text)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM finish the step and save; a second one stops at once."""

        def request_stop(number: int, frame: FrameType | None) -> None:
            self._stop_requested = True
            for kind in (signal.SIGINT, signal.SIGTERM):
                signal.signal(kind, signal.SIG_DFL)
            self._say(
                f"{signal.Signals(number).name}: finishing this step and saving; once more stops at once"
            )

        previous = {kind: signal.signal(kind, request_stop) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in previous.items():
                signal.signal(kind, handler)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make every generator's draws in one step a function of (seed, step, rank), so that none needs saving."""
    value = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    torch.manual_seed(value)
    np.random.seed(value)  # noqa: NPY002 (a layer of the user's may draw from it)
    random.seed(value)


def _as_plain(progress: Progress) -> dict[str, Any]:
    """A dictionary that torch.load(weights_only=True) reads back."""
    return {item.name: getattr(progress, item.name) for item in dataclasses.fields(progress)}
