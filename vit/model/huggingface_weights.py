"""Folders of Hugging Face's ViT under our names, and back. Its library is not needed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vit.model.attention import NORM_EPS
from vit.model.model_file import MODEL_FILE, StateDict
from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.model.weights import infer_architecture, read_weights
from vit.runtime.arguments import as_pair, check_choice

# our model's arguments with which it computes the same as theirs
_OURS = {
    "stem": "patch",
    "mlp": "gelu",
    "qk_norm": False,
    "init_values": None,
    "global_pool": "token",
    "fc_norm": False,
    "reg_tokens": 0,
}
# (Hugging Face's name, ours), applied to each name in this order, and back in the opposite one: to
# any part that begins with a dot, else to the beginning.
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
            weights[_replace(name, _NAMES)] = tensor
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


def convert_to_huggingface(
    model: VisionTransformer, weights: StateDict
) -> tuple[StateDict, dict[str, Any]] | None:
    """Convert a model and its weights, with `pos_embed`, to the weights and the config.json of
    Hugging Face's ViT. Returns None for other architectures."""
    values = model.architecture
    if any(values[name] != value for name, value in _OURS.items()):
        return None
    width = model.embed_dim
    sizes = {"image_size": values["img_size"], "patch_size": values["patch_size"]}
    config = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": width,
        "num_hidden_layers": values["depth"],
        "num_attention_heads": values["num_heads"],
        "intermediate_size": round(width * values["mlp_ratio"]),
        "num_channels": values["in_chans"],
        "qkv_bias": values["qkv_bias"],
        "layer_norm_eps": NORM_EPS,
        **{name: size[0] if len(set(size)) == 1 else size for name, size in sizes.items()},
    }
    theirs: StateDict = {}
    for name, tensor in weights.items():
        if name == "pos_embed" and not model.num_embedded_prefix_tokens:
            tensor = torch.cat([torch.zeros(1, 1, width), tensor], dim=1)
        parts = ["query", "key", "value"]
        if ".qkv." not in name:
            parts = [""]
        for part, value in zip(parts, tensor.chunk(len(parts)), strict=True):
            to_theirs = [(ours, their) for their, ours in reversed(_NAMES)]
            theirs[_replace(name.replace(".qkv.", f".{part}."), to_theirs)] = value
    return theirs, config


def _replace(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Replace each first part of a pair by the second."""
    for old, new in pairs:
        if old.startswith(".") or name.startswith(old):
            name = name.replace(old, new, 1)
    return name
