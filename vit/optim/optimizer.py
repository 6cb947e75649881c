"""Optimizer by name."""

from typing import Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from vit.optim.groups import parameter_groups
from vit.optim.muon import MOMENTUM, Muon


def create_optimizer(
    name: Literal["adamw", "sgd", "muon"],
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    layer_decay: float = 1.0,
    muon_lr: float = 0.02,
    muon_dtype: torch.dtype = torch.float32,
) -> Optimizer:
    """Create an optimizer for all trainable parameters of a model.

    Args:
        name: "muon" updates hidden matrices by Muon and the rest by AdamW. "sgd" has Nesterov
            momentum of 0.95.
        model: Model to train.
        lr: Learning rate of AdamW or SGD.
        weight_decay: Weight decay of matrices and kernels.
        betas: Decay rates of AdamW.
        layer_decay: Factor of the learning rate from a layer to the one below.
        muon_lr: Learning rate of Muon.
        muon_dtype: Data type of Muon's products.
    """
    groups = parameter_groups(
        model,
        lr=lr,
        weight_decay=weight_decay,
        layer_decay=layer_decay,
        muon_lr=muon_lr if name == "muon" else None,
    )
    if name == "muon":
        return Muon(groups, lr=lr, betas=betas, dtype=muon_dtype)
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=betas, fused=True)

    optimizer = SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True, fused=True)
    # torch allocates the buffers in the first step, uninitialised if that step finds a gradient that
    # is not finite.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
