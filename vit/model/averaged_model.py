"""Several classifiers as one module."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.logits import compute_logits
from vit.runtime.tensors import Images

# Smallest probability that is kept apart from 0, and the smallest distance from 1.
_SMALLEST = 1e-37
_EPSILON = 1e-7


class AveragedModel(nn.Module):
    """A module whose probabilities are the mean of those of several models (Lakshminarayanan, Pritzel
    & Blundell 2017).

    Args:
        models: The models, which take the same images.
        temperatures: Divisor of the logits of each.
        orders: For each model, the place of each class of the first model among its own.
        is_multilabel: Probabilities are those of labels, which don't exclude one another.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        temperatures: Sequence[float],
        orders: Sequence[Sequence[int]],
        is_multilabel: bool,
    ) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.temperatures = list(temperatures)
        self.orders = [list(order) for order in orders]
        self.is_multilabel = is_multilabel

    def forward(self, images: Images) -> Float[Tensor, "B C"]:
        """Return logits whose softmax, or sigmoid for labels, is the mean probability."""
        mean: Tensor | float = 0.0
        for model, temperature, order in zip(
            self.models, self.temperatures, self.orders, strict=True
        ):
            logits = compute_logits(model, images)[:, order] / temperature
            mean = mean + (logits.sigmoid() if self.is_multilabel else logits.softmax(dim=-1))
        probabilities = torch.as_tensor(mean / len(self.models)).clamp_min(_SMALLEST)
        if self.is_multilabel:
            return probabilities.log() - (1 - probabilities).clamp_min(_EPSILON).log()
        return probabilities.log()
