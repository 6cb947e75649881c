"""Learning rate schedules, as factors of each group's own rate."""

import math
from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from vit.runtime.arguments import check_choice

ScheduleName = Literal["cosine", "linear", "constant-cooldown"]


def schedule_factor(
    step: int, *, name: ScheduleName, warmup_steps: int, total_steps: int, cooldown_fraction: float = 0.25
) -> float:
    """Factor of the learning rate in step `step`, counted from 0. Warm-up rises linearly and reaches 1 in step
    `warmup_steps`; the fall would reach 0 in step `total_steps`, the first one after the run. "constant-cooldown" stays
    at 1 until the last `cooldown_fraction`, then falls linearly."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if name == "constant-cooldown":
        warmup_steps = max(warmup_steps, round(total_steps * (1 - cooldown_fraction)))
    done = min(max(step - warmup_steps, 0) / max(total_steps - warmup_steps, 1), 1.0)
    return 0.5 * (1 + math.cos(math.pi * done)) if name == "cosine" else 1 - done


def create_schedule(
    optimizer: Optimizer, *, name: ScheduleName, warmup_steps: int, total_steps: int, cooldown_fraction: float = 0.25
) -> LRScheduler:
    """A scheduler over `schedule_factor`; step it once after every optimizer step."""
    check_choice(name, get_args(ScheduleName), name="schedule")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warm-up of {warmup_steps} steps does not fit into a run of {total_steps}; shorten it")
    if not 0 < cooldown_fraction <= 1:
        raise ValueError(f"cooldown_fraction {cooldown_fraction} is not in (0, 1]; 0.25 is usual")
    steps: dict[str, Any] = {"warmup_steps": warmup_steps, "total_steps": total_steps}
    settings = steps | {"cooldown_fraction": cooldown_fraction}
    return LambdaLR(optimizer, lambda step: schedule_factor(step, name=name, **settings))
