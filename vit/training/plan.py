"""What a run is to do, and how far it has come."""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

_OF_PATCHES = 0.7  # of a step's time, that falls with the patches that are kept: cifar10/cpu on a Zen 4; Xeon: 0.6


@dataclass(frozen=True)
class TrainingPlan:
    """How long, and what happens when."""

    epochs: int
    steps_per_epoch: int
    total_steps: int
    seed: int
    batch_size: int  # images a step, over all processes
    evaluate_every_epochs: int = 1
    checkpoint_every_steps: int | None = None
    keep_every_epochs: int | None = None
    plateau_steps: int = 0  # at a constant rate before its cooldown: from the last checkpoint there a run may go on
    image_sizes: tuple[tuple[float, tuple[int, int]], ...] = ()  # (fraction of the run until which, (H, W))
    patch_drop_rates: tuple[tuple[float, float], ...] = ()  # (fraction of the run until which, share)
    mix_until: float = 1.0  # fraction of the run after which mixup and cutmix stop
    on_nonfinite: str = "stop"
    select_by: str = "top1"  # or macro_f1, loss: what makes a model the best
    early_stopping_patience: int | None = None  # evaluations without a better model after which the run ends
    timeout_seconds: float = 600  # without an answer from another process

    def image_size(self, epoch: int) -> tuple[int, int] | None:
        """The size of epoch number `epoch`, counted from 0; None for the data's own."""
        return next((size for until, size in self.image_sizes if epoch < until * self.epochs), None)

    def patch_drop_rate(self, epoch: int) -> float:
        """The share of an image's patches that the steps of epoch number `epoch` drop."""
        return next((rate for until, rate in self.patch_drop_rates if epoch < until * self.epochs), 0.0)

    def relative_work(self, epoch: int, image_size: tuple[int, int]) -> float:
        """A step's time in epoch number `epoch`, as a fraction of that with all patches of an image of `image_size`:
        proportional to its pixels, a part of it to the patches that it keeps."""
        pixels = math.prod(self.image_size(epoch) or image_size) / math.prod(image_size)
        return pixels * (1 - _OF_PATCHES * self.patch_drop_rate(epoch))


class Validation(NamedTuple):
    """The measures on the validation images."""

    loss: float  # mean cross-entropy
    top1: float  # from 0 to 1, as is macro_f1
    macro_f1: float

    def rank(self, select_by: str) -> tuple[float, float]:
        """Larger for a better model: the smaller loss breaks ties of accuracy, the larger accuracy ties of loss."""
        return (-self.loss, self.top1) if select_by == "loss" else (getattr(self, select_by), -self.loss)


@dataclass
class Progress:
    """Where a run is; with the step's state, all that continuing it takes. Checkpoints hold these fields."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    best_step: int = 0
    best_top1: float = -1.0
    best_loss: float = float("inf")
    best_macro_f1: float = -1.0
    evaluations_since_best: int = 0
    keep_steps: list[int] = field(default_factory=list)
    elapsed_seconds: float = 0.0
    # of the running epoch, on the device until the epoch ends
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    correct: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    finite_steps: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    epoch_seconds: float = 0.0

    def __post_init__(self) -> None:
        counts = (
            self.epoch,
            self.step_in_epoch,
            self.step,
            self.best_step,
            self.evaluations_since_best,
            *self.keep_steps,
        )
        best = (self.best_top1, self.best_loss, self.best_macro_f1)
        numbers = (*best, self.elapsed_seconds, self.epoch_seconds)
        sums = ((self.loss_sum, torch.float64), (self.correct, torch.int64), (self.finite_steps, torch.int64))
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):
            raise TypeError(f"counts of steps and epochs are {counts}")
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError(f"metrics and seconds are {numbers}")
        if not all(total.dtype == kind and total.ndim == 0 for total, kind in sums):
            raise TypeError("the sums of the running epoch are no single numbers")

    def to(self, device: torch.device) -> "Progress":
        """The same with its sums on `device`."""
        loss_sum, correct = self.loss_sum.to(device), self.correct.to(device)
        return replace(self, loss_sum=loss_sum, correct=correct, finite_steps=self.finite_steps.to(device))

    def start_epoch(self) -> None:
        """Count from zero in the next epoch."""
        self.epoch += 1
        self.step_in_epoch, self.epoch_seconds = 0, 0.0
        for total in (self.loss_sum, self.correct, self.finite_steps):
            total.zero_()

    def is_done(self, plan: TrainingPlan) -> bool:
        """Whether nothing is left to do."""
        patience = plan.early_stopping_patience
        return self.step >= plan.total_steps or (patience is not None and self.evaluations_since_best >= patience)

    def forget_best(self) -> None:
        """The next evaluation is the best."""
        self.best_step, self.best_loss, self.best_top1, self.best_macro_f1 = 0, float("inf"), -1.0, -1.0

    def record_best(self, found: Validation | None, *, select_by: str) -> bool:
        """Note the step's validation metrics if they are the best; without validation images the last step is."""
        if found is not None:
            best = Validation(self.best_loss, self.best_top1, self.best_macro_f1)
            if not found.rank(select_by) > best.rank(select_by):
                self.evaluations_since_best += 1
                return False
            self.best_loss, self.best_top1, self.best_macro_f1 = found
        self.best_step, self.evaluations_since_best = self.step, 0
        return True
