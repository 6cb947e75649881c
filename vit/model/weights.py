"""Weights of any program, read without pickle, and the vision transformer that they belong to."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from vit.model.model_file import ModelFile, StateDict, check_finite, read_model_file
from vit.model.patch_embed import build_sincos_positions
from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.runtime.arguments import first_line
from vit.runtime.files import read_tensors

_MAX_PATCHES = 2**16


def read_weights(path: Path) -> ModelFile:
    """Read a safetensors or torch file, without pickle. Raises ValueError for a file of another
    kind, and for weights that are not finite."""
    if path.suffix == ".safetensors":
        return read_model_file(path)
    state = read_tensors(path)
    # Trainers store the weights under a key.
    for key in ("state_dict", "model", "teacher"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    values = state.items() if isinstance(state, dict) else ()
    weights = {str(name): value for name, value in values if isinstance(value, Tensor)}
    if not weights:
        raise ValueError(f"{path} has no tensors by name; if it is a checkpoint, name its run")
    check_finite(weights, origin=str(path))
    return ModelFile(weights)


def remove_prefix(weights: StateDict, name: str) -> StateDict:
    """Remove the prefix of DataParallel ("module."), torch.compile, Lightning and others, and the
    weights outside the network, one of whose tensors has this name."""
    prefixes = [each.removesuffix(name) for each in weights if each.endswith(name)]
    start = min(prefixes, key=len, default="")
    inside = [each for each in weights if each.startswith(start)]
    return {each.removeprefix(start): weights[each] for each in inside}


def build_to_fit(
    architecture: Architecture, weights: StateDict, *, origin: str
) -> VisionTransformer:
    """Build a model in evaluation mode around its weights, after a check on "meta" that they fit.
    So a damaged or malicious file can't allocate more memory than its own weights take. No random
    weights are drawn."""
    held = (_count_blocks(weights), len(weights.get("blocks.0.norm1.weight", ())))
    try:
        # Loops and positions are as long as these, on "meta" too.
        described = (architecture["depth"], architecture["embed_dim"])
        if described != held:
            raise ValueError(
                f"does not fit this model: its depth and width are {described}, and those of its"
                f" weights {held}"
            )
        sides = zip(architecture["img_size"], architecture["patch_size"], strict=True)
        num_patches = math.prod(side // patch for side, patch in sides)
        if num_patches > _MAX_PATCHES:
            raise ValueError(f"has more than {_MAX_PATCHES:,} patches an image: {num_patches:,}")
        with torch.device("meta"):
            model = VisionTransformer(**architecture)
    except (ValueError, RuntimeError, LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{origin} {first_line(error)}") from error
    check_fit(model, weights, origin=origin)
    # to_empty would import torch's compiler
    kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    given = {name: weights[name].to(kind) for name, kind in kinds.items()}
    model.load_state_dict(given, assign=True)
    # fixed positions are no weights
    if not isinstance(model.pos_embed, nn.Parameter):
        model.pos_embed = build_sincos_positions(model.grid_size, model.embed_dim)
    return model.eval()


def check_fit(model: nn.Module, weights: StateDict, *, origin: str) -> None:
    """Raise ValueError with the first differences if the weights belong to another model."""
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    actual = {name: list(tensor.shape) for name, tensor in weights.items()}
    names = [name for name in expected | actual if expected.get(name) != actual.get(name)]
    if names:
        differences = "; ".join(
            f"{name} is {actual.get(name, 'absent')} there "
            f"and {expected.get(name, 'absent')} in the model"
            for name in names[:3]
        )
        raise ValueError(f"{origin} does not fit this model in {len(names)} tensors: {differences}")


def infer_architecture(weights: StateDict, *, origin: str) -> Architecture:
    """Infer arguments of a VisionTransformer from timm's names and the shapes of its weights. They
    don't tell the size of images, the number of heads, the pooling, and whether prefix tokens have
    positions."""
    try:
        embed_dim, in_chans, *patch_size = weights["patch_embed.proj.weight"].shape
        hidden_dim = weights["blocks.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError):
        raise ValueError(
            f"{origin} is not a plain vision transformer with timm's names, but holds "
            f"{', '.join(list(weights)[:3])} …; give its module: vit.load_bundle(path, model=…)"
        ) from None
    return {
        "patch_size": tuple(patch_size),
        "in_chans": in_chans,
        "num_classes": len(weights.get("head.weight", ())),
        "embed_dim": embed_dim,
        "depth": _count_blocks(weights),
        "mlp_ratio": hidden_dim / embed_dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "qk_norm": "blocks.0.attn.q_norm.weight" in weights,
        "class_token": "cls_token" in weights,
        "fc_norm": "fc_norm.weight" in weights,
        "reg_tokens": weights.get("reg_token", torch.empty(1, 0)).shape[1],
    }


def _count_blocks(weights: StateDict) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
