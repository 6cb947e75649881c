"""Optimizer by name."""

from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from vit.optim.groups import parameter_groups
from vit.optim.muon import Muon
from vit.runtime.arguments import check_choice

OptimizerName = Literal["adamw", "sgd", "muon"]


def create_optimizer(
    name: OptimizerName,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    momentum: float = 0.95,
    layer_decay: float = 1.0,
    muon_lr: float = 0.02,
    muon_dtype: torch.dtype = torch.float32,
) -> Optimizer:
    """An optimizer over all trainable parameters of `model`. `betas` are AdamW's, `momentum` is SGD's and Muon's
    (Nesterov's). "muon" takes `muon_lr` for hidden matrices, whose products it computes in `muon_dtype`, and `lr` and
    `betas` for AdamW on the rest."""
    check_choice(name, get_args(OptimizerName), name="optimizer")
    hidden_lr = muon_lr if name == "muon" else None
    groups = parameter_groups(model, lr=lr, weight_decay=weight_decay, layer_decay=layer_decay, muon_lr=hidden_lr)
    if name == "muon":
        return Muon(groups, lr=lr, betas=betas, weight_decay=weight_decay, momentum=momentum, dtype=muon_dtype)
    if name == "adamw":
        return AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    optimizer = SGD(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=momentum > 0, fused=True)
    # torch allocates the buffers in the first step, uninitialised where that step finds a non-finite gradient
    for parameter in (parameter for group in groups if momentum > 0 for parameter in group["params"]):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
