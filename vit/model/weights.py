"""Weights of any program, read without pickle, and the vision transformer that they belong to."""

import math
import re
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from vit.model.model_file import ModelFile, StateDict, check_finite, read_model_file
from vit.model.patch_embed import build_sincos_positions
from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.runtime.arguments import first_line
from vit.runtime.files import read_tensors

_MAX_PATCHES = 2**16
# Channels → heads of the published ViTs (Dosovitskiy et al. 2021; DeiT's 192 and 384, DeiT III's 512,
# Touvron et al. 2021, 2022). Other widths have no usual number.
_PUBLISHED_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}
# A tensor that every plain ViT of timm has, by which prefixes of trainers are recognised.
_PATCHES = "patch_embed.proj.weight"
# Keys under which trainers store weights: those of timm and DeiT that are averaged over the steps,
# then the raw ones, and the teacher of DINO, which is an average, too.
_AVERAGES = ("state_dict_ema", "model_ema")
_RAW = ("state_dict", "model")
_KEYS = (*_AVERAGES, *_RAW, "teacher")
# The part of a name by which a module of Lightning tells the average from the raw weights.
_AVERAGED = re.compile(r"(^|[._])(ema|swa|average|averaged)[._]")


def read_weights(path: Path) -> ModelFile:
    """Read a safetensors or torch file, without pickle. Raises ValueError for a file of another
    kind, and for weights that are not finite."""
    if path.suffix == ".safetensors":
        return read_model_file(path)
    state = read_tensors(path)
    for key in _KEYS:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            if key in _AVERAGES and not state.keys().isdisjoint(_RAW):
                _say_averaged(str(path), key)
            state = state[key]
    values = state.items() if isinstance(state, dict) else ()
    weights = {str(name): value for name, value in values if isinstance(value, Tensor)}
    if not weights:
        raise ValueError(f"{path} has no tensors by name; if it is a checkpoint, name its run")
    check_finite(weights, origin=str(path))
    return ModelFile(weights)


def remove_prefix(weights: StateDict, name: str = _PATCHES, *, origin: str) -> StateDict:
    """Remove the prefix of DataParallel ("module."), torch.compile, Lightning and others, and the
    weights outside the network, one of whose tensors has this name. Of a network that is there
    twice, the averaged weights are taken."""
    prefixes = [each.removesuffix(name) for each in weights if each.endswith(name)]
    averages = list(filter(_AVERAGED.search, prefixes))
    start = min(averages or prefixes, key=len, default="")
    if averages and averages != prefixes:
        _say_averaged(origin, start)
    inside = [each for each in weights if each.startswith(start)]
    return {each.removeprefix(start): weights[each] for each in inside}


def remove_decoder(weights: StateDict, *, origin: str) -> StateDict:
    """Remove what a file of MAE (He et al. 2022, arXiv 2111.06377) holds for its pretraining alone:
    the decoder and the mask token."""
    removed = [name for name in weights if re.match(r"decoder_|mask_token$", name)]
    if removed:
        warnings.warn(
            f"{origin}: {len(removed)} tensors of its pretraining (decoder, mask) are left out",
            stacklevel=2,
        )
    return {name: tensor for name, tensor in weights.items() if name not in removed}


def _say_averaged(origin: str, name: str) -> None:
    warnings.warn(
        f"{origin}: the weights averaged over training ({name}) are taken, not the raw ones",
        stacklevel=3,
    )


def build_to_fit(
    architecture: Architecture, weights: StateDict, *, origin: str
) -> VisionTransformer:
    """Build a model in evaluation mode around its weights, after a check on "meta" that they fit.
    So a damaged or malicious file can't allocate more memory than its own weights take. No random
    weights are drawn."""
    held = (count_blocks(weights), len(weights.get("blocks.0.norm1.weight", ())))
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


def infer_architecture(
    weights: StateDict,
    *,
    origin: str,
    num_heads: int | None = None,
    img_size: tuple[int, int] | None = None,
) -> Architecture:
    """Infer the arguments of a VisionTransformer from timm's names and the shapes of its weights.

    Args:
        num_heads: None: that of the published ViTs of this width, with a warning.
        img_size: Height and width of the images. None: the patch grid is square.
    """
    try:
        embed_dim, in_chans, *patch_size = weights[_PATCHES].shape
        num_positions = weights["pos_embed"].shape[1]
        hidden_dim = weights["blocks.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError):
        raise ValueError(
            f"{origin} is not a plain vision transformer with timm's names, but holds "
            f"{', '.join(list(weights)[:3])} …; give its module: vit.load_bundle(path, model=…)"
        ) from None

    class_token = "cls_token" in weights
    reg_tokens = weights.get("reg_token", torch.empty(1, 0)).shape[1]
    fc_norm = "fc_norm.weight" in weights
    num_prefix_tokens = class_token + reg_tokens
    # If the number of positions is a square, the prefix tokens have none.
    no_embed_class = num_prefix_tokens > 0 and math.isqrt(num_positions) ** 2 == num_positions
    if img_size is None:
        side = math.isqrt(num_positions - (0 if no_embed_class else num_prefix_tokens))
        # Other grids than square ones don't fit.
        img_size = (side * patch_size[0], side * patch_size[1])
    return {
        "img_size": img_size,
        "patch_size": tuple(patch_size),
        "in_chans": in_chans,
        "num_classes": len(weights.get("head.weight", ())),
        "embed_dim": embed_dim,
        "depth": count_blocks(weights),
        "num_heads": num_heads or _find_num_heads(embed_dim, origin),
        "mlp_ratio": hidden_dim / embed_dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "qk_norm": "blocks.0.attn.q_norm.weight" in weights,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in weights else None,
        "global_pool": "token" if class_token and not fc_norm else "avg",
        "class_token": class_token,
        "fc_norm": fc_norm,
        "no_embed_class": no_embed_class,
        "reg_tokens": reg_tokens,
    }


def count_blocks(weights: StateDict) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("blocks.")})


def _find_num_heads(embed_dim: int, origin: str) -> int:
    unknown = f"{origin} doesn't say how many attention heads share its {embed_dim} channels"
    cure = "give its module: vit.load_bundle(path, model=vit.VisionTransformer(…))"
    published = _PUBLISHED_HEADS.get(embed_dim)
    if published is None:
        raise ValueError(f"{unknown}; {cure}")
    warnings.warn(f"{unknown}; {published} are taken. For others, {cure}", stacklevel=2)
    return published
