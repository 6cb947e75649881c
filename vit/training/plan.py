"""What a run is to do, and how far it has come."""

import dataclasses
import math
from typing import Literal, NamedTuple, Self

import torch
from pydantic import ConfigDict, Field, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor

SelectBy = Literal["top1", "macro_f1", "loss"]

# of a step's time, that falls with the patches that are dropped: cifar10/cpu on a Zen 4; Xeon: 0.6
_PATCH_FRACTION = 0.7


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How long a run is, and what happens when.

    Args:
        epochs: the last one may be cut short by `total_steps`.
        steps_per_epoch: batches of an epoch.
        total_steps: after which the run ends.
        seed: of all random numbers.
        batch_size: images of a step, over all processes.
        evaluate_every_epochs: and after the last step.
        checkpoint_every_steps: beside the checkpoint after every evaluation.
        image_sizes: ((fraction of the run until which, (height, width)), …); empty for the data's
            own size.
        patch_drop_rates: ((fraction of the run until which, fraction of the patches), …).
        mix_until: fraction of the run after which mixup and cutmix stop.
        on_nonfinite: what becomes of the run after a step that is not finite.
        select_by: the measure of the best model, on the validation images.
        max_seconds: of the loop, which gets fewer steps where these would take longer.
        early_stopping_patience: evaluations without a better model after which the run ends; None
            for no end before `total_steps`.
        timeout_seconds: without an answer from another process, after which it is given up.
    """

    epochs: int
    steps_per_epoch: int
    total_steps: int
    seed: int
    batch_size: int
    evaluate_every_epochs: int = 1
    checkpoint_every_steps: int | None = None
    image_sizes: tuple[tuple[float, tuple[int, int]], ...] = ()
    patch_drop_rates: tuple[tuple[float, float], ...] = ()
    mix_until: float = 1.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    select_by: SelectBy = "top1"
    max_seconds: float | None = None
    early_stopping_patience: int | None = None
    timeout_seconds: float = 600

    def with_steps(self, total_steps: int) -> Self:
        """The plan, of another length."""
        epochs = math.ceil(self.epochs * total_steps / self.total_steps)
        return dataclasses.replace(self, total_steps=total_steps, epochs=epochs)

    def image_size(self, epoch: int) -> tuple[int, int] | None:
        """The size (height, width) of epoch number `epoch`, counted from 0; None for the data's
        own."""
        sizes = (size for until, size in self.image_sizes if epoch < until * self.epochs)
        return next(sizes, None)

    def patch_drop_rate(self, epoch: int) -> float:
        """The fraction of an image's patches that the steps of epoch number `epoch` drop."""
        rates = (rate for until, rate in self.patch_drop_rates if epoch < until * self.epochs)
        return next(rates, 0.0)

    def count_full_steps(self, image_size: tuple[int, int]) -> float:
        """How many steps with all patches of images of `image_size` take the time of the run. A
        step's time is taken as proportional to its images' pixels, and a part of it to the patches
        that are not dropped."""
        full_steps = 0.0
        for start in range(0, self.total_steps, self.steps_per_epoch):
            epoch = start // self.steps_per_epoch
            num_steps = min(self.steps_per_epoch, self.total_steps - start)
            pixels = math.prod(self.image_size(epoch) or image_size) / math.prod(image_size)
            full_steps += num_steps * pixels * (1 - _PATCH_FRACTION * self.patch_drop_rate(epoch))
        return full_steps


class Validation(NamedTuple):
    """The measures on the validation images."""

    loss: float  # mean cross-entropy
    top1: float  # from 0 to 1, as is macro_f1
    macro_f1: float

    def rank(self, select_by: SelectBy) -> tuple[float, float]:
        """Larger for a better model by the measure `select_by`; the smaller loss breaks ties of the
        others, the larger accuracy ties of loss."""
        if select_by == "loss":
            return -self.loss, self.top1
        return getattr(self, select_by), -self.loss


# worse than any
NO_VALIDATION = Validation(loss=math.inf, top1=-1.0, macro_f1=-1.0)


# checked when it is made, since its values may come from a file
@dataclass(config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
class Progress:
    """Where a run is; with the training step's state, all that continuing it takes. Checkpoints
    hold these fields.

    Raises:
        pydantic.ValidationError: a value is not of its field's kind.
    """

    epoch: NonNegativeInt = 0
    step_in_epoch: NonNegativeInt = 0
    step: NonNegativeInt = 0  # over the whole run, as are all numbers of steps but the one above
    total_steps: NonNegativeInt | None = None  # that were found to fit the time; None: the plan's
    best_step: NonNegativeInt = 0  # 0: there is no model yet
    best: Validation = NO_VALIDATION  # at `best_step`
    evaluations_since_best: NonNegativeInt = 0
    elapsed_seconds: float = 0.0
    epoch_seconds: float = 0.0

    # of the running epoch, on the device until it ends: losses of finite steps, correct images,
    # number of finite steps
    epoch_sums: Tensor = Field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def start_epoch(self) -> None:
        """Count from zero in the next epoch."""
        self.epoch += 1
        self.step_in_epoch = 0
        self.epoch_seconds = 0.0
        self.epoch_sums.zero_()

    def is_done(self, plan: TrainingPlan) -> bool:
        """Whether nothing is left to do."""
        patience = plan.early_stopping_patience
        has_stopped = patience is not None and self.evaluations_since_best >= patience
        return self.step >= plan.total_steps or has_stopped

    def record_best(self, validation: Validation | None, *, select_by: SelectBy) -> bool:
        """Note the step's measures if they are the best; without validation images the last step
        is. Returns whether they are."""
        if validation is not None:
            if not validation.rank(select_by) > self.best.rank(select_by):  # nan is never the best
                self.evaluations_since_best += 1
                return False
            self.best = validation
        self.best_step = self.step
        self.evaluations_since_best = 0
        return True
