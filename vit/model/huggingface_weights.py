"""Weights of Hugging Face's ViT and DINOv2 (with and without registers) under our names, and back.

They are read from folders that its library writes. The library itself is not needed.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vit.model.attention import NORM_EPS
from vit.model.model_file import StateDict
from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.model.weights import infer_architecture, read_weights
from vit.runtime.arguments import as_pair, check_choice, shorten
from vit.runtime.documents import read_json

CONFIG_FILE = "config.json"
MODEL_TYPES = ("dinov2", "dinov2_with_registers", "vit")
# File names of transformers, the one without pickle first.
_WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")
# Pillow's number → the filter.
_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}

# (Hugging Face's name, ours), applied to each name in this order, and back in the opposite one: to
# any part that begins with a dot, else to the beginning.
_NAMES = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.register_tokens", "reg_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("encoder.layer.", "blocks."),
    (".layer_scale1.lambda1", ".ls1.gamma"),
    (".layer_scale2.lambda1", ".ls2.gamma"),
    (".attention.attention.", ".attn."),
    (".attention.output.dense.", ".attn.proj."),
    ("layernorm.", "norm."),
    ("classifier.", "head."),
)
# DINOv2 has our names for these, or with SwiGLU the first two.
_VIT_NAMES = (
    (".mlp.weights_in.", ".mlp.fc1."),
    (".mlp.weights_out.", ".mlp.fc2."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
)
_PREFIX = re.compile(r"^(vit|dinov2|dinov2_with_registers)\.")
# Parts that only pretraining needs, or that no classifier reads.
_UNUSED = re.compile(r"mask_token$|^pooler\.")


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read a folder's config.json; empty if there is none, or no JSON object in it."""
    file = folder / CONFIG_FILE
    values = None
    if file.is_file():
        values = read_json(file)
    if not isinstance(values, dict):
        return {}
    return values


def is_huggingface(folder: Path) -> bool:
    """Tell a folder of Hugging Face's library from one of timm, whose config has no model_type."""
    return "model_type" in read_config(folder)


def read_huggingface(folder: Path) -> tuple[StateDict, Architecture, Mapping[str, Any]]:
    """Read the weights of a folder, their architecture, and the values of its `Preprocess`.

    DINOv2's own classifier reads more than our head does, so it is left out.

    Raises:
        ValueError: The model is of another kind, or the weights can't be read.
        OSError: A file is missing.
    """
    config, origin = read_config(folder), folder / CONFIG_FILE
    check_choice(str(config["model_type"]), MODEL_TYPES, name=f"model_type in {origin}")
    check_choice(str(config.get("hidden_act", "gelu")), ["gelu"], name=f"hidden_act in {origin}")
    # The learned positions are for this size.
    img_size = as_pair(config.get("image_size", ()), name=f"{origin}: image_size")
    num_heads = config.get("num_attention_heads")
    if not isinstance(num_heads, int) or num_heads < 1:
        raise ValueError(
            f"{origin}: num_attention_heads is {shorten(repr(num_heads))}, not a positive number"
        )
    path = next((folder / name for name in _WEIGHTS_FILES if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{folder} holds none of {', '.join(_WEIGHTS_FILES)}; save the model in one file"
        )
    weights = _rename(read_weights(path).weights)

    width = len(weights.get("norm.weight", ()))
    head = weights.pop("head.weight", None)
    if head is not None and head.ndim == 2 and not head[:, width:].any():
        # ViT's reads the class token, and so does DINOv2's in an export of ours.
        weights["head.weight"] = head[:, :width].contiguous()
    else:
        weights.pop("head.bias", None)
    if "reg_token" in weights:
        # DINOv2 has positions for the class token and the patches, ours for all prefix tokens or
        # none.
        positions = weights["pos_embed"]
        weights["cls_token"] = weights["cls_token"] + positions[:, :1]
        weights["pos_embed"] = positions[:, 1:]
    architecture = infer_architecture(
        weights, origin=str(folder), num_heads=num_heads, img_size=img_size
    )
    return weights, architecture, _read_preprocess(folder, img_size)


def convert_to_huggingface(
    model: VisionTransformer, weights: StateDict
) -> tuple[StateDict, dict[str, Any]] | None:
    """Convert a model and its weights, with `pos_embed`, to Hugging Face's ViT or DINOv2.

    Returns:
        The weights under their names, and the architecture as values of config.json; None for
        other architectures.
    """
    values = model.architecture
    num_registers, embedded = values["reg_tokens"], model.num_embedded_prefix_tokens
    is_plain = values["stem"] == "patch" and values["mlp"] == "gelu" and values["class_token"]
    if not is_plain or values["qk_norm"] or values["fc_norm"]:
        return None
    sizes = {"image_size": values["img_size"], "patch_size": values["patch_size"]}
    width, hidden_dim = model.embed_dim, round(model.embed_dim * values["mlp_ratio"])
    config = {
        "hidden_size": width,
        "num_hidden_layers": values["depth"],
        "num_attention_heads": values["num_heads"],
        "num_channels": values["in_chans"],
        "qkv_bias": values["qkv_bias"],
        "layer_norm_eps": NORM_EPS,
        **{name: size[0] if len(set(size)) == 1 else size for name, size in sizes.items()},
    }
    names: tuple[tuple[str, str], ...] = _NAMES
    weights, head = dict(weights), weights.get("head.weight")
    if not embedded:
        weights["pos_embed"] = torch.cat([torch.zeros(1, 1, width), weights["pos_embed"]], dim=1)
    if values["init_values"] is None:
        kind, name, names = "vit", "ViT", _NAMES + _VIT_NAMES
        config["intermediate_size"] = hidden_dim
        fits = values["global_pool"] == "token" and not num_registers
    else:
        kind, name = "dinov2", "Dinov2"
        if num_registers:
            kind, name = "dinov2_with_registers", "Dinov2WithRegisters"
            config["num_register_tokens"] = num_registers
        config["mlp_ratio"] = hidden_dim // width
        weights["embeddings.mask_token"] = torch.zeros(1, width)
        if head is not None:
            # Its classifier reads the class token and the mean of the patches.
            parts = [head, torch.zeros_like(head)]
            weights["head.weight"] = torch.cat(
                parts if values["global_pool"] == "token" else parts[::-1], dim=1
            )
        # Its images are square, and its registers have no positions.
        fits = isinstance(config["image_size"], int) and hidden_dim % width == 0
        fits = fits and not (num_registers and embedded)
    if not fits:
        return None
    config["model_type"] = kind
    config["architectures"] = [name + ("Model" if head is None else "ForImageClassification")]

    theirs: StateDict = {}
    for name, tensor in weights.items():
        parts_of_name = ("query", "key", "value") if ".qkv." in name else ("",)
        for part, value in zip(parts_of_name, tensor.chunk(len(parts_of_name)), strict=True):
            to_theirs = ((ours, their) for their, ours in reversed(names))
            renamed = _replace(name.replace(".qkv.", f".{part}."), to_theirs)
            theirs[renamed if name.startswith("head.") else f"{kind}.{renamed}"] = value
    return theirs, config


def _replace(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Replace each first part of a pair by the second."""
    for old, new in pairs:
        if old.startswith(".") or name.startswith(old):
            name = name.replace(old, new, 1)
    return name


def _rename(theirs: StateDict) -> StateDict:
    """Rename the weights, and join queries, keys and values in one matrix."""
    weights: StateDict = {}
    for name, tensor in theirs.items():
        name = _replace(_PREFIX.sub("", name), _NAMES + _VIT_NAMES)
        if not _UNUSED.search(name):
            weights[name] = tensor

    for name in [name for name in weights if ".attn.query." in name]:
        parts = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in weights for part in parts):
            joined = torch.cat([weights.pop(part) for part in parts])
            weights[name.replace(".query.", ".qkv.")] = joined
    return weights


def _read_preprocess(folder: Path, img_size: tuple[int, ...]) -> Mapping[str, Any]:
    """Read a `Preprocess` from preprocessor_config.json. Without that file return the defaults of
    ViTImageProcessor."""
    path = folder / "preprocessor_config.json"
    processor = read_json(path) if path.is_file() else {}
    if not isinstance(processor, dict):
        raise ValueError(f"{path} is not a JSON object")
    edge, crop = (_read_sides(processor.get(name), path=path) for name in ("size", "crop_size"))
    values = {
        "image_size": list(img_size),
        "mean": processor.get("image_mean", [0.5, 0.5, 0.5]),
        "std": processor.get("image_std", [0.5, 0.5, 0.5]),
        "interpolation": _INTERPOLATIONS.get(processor.get("resample", 2), "bicubic"),
    }
    # DINOv2 has positions for 518 px, and takes crops of 224 px out of 256.
    if crop and processor.get("do_center_crop", False):
        values["image_size"] = list(crop)
        if edge:
            values["crop_pct"] = min(crop[0] / edge[0], 1.0)
    return values


def _read_sides(size: Any, *, path: Path) -> tuple[int, int] | None:
    """Return (height, width) of a size in any published form: a number, the shortest edge, or both
    sides. None if it has none of them.

    Raises:
        ValueError: A side is not a positive number.
    """
    if isinstance(size, dict):
        sides = [size.get(side, size.get("shortest_edge")) for side in ("height", "width")]
        size = None if sides == [None, None] else sides
    return None if size is None else as_pair(size, name=f"{path}: size")
