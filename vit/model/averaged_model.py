"""Several classifiers as one module."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.logits import compute_logits
from vit.runtime.tensors import Images


class AveragedModel(nn.Module):
    """A module whose probabilities are the mean of those of models that take the same images
    (Lakshminarayanan, Pritzel & Blundell 2017). `temperatures` divide the logits of each."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        temperatures: Sequence[float],
        is_multilabel: bool,
    ) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.temperatures = list(temperatures)
        self.is_multilabel = is_multilabel

    def forward(self, images: Images) -> Float[Tensor, "B C"]:
        """Return logits whose softmax, or sigmoid for labels, is the mean probability."""
        parts = zip(self.models, self.temperatures, strict=True)
        logits = torch.stack(
            [compute_logits(model, images) / temperature for model, temperature in parts]
        )  # [M, B, C]
        # sums of probabilities by their logarithms, which hold the smallest ones, too
        if self.is_multilabel:
            found, missing = (F.logsigmoid(sign * logits).logsumexp(dim=0) for sign in (1, -1))
            return found - missing
        return logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(self.models))
