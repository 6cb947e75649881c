"""Which parameters weight decay acts on, how fast each layer learns, and which matrices Muon
updates."""

import re
from typing import Any

from torch import nn

_EMBEDDINGS = ("cls_token", "dist_token", "reg_token", "pos_embed")


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    muon_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Every trainable parameter of a model once, in groups that share their settings.

    Args:
        model: with the names of timm's vision transformers.
        lr: of a parameter of the last layer. One of layer i of L learns at
            lr · layer_decay^(L + 1 − i) (BEiT, arXiv 2106.08254, appendix).
        weight_decay: of matrices and kernels; norms, biases and embeddings have none.
        layer_decay: from 0 to 1; 1 is one rate for all layers.
        muon_lr: gives the matrices of the encoder's blocks and a stem's kernels, all but the first,
            which reads the pixels, groups of their own with this rate. None has no such groups.

    Returns:
        Groups with `params`, `lr`, `weight_decay` and `num_matrices`: how many matrices are packed
        into one parameter, 3 for queries, keys and values, else 1; 0 in groups that are not Muon's.
    """
    trainable = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    block_numbers: dict[str, int] = {}
    for name in trainable:
        match = re.search(r"(?:^|\.)blocks\.(\d+)\.", name)
        if match:
            block_numbers[name] = int(match[1])
    depth = max(block_numbers.values(), default=-1) + 1
    kernels = [name for name, parameter in model.named_parameters() if parameter.ndim == 4]

    groups: dict[tuple[int, bool, int], dict[str, Any]] = {}
    for name, parameter in trainable.items():
        is_embedding = name.endswith(_EMBEDDINGS)
        if name in block_numbers:
            layer = block_numbers[name] + 1
        elif is_embedding or re.search(r"(^|\.)(patch_embed|stem|norm_pre)\.", name):
            layer = 0
        else:
            layer = depth + 1

        group_lr = lr
        num_matrices = 0
        is_hidden_matrix = parameter.ndim == 2 and name in block_numbers
        is_hidden_kernel = parameter.ndim == 4 and name != kernels[0]
        if muon_lr is not None and (is_hidden_matrix or is_hidden_kernel):
            group_lr = muon_lr
            num_matrices = 1
            if name.endswith("attn.qkv.weight"):
                num_matrices = 3

        is_decayed = parameter.ndim >= 2 and not is_embedding
        key = (layer if layer_decay < 1 else 0, is_decayed, num_matrices)
        if key not in groups:
            groups[key] = {
                "params": [],
                "lr": layer_decay ** (depth + 1 - layer) * group_lr,
                "weight_decay": weight_decay if is_decayed else 0.0,
                "num_matrices": num_matrices,
            }
        groups[key]["params"].append(parameter)
    return list(groups.values())
