"""Optimizer by name, its parameter groups (weight decay, learning rates of layers, and the matrices
that Muon updates), and the schedule of the learning rates."""

import math
import re
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from vit.optim.muon import MOMENTUM, Muon

ScheduleName = Literal["cosine", "linear", "constant-cooldown"]

_COOLDOWN_FRACTION = 0.25  # last part of the run, in which the rate falls
_EMBEDDINGS = ("cls_token", "reg_token", "pos_embed")


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
    """Create an optimizer for all trainable parameters of a model, see `parameter_groups`. "muon"
    updates hidden matrices by Muon and the rest by AdamW, whose decay rates are `betas`; "sgd" has
    Nesterov momentum of 0.95."""
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
    # torch allocates the buffers in the first step, uninitialised if that step finds a gradient
    # that is not finite.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    muon_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Put every trainable parameter of a model into one group of equal settings.

    Args:
        model: Model with the parameter names of timm's vision transformers.
        lr: Learning rate of the last layer. Layer i of L has lr · layer_decay^(L + 1 − i) (BEiT,
            arXiv 2106.08254, appendix); the last block that is trained counts as the last one.
        weight_decay: Weight decay of matrices and kernels. Norms, biases and embeddings have none.
        layer_decay: Factor from 0 to 1. With 1, all layers have one rate.
        muon_lr: Learning rate of the groups for Muon: matrices of the blocks and kernels of the
            stem, except the first, which reads the pixels. None: no such groups.

    Returns:
        Groups with `num_matrices`, the number of matrices packed into one parameter: 3 for queries,
        keys and values, else 1, and 0 in groups without Muon.
    """
    kernels = [name for name, parameter in model.named_parameters() if parameter.ndim == 4]
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    # A stage of a model of timm counts as one layer.
    found = {name: re.search(r"(?:^|\.)(?:blocks|stages)\.(\d+)\.", name) for name in trained}
    block_numbers = {name: int(match[1]) for name, match in found.items() if match}
    depth = max(block_numbers.values(), default=-1) + 1

    groups: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        is_embedding = name.endswith(_EMBEDDINGS)
        layer = depth + 1
        if name in block_numbers:
            layer = block_numbers[name] + 1
        elif is_embedding or re.search(r"(^|\.)(patch_embed|stem|norm_pre)\.", name):
            layer = 0

        rate = layer_decay ** (depth + 1 - layer)
        num_matrices = 0
        is_hidden_matrix = parameter.ndim == 2 and name in block_numbers
        is_hidden_kernel = parameter.ndim == 4 and name != kernels[0]
        if muon_lr is not None and (is_hidden_matrix or is_hidden_kernel):
            rate *= muon_lr
            num_matrices = 3 if name.endswith("attn.qkv.weight") else 1
        else:
            rate *= lr
        decay = weight_decay if parameter.ndim >= 2 and not is_embedding else 0.0
        groups.setdefault((rate, decay, num_matrices), []).append(parameter)
    return [
        {"params": parameters, "lr": rate, "weight_decay": decay, "num_matrices": num_matrices}
        for (rate, decay, num_matrices), parameters in groups.items()
    ]


def schedule_factor(
    step: float, *, name: ScheduleName, warmup_steps: int, total_steps: int
) -> float:
    """Return the factor of the learning rate in a step, counted from 0; in a shortened run, in its
    place in the full one. The factor rises linearly to 1 in `warmup_steps`, and is 0 after the last
    step. "constant-cooldown" stays at 1 until the last quarter, then falls linearly.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    fall_start = warmup_steps
    if name == "constant-cooldown":
        fall_start = max(warmup_steps, round(total_steps * (1 - _COOLDOWN_FRACTION)))
    done = max(step - fall_start, 0) / max(total_steps - fall_start, 1)
    done = min(done, 1.0)
    if name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done
