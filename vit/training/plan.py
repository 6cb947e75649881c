"""The plan of a run, and its progress."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit.config import TrainConfig

# In runs of fewer epochs, a change at the end of an epoch could come much too late.
_MIN_EPOCHS = 4


class Phase(NamedTuple):
    """A part of a run whose batches and steps are of one kind: the step before which it ends, the
    (height, width) of its images or None for the data's own, the fraction of the patches that a
    step drops, and whether mixup and cutmix are applied."""

    end: int
    image_size: tuple[int, int] | None
    patch_drop_rate: float
    mixes: bool


def resolve_image_sizes(
    scales: Iterable[tuple[float, float]], image_size: tuple[int, int], patch_size: tuple[int, int]
) -> tuple[tuple[float, tuple[int, int]], ...]:
    """Return `train.image_sizes` in pixels: pairs of a fraction of the run and the (height, width)
    until then, rounded to whole patches."""
    resolved = []
    for until, scale in scales:
        height, width = (
            max(round(scale * side / patch), 1) * patch
            for side, patch in zip(image_size, patch_size, strict=True)
        )
        resolved.append((until, (height, width)))
    return tuple(resolved)


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How long a run is, and what happens when.

    Args:
        settings: Settings of the training loop. What follows is computed from them.
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

    def find_phase(self, step: int) -> Phase:
        """Return the phase of step number `step`, counted from 0."""
        rates = self.settings.patch_drop_rates or ()
        mix_end = self.find_end(self.mix_until)

        def look_up(rows: Iterable[tuple[float, Any]], default: Any) -> Any:
            return next((value for until, value in rows if step < self.find_end(until)), default)

        ends = [self.find_end(until) for until, _ in [*self.image_sizes, *rates]]
        return Phase(
            min((end for end in [*ends, mix_end] if end > step), default=self.total_steps),
            look_up(self.image_sizes, None),
            look_up(rates, 0.0),
            step < mix_end,
        )


@dataclasses.dataclass
class Progress:
    """The progress of a run. Checkpoints hold these fields; with the state of the training step
    they are all that is needed to continue.

    Attributes:
        total_steps: Steps that fit into the time; None: those of the plan.
        best_step: Step of the best model; 0: there is no model yet, or that of before the first.
        best: Measures of the best model on the validation images, by name.
        epoch_sums: Sums over the current epoch, on the device: losses of the steps, right images.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    total_steps: int | None = None
    best_step: int = 0
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    elapsed_seconds: float = 0.0
    epoch_seconds: float = 0.0
    epoch_sums: Tensor = dataclasses.field(
        default_factory=lambda: torch.zeros(2, dtype=torch.float64)
    )

    @property
    def has_model(self) -> bool:
        """True if a model was kept. With validation images, that of step 0 has measures."""
        return self.best_step > 0 or bool(self.best)

    def start_epoch(self) -> None:
        """Start the next epoch at zero."""
        self.epoch += 1
        self.step_in_epoch = 0
        self.epoch_seconds = 0.0
        self.epoch_sums.zero_()

    def record_best(self, measures: dict[str, float], *, select_by: str) -> bool:
        """Record the measures of a step if they are the best by `select_by`, and return whether
        they are. The smaller loss breaks ties. Without validation images the last step is the
        best."""
        if measures:
            new, old = (
                (values.get(select_by, -1.0), -values.get("loss", math.inf))
                for values in (measures, self.best)
            )
            if not new > old:  # nan is never the best
                return False
            self.best = measures
        self.best_step = self.step
        return True
