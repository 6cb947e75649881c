"""Exponential moving average of the weights."""

import torch
from torch import Tensor, nn


class WeightAverage:
    """Keeps `model`, a copy made by the caller, whose weights follow the trained ones:
    average ← d · average + (1 − d) · weights.

    d rises from 0.1 to `decay` as (1 + step) / (10 + step), so the random first weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"ema_decay {decay} is not between 0 and 1; 0.999 to 0.9999 is usual")
        self.decay = decay
        self.model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, *, unless: Tensor, step: int) -> None:
        """Follow `model` after step number `step`, counted from 1, except where `unless` holds."""
        weight = (1 - min(self.decay, (1 + step) / (10 + step))) * (~unless)
        averages = [value for value in self.model.state_dict().values() if value.is_floating_point()]
        values = [value for value in model.state_dict().values() if value.is_floating_point()]
        change = torch._foreach_sub(values, averages)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(averages, change)
