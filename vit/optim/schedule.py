"""Learning rate schedules, as factors of each group's own rate."""

import math
from typing import Literal

ScheduleName = Literal["cosine", "linear", "constant-cooldown"]

_COOLDOWN_FRACTION = 0.25  # last part of the run, in which the rate falls


def schedule_factor(
    step: float, *, name: ScheduleName, warmup_steps: int, total_steps: int
) -> float:
    """Return the factor of the learning rate in a step.

    Args:
        step: Number of the step, from 0. In a shortened run, its place in the full one.
        name: Shape of the fall. "constant-cooldown" stays at 1 until the last quarter, then falls
            linearly.
        warmup_steps: Steps in which the factor rises linearly to 1.
        total_steps: Number of steps. The factor reaches 0 after the last one.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    fall_start = warmup_steps
    if name == "constant-cooldown":
        fall_start = max(warmup_steps, round(total_steps * (1 - _COOLDOWN_FRACTION)))
    done = max(step - fall_start, 0) / max(total_steps - fall_start, 1)
    done = min(done, 1.0)
    if name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done
