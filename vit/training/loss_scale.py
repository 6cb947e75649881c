"""The factor that keeps float16's gradients within its range (Micikevicius et al. 2018, arXiv
1710.03740, section 3.2).

float16 has no numbers between 0 and 6e-8, where many gradients lie, and none above 65,504. The loss
is multiplied by a factor before the backward pass, and the optimizer divides the gradients by it.
"""

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from vit.model.checkpoint import check_number

_START = 2.0**16
# The factor is doubled after this number of steps in a row with finite gradients.
_DOUBLING_STEPS = 2000
# Gradients that stay zero would double it until it is infinite, and halving would not help.
_LARGEST = 2.0**32


class LossScale(nn.Module):
    """The factor, a power of two so that it rounds nothing, and the count that decides on the next
    one. Both are on the device, so that nothing waits for it.

    Args:
        device: Device of the training step.
    """

    factor: Tensor
    finite_steps: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((), _START, device=device))
        # finite steps in a row since the factor was changed
        finite_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.register_buffer("finite_steps", finite_steps)

    def check(self) -> None:
        """Raise RuntimeError for values, perhaps of a file, that are out of their ranges."""
        check_number("the loss scale", self.factor, least=1, most=_LARGEST)
        check_number("the loss scale's steps", self.finite_steps, least=0, most=_DOUBLING_STEPS)

    def forward(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss * self.factor

    def can_fall(self) -> Bool[Tensor, ""]:
        """Return whether a smaller factor may make gradients finite."""
        return self.factor > 1

    def update(self, finite: Bool[Tensor, ""]) -> None:
        """Halve the factor after a step whose gradients were not finite; double it after 2,000 in a
        row that were."""
        self.finite_steps.add_(1).mul_(finite)
        doubles = self.finite_steps == _DOUBLING_STEPS
        change = torch.where(finite, 1.0 + doubles.float(), 0.5)
        self.factor.mul_(change).clamp_(1, _LARGEST)
        self.finite_steps.mul_(~doubles)
