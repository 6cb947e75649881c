"""Folders of Hugging Face's ViT under our names. Its library is not needed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vit.model.model_file import MODEL_FILE, StateDict
from vit.model.vision_transformer import Architecture
from vit.model.weights import infer_architecture, read_weights
from vit.runtime.arguments import as_pair, check_choice

# (Hugging Face's name, ours), applied to each name in this order: to any part that begins with a
# dot, else to the beginning.
_NAMES = (
    ("vit.embeddings.cls_token", "cls_token"),
    ("vit.embeddings.position_embeddings", "pos_embed"),
    ("vit.embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("vit.encoder.layer.", "blocks."),
    (".attention.attention.", ".attn."),
    (".attention.output.dense.", ".attn.proj."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
    ("vit.layernorm.", "norm."),
    ("classifier.", "head."),
)


def read_huggingface(folder: Path, config: Mapping[str, Any]) -> tuple[StateDict, Architecture]:
    """Read the weights of a ViT's folder, and their architecture."""
    origin = folder / "config.json"
    check_choice(str(config.get("hidden_act", "gelu")), ["gelu"], name=f"hidden_act in {origin}")
    # The learned positions are for this size.
    img_size = as_pair(config.get("image_size", 224), name=f"{origin}: image_size")
    weights: StateDict = {}
    for name, tensor in read_weights(folder / MODEL_FILE).weights.items():
        # A model without a classifier has no prefix.
        if not name.startswith(("vit.", "classifier.")):
            name = f"vit.{name}"
        # The pooler and the mask are for pretraining.
        if not name.startswith(("vit.pooler.", "vit.embeddings.mask_token")):
            weights[_rename(name)] = tensor
    for name in [name for name in weights if ".attn.query." in name]:
        parts = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in weights for part in parts):
            joined = torch.cat([weights.pop(part) for part in parts])
            weights[name.replace(".query.", ".qkv.")] = joined
    architecture = infer_architecture(
        weights,
        origin=str(folder),
        num_heads=config.get("num_attention_heads"),
        img_size=img_size,
    )
    return weights, architecture


def _rename(name: str) -> str:
    """Return our name of a tensor of Hugging Face's."""
    for theirs, ours in _NAMES:
        if theirs.startswith(".") or name.startswith(theirs):
            name = name.replace(theirs, ours, 1)
    return name
