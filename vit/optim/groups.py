"""Which parameters weight decay acts on, how fast each layer learns, and which matrices Muon updates."""

import re
from typing import Any

from torch import nn

_EMBEDDINGS = ("cls_token", "dist_token", "reg_token", "pos_embed")


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: on matrices and kernels, not on norms, biases, embeddings."""
    return parameter.ndim >= 2 and not name.endswith(_EMBEDDINGS)


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter maps features to features: a linear layer's weight inside the encoder's blocks, or a
    stem's kernel."""
    is_in_block = re.search(r"(^|\.)blocks\.\d+\.", name) is not None
    return parameter.ndim == 4 or (parameter.ndim == 2 and is_in_block)


def layer_of(name: str, *, depth: int) -> int:
    """Place of a parameter: 0 the embedding, 1 … depth the blocks, depth + 1 the norm and the head."""
    block = re.search(r"(?:^|\.)blocks\.(\d+)\.", name)
    if block:
        return int(block.group(1)) + 1
    is_embedding = name.endswith(_EMBEDDINGS) or re.search(r"(^|\.)(patch_embed|stem|norm_pre)\.", name)
    return 0 if is_embedding else depth + 1


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float, layer_decay: float = 1.0, muon_lr: float | None = None
) -> list[dict[str, Any]]:
    """Every trainable parameter of `model` once, in groups that share their settings.

    A parameter of layer i of L learns at lr · layer_decay^(L + 1 − i) (BEiT, arXiv 2106.08254, appendix).
    With `muon_lr` the hidden matrices and kernels, all but the first kernel, which reads the pixels, form groups of
    their own, whose `num_matrices` says how many are packed into one parameter: 3 for queries, keys and values, else
    1; it is 0 in all other groups.
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay {layer_decay} is not in (0, 1]; 1: one learning rate for all layers")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    blocks = [int(found) for name, _ in named for found in re.findall(r"(?:^|\.)blocks\.(\d+)\.", name)]
    depth = max(blocks, default=-1) + 1
    first_kernel = next((name for name, parameter in model.named_parameters() if parameter.ndim == 4), None)
    groups: dict[tuple[int, bool, int], dict[str, Any]] = {}
    for name, parameter in named:
        layer, decayed = layer_of(name, depth=depth), is_decayed(name, parameter)
        muon = muon_lr is not None and name != first_kernel and is_hidden_matrix(name, parameter)
        num_matrices = (3 if name.endswith("attn.qkv.weight") else 1) if muon else 0
        scale = layer_decay ** (depth + 1 - layer)
        group = groups.setdefault(
            (layer if layer_decay < 1 else 0, decayed, num_matrices),
            {
                "params": [],
                "lr": scale * (muon_lr if muon and muon_lr is not None else lr),
                "weight_decay": weight_decay if decayed else 0.0,
                "num_matrices": num_matrices,
            },
        )
        group["params"].append(parameter)
    return list(groups.values())
