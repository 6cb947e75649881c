"""Models with weights that make every part of them matter."""

from collections.abc import Callable

import pytest
import torch
from torch import nn


@pytest.fixture
def randomise() -> Callable[[nn.Module], nn.Module]:
    return _randomise


@torch.no_grad()
def _randomise(module: nn.Module) -> nn.Module:
    """Draw every parameter so that each matters to the output: fresh biases, tokens and LayerScale
    are zero or near it, and would hide what is computed from them."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("gamma") or ("norm" in name and name.endswith("weight")) or ".ln" in name:
            values = 1 + 0.2 * values
        elif parameter.ndim in (2, 4):
            values = 0.7 * values / parameter[0].numel() ** 0.5
        else:
            values = 0.3 * values
        parameter.copy_(values)
    return module.eval()
