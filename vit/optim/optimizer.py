"""Optimizer by name."""

from typing import Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from vit.optim.groups import parameter_groups
from vit.optim.muon import Muon


def create_optimizer(
    name: Literal["adamw", "muon"],
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    layer_decay: float = 1.0,
    muon_lr: float = 0.02,
    muon_dtype: torch.dtype = torch.float32,
) -> Optimizer:
    """An optimizer over all trainable parameters of a model.

    Args:
        name: "muon" updates hidden matrices by Muon and the rest by AdamW.
        model: to train.
        lr: of AdamW.
        weight_decay: of matrices and kernels.
        betas: of AdamW.
        layer_decay: the factor of the learning rate from a layer to the one below.
        muon_lr: of Muon.
        muon_dtype: of Muon's products.
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
    return AdamW(groups, lr=lr, betas=betas, fused=True)
