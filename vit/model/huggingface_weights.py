"""Weights of Hugging Face's ViT, DeiT and DINOv2 (with and without registers), under our names.

They are read from folders that its library writes. The library itself is not needed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vit.model.model_file import StateDict
from vit.model.vision_transformer import Architecture
from vit.model.weights import add_class_position, infer_architecture, read_weights
from vit.runtime.arguments import check_choice, shorten
from vit.runtime.documents import read_json

CONFIG_FILE = "config.json"
MODEL_TYPES = ("deit", "dinov2", "dinov2_with_registers", "vit")
# File names of transformers, the one without pickle first.
_WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
# Pillow's number → the filter.
_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}

# (pattern of Hugging Face's name, our name), applied to each name in this order.
_NAMES = (
    (r"^(vit|deit|dinov2|dinov2_with_registers)\.", ""),
    (r"^embeddings\.cls_token", "cls_token"),
    (r"^embeddings\.distillation_token", "dist_token"),
    (r"^embeddings\.register_tokens", "reg_token"),
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(\d)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.weights_out\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
# Parts that only pretraining needs, or that no classifier reads.
_UNUSED = re.compile(r"mask_token$|^pooler\.")


def is_huggingface(folder: Path) -> bool:
    """Tell a folder of Hugging Face's library from one of timm, whose config.json has no model_type."""
    config = folder / CONFIG_FILE
    if not config.is_file():
        return False
    values = read_json(config)
    return isinstance(values, dict) and "model_type" in values


def read_huggingface(folder: Path) -> tuple[StateDict, Architecture, Mapping[str, Any]]:
    """Read the weights of a folder, their architecture, and the values of its `Preprocess`.

    DINOv2's own classifier reads more than our head does, so it is left out. A DeiT without a head
    for its distillation token gets a register token instead, which computes the same.

    Raises:
        ValueError: The model is of another kind, or the weights can't be read.
        OSError: A file is missing.
    """
    config = _check_config(folder)
    path = next((folder / name for name in _WEIGHTS_FILES if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{folder} holds none of {', '.join(_WEIGHTS_FILES)}; save the model in one file"
        )
    weights = _rename(read_weights(path).weights)

    width = config["hidden_size"]
    head = weights.get("head.weight")
    if head is not None and (head.ndim != 2 or head.shape[1] != width):
        del weights["head.weight"], weights["head.bias"]
    if "head_dist.weight" not in weights and "dist_token" in weights:
        weights["reg_token"] = weights.pop("dist_token")
    elif "reg_token" in weights:
        add_class_position(weights)

    # The learned positions are for this size.
    size = config["image_size"]
    img_size = (size, size) if isinstance(size, int) else tuple(size)
    architecture = infer_architecture(weights, origin=str(folder), img_size=img_size)
    architecture |= {"num_heads": config["num_attention_heads"]}
    return weights, architecture, _read_preprocess(folder, img_size)


def _check_config(folder: Path) -> Mapping[str, Any]:
    """Read config.json. Raises ValueError for a model that ours can't compute."""
    path = folder / CONFIG_FILE
    config: Mapping[str, Any] = read_json(path)
    check_choice(str(config["model_type"]), MODEL_TYPES, name=f"model_type in {path}")
    for name in ("hidden_size", "num_attention_heads", "image_size"):
        value = config.get(name)
        sides = value if isinstance(value, list) and name == "image_size" else [value]
        if not all(isinstance(side, int) and side > 0 for side in sides):
            raise ValueError(f"{path}: {name} is {shorten(repr(value))}, not a positive number")
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu":
        raise ValueError(f"{path}: hidden_act {activation!r}; only gelu is supported")
    return config


def _rename(theirs: StateDict) -> StateDict:
    """Rename the weights, and join queries, keys and values in one matrix."""
    weights: StateDict = {}
    for name, tensor in theirs.items():
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        if not _UNUSED.search(name):
            weights[name] = tensor

    for name in [name for name in weights if ".attn.query." in name]:
        parts = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in weights for part in parts):
            joined = torch.cat([weights.pop(part) for part in parts])
            weights[name.replace(".query.", ".qkv.")] = joined
    return weights


def _read_preprocess(folder: Path, img_size: tuple[int, ...]) -> Mapping[str, Any]:
    """Read a `Preprocess` from preprocessor_config.json, else return ViTImageProcessor's defaults."""
    path = folder / "preprocessor_config.json"
    processor = read_json(path) if path.is_file() else {}
    if not isinstance(processor, dict):
        raise ValueError(f"{path} is not a JSON object")
    values = {
        "image_size": list(img_size),
        "mean": processor.get("image_mean", [0.5, 0.5, 0.5]),
        "std": processor.get("image_std", [0.5, 0.5, 0.5]),
        "interpolation": _INTERPOLATIONS.get(processor.get("resample", 2), "bicubic"),
    }
    # DINOv2 has positions for 518 px, and takes crops of 224 px out of 256.
    crop = processor.get("crop_size")
    edge = processor.get("size", {}).get("shortest_edge")
    if isinstance(crop, dict) and processor.get("do_center_crop", False):
        values["image_size"] = [crop["height"], crop["width"]]
        if edge:
            values["crop_pct"] = min(crop["height"] / edge, 1.0)
    return values
