"""Which parameters weight decay acts on, how fast each layer learns, and which matrices Muon updates."""

import re
from typing import Any

from torch import nn

_EMBEDDINGS = ("cls_token", "dist_token", "reg_token", "pos_embed")


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float, layer_decay: float = 1.0, muon_lr: float | None = None
) -> list[dict[str, Any]]:
    """Every trainable parameter of `model` once, in groups that share their settings.

    A parameter of layer i of L learns at lr · layer_decay^(L + 1 − i) (BEiT, arXiv 2106.08254, appendix).
    With `muon_lr` the matrices of the encoder's blocks and a stem's kernels, all but the first, which reads the pixels,
    form groups of their own, whose `num_matrices` says how many are packed into one parameter: 3 for queries, keys and
    values, else 1; it is 0 in all other groups. Weight decay acts on matrices and kernels, not on norms, biases,
    embeddings.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay {layer_decay} is not in (0, 1]; 1: one learning rate for all layers")
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    blocks = {name: int(found[1]) for name in named if (found := re.search(r"(?:^|\.)blocks\.(\d+)\.", name))}
    depth = max(blocks.values(), default=-1) + 1
    first_kernel = next((name for name, parameter in model.named_parameters() if parameter.ndim == 4), None)
    groups: dict[tuple[int, bool, int], dict[str, Any]] = {}
    for name, parameter in named.items():
        is_embedding = name.endswith(_EMBEDDINGS)
        is_first = is_embedding or re.search(r"(^|\.)(patch_embed|stem|norm_pre)\.", name)
        layer = blocks[name] + 1 if name in blocks else 0 if is_first else depth + 1
        decayed = parameter.ndim >= 2 and not is_embedding
        group_lr, num_matrices = lr, 0
        is_hidden = parameter.ndim == 4 or (parameter.ndim == 2 and name in blocks)
        if muon_lr is not None and is_hidden and name != first_kernel:
            group_lr, num_matrices = muon_lr, 3 if name.endswith("attn.qkv.weight") else 1
        settings = {"lr": layer_decay ** (depth + 1 - layer) * group_lr, "weight_decay": weight_decay * decayed}
        key = (layer if layer_decay < 1 else 0, decayed, num_matrices)
        group = groups.setdefault(key, {"params": [], **settings, "num_matrices": num_matrices})
        group["params"].append(parameter)
    return list(groups.values())
