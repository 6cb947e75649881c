"""The plan of a run, and its progress."""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from vit.config import TrainConfig

# In runs of fewer epochs, a change at the end of an epoch could come much too late.
_MIN_EPOCHS = 4


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How long a run is, and what happens when.

    Args:
        settings: Settings of the training loop. What follows is computed from them.
        steps_per_epoch: Batches of an epoch.
        total_steps: Step after which the run ends.
        batch_size: Images of a step, over all processes.
        image_sizes: Pairs (end, (height, width)), where `end` is a fraction of the run; empty for
            the data's own size.
        mix_until: Fraction of the run after which mixup and cutmix stop.
    """

    settings: TrainConfig
    _: dataclasses.KW_ONLY
    steps_per_epoch: int
    total_steps: int
    batch_size: int
    image_sizes: tuple[tuple[float, tuple[int, int]], ...] = ()
    mix_until: float = 1.0

    def find_end(self, fraction: float) -> int:
        """Return the step at which a fraction of the run has passed: the end of the epoch in which
        it passes; the very step in a run of few epochs, and in the last epoch."""
        epochs = self.total_steps / self.steps_per_epoch
        end = math.ceil(fraction * epochs) * self.steps_per_epoch
        if epochs >= _MIN_EPOCHS and end < self.total_steps:
            return end
        return round(fraction * self.total_steps)

    def find_change(self, step: int) -> int:
        """Return the first step after `step` from which batches or steps are of another kind."""
        rows = [*self.image_sizes, *(self.settings.patch_drop_rates or ()), (self.mix_until, True)]
        ends = [self.find_end(until) for until, _ in rows]
        return min((end for end in ends if end > step), default=self.total_steps)

    def image_size(self, step: int) -> tuple[int, int] | None:
        """Return the size (height, width) of step number `step`, counted from 0. None: the data's
        own size."""
        sizes = (size for until, size in self.image_sizes if step < self.find_end(until))
        return next(sizes, None)

    def patch_drop_rate(self, step: int) -> float:
        """Return the fraction of the patches that step number `step` drops."""
        rates = self.settings.patch_drop_rates or ()
        return next((rate for until, rate in rates if step < self.find_end(until)), 0.0)

    def mixes(self, step: int) -> bool:
        """Return whether mixup and cutmix are applied in step number `step`."""
        return step < self.find_end(self.mix_until)


class Validation(NamedTuple):
    """The measures on the validation images: mean cross-entropy; accuracy (with several labels an
    image, that of all of them), F1 and mean average precision (of several labels) from 0 to 1, and
    -1 where they are not known."""

    loss: float
    top1: float
    macro_f1: float
    map: float = -1.0


# worse than all others
NO_VALIDATION = Validation(loss=math.inf, top1=-1.0, macro_f1=-1.0)


@dataclasses.dataclass
class Progress:
    """The progress of a run. Checkpoints hold these fields; with the state of the training step
    they are all that is needed to continue.

    Attributes:
        step: Steps of the whole run so far.
        total_steps: Steps that fit into the time; None: those of the plan.
        best_step: Step of the best model; 0: there is no model yet, or that of before the first.
        best: Measures of the best model.
        epoch_sums: Sums over the current epoch, on the device until it ends: losses of finite
            steps, correct images, number of finite steps.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    total_steps: int | None = None
    best_step: int = 0
    best: Validation = NO_VALIDATION
    elapsed_seconds: float = 0.0
    epoch_seconds: float = 0.0
    epoch_sums: Tensor = dataclasses.field(
        default_factory=lambda: torch.zeros(3, dtype=torch.float64)
    )

    @property
    def has_model(self) -> bool:
        """True if a model was kept. With validation images, that of step 0 has measures."""
        return self.best_step > 0 or self.best.top1 >= 0

    def start_epoch(self) -> None:
        """Start the next epoch at zero."""
        self.epoch += 1
        self.step_in_epoch = 0
        self.epoch_seconds = 0.0
        self.epoch_sums.zero_()

    def record_best(self, validation: Validation | None, *, select_by: str) -> bool:
        """Record the measures of a step if they are the best by `select_by`, and return whether
        they are. The smaller loss breaks ties. Without validation images the last step is the
        best."""
        if validation is not None:
            ranks = [(getattr(each, select_by), -each.loss) for each in (validation, self.best)]
            if not ranks[0] > ranks[1]:  # nan is never the best
                return False
            self.best = validation
        self.best_step = self.step
        return True
