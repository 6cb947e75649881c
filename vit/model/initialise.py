"""The weights that training starts from."""

import torch
from torch import nn


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """As DeiT and timm: linear maps and learned positions truncated normal with σ = 0.02, biases zero, tokens near 0.
    Convolutions are normal with the variance that keeps the signal's: LeCun et al. 1998; before ReLU He et al. 2015."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=0.02)
        elif isinstance(part, nn.Conv2d):
            gain = 1.0 if name.endswith("patch_embed.proj") else 2.0
            nn.init.normal_(part.weight, std=(gain / part.weight[0].numel()) ** 0.5)
        if isinstance(part, nn.Linear | nn.Conv2d) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for name, parameter in module.named_parameters(recurse=False):
        if name == "pos_embed":
            nn.init.trunc_normal_(parameter, std=0.02)
        elif name.endswith("_token"):
            nn.init.normal_(parameter, std=1e-6)
