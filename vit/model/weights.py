"""Weights of other programs, read without pickle, and recognised or refused with a reason."""

import math
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from vit.model.checkpoint import CHECKPOINT_NAME
from vit.model.model_file import ModelFile, StateDict, check_finite, read_model_file
from vit.model.patch_embed import build_sincos_positions
from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.runtime.arguments import first_line
from vit.runtime.files import read_tensors

_MAX_PATCHES = 2**16
# Channels → heads of the published ViTs (Dosovitskiy et al. 2021; 512 is DeiT III's, Touvron et al.
# 2022).
# Other widths have no usual number: timm alone has 1,536 channels with 12, 16 and 24 heads.
_PUBLISHED_HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16}
# Part of a tensor's name → what to do with the weights of another program, which have it.
_OTHERS = {
    "embeddings.cls_token": "for Hugging Face's weights, give the folder with its config.json",
    "conv_proj.weight": "for torchvision's, take timm:NAME, or load them into torchvision's module",
    "mask_token": "for DINOv2's, take timm:NAME, or the folder of Hugging Face",
    "dist_token": "DeiT's distilled models have two heads; take one without distillation",
}
# A tensor that every plain ViT of timm has, by which prefixes of trainers are recognised.
_PATCHES = "patch_embed.proj.weight"


def read_weights(path: Path) -> ModelFile:
    """Read a safetensors file or, with `weights_only=True`, a torch file.

    Raises:
        ValueError: The file is of another kind, or its weights are not finite.
        OSError: The file is missing.
    """
    if path.suffix == ".safetensors" or CHECKPOINT_NAME.fullmatch(path.name):
        return read_model_file(path)
    try:
        state = read_tensors(path)
        # Trainers store the weights under a key.
        for key in ("state_dict", "model", "teacher"):
            if isinstance(state, dict) and isinstance(state.get(key), dict):
                state = state[key]
        if not isinstance(state, dict) or not any(isinstance(v, Tensor) for v in state.values()):
            raise ValueError("it has no tensors by name")
    except ValueError as error:
        raise ValueError(
            f"{path} holds no weights that can be read ({first_line(error)})"
        ) from error
    weights = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    check_finite(weights, origin=str(path))
    return ModelFile(weights)


def remove_prefix(weights: StateDict, name: str = _PATCHES) -> StateDict:
    """Remove the prefix of DataParallel ("module."), torch.compile, Lightning and others, and the
    weights outside the network, one of whose tensors has this name."""
    prefixes = [each.removesuffix(name) for each in weights if each.endswith(name)]
    start = min(prefixes, key=len, default="")
    return {
        each.removeprefix(start): tensor
        for each, tensor in weights.items()
        if each.startswith(start)
    }


def build_to_fit(
    architecture: Architecture, weights: StateDict, *, origin: str
) -> VisionTransformer:
    """Build a model in evaluation mode around its weights, after a check that they fit it.

    The check runs on "meta", without memory. So a damaged or malicious file can't allocate more
    memory than its own weights take. No random weights are drawn.

    Raises:
        ValueError: The arguments contradict each other, an image has more than 65,536 patches, or
            the weights belong to another model.
    """
    held = {
        "depth": len({name.split(".")[1] for name in weights if name.startswith("blocks.")}),
        "embed_dim": len(weights.get("blocks.0.norm1.weight", ())),
    }
    try:
        # Loops and positions are as long as these, on "meta" too.
        for name, count in held.items():
            if architecture[name] != count:
                raise ValueError(
                    f"does not fit this model: its {name} is {architecture[name]}, and that of its "
                    f"weights {count}"
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
    if not names:
        return
    message = "; ".join(
        f"{name} is {actual.get(name, 'absent')} there "
        f"and {expected.get(name, 'absent')} in the model"
        for name in names[:3]
    )
    # With another width, every tensor differs.
    if len(names) > 3:
        message += f", and {len(names) - 3} more differ"
    raise ValueError(f"{origin} does not fit this model: {message}")


def infer_architecture(
    weights: StateDict,
    *,
    origin: str,
    num_heads: int | None,
    img_size: tuple[int, int] | None = None,
) -> Architecture:
    """Infer the arguments of a VisionTransformer from the names and shapes of its weights.

    Args:
        weights: Weights with timm's names.
        origin: Name of the weights in messages.
        num_heads: Number of heads, which the shapes don't tell. None: that of the published ViTs of
            this width, with a warning.
        img_size: Height and width of the images. None: the patch grid is square.

    Raises:
        ValueError: The weights belong to another kind of network, the grid isn't square, or the
            number of heads is needed.
    """
    hint = next(
        (text for part, text in _OTHERS.items() if any(part in name for name in weights)), None
    )
    try:
        if hint is not None:
            raise KeyError(hint)
        embed_dim, in_chans, *patch_size = weights[_PATCHES].shape
        num_positions = weights["pos_embed"].shape[1]
        hidden_dim = weights["blocks.0.mlp.fc1.weight"].shape[0]
        is_gated = hidden_dim != weights["blocks.0.mlp.fc2.weight"].shape[1]
    except (KeyError, ValueError):
        raise ValueError(
            f"{origin} is not a plain vision transformer with timm's names and learned positions, "
            f"but holds {', '.join(list(weights)[:3])} …; "
            f"{hint or 'give its module: vit.load_bundle(path, model=…)'}"
        ) from None

    class_token = "cls_token" in weights
    reg_tokens = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    fc_norm = "fc_norm.weight" in weights
    num_prefix_tokens = class_token + reg_tokens
    # If the number of positions is a square, the prefix tokens have none.
    no_embed_class = num_prefix_tokens > 0 and math.isqrt(num_positions) ** 2 == num_positions
    if img_size is None:
        num_patches = num_positions if no_embed_class else num_positions - num_prefix_tokens
        side = math.isqrt(num_patches)
        if side**2 != num_patches:
            raise ValueError(
                f"{origin}: {num_positions} positions are not a square grid; "
                "load it as a folder with timm's config.json"
            )
        img_size = (side * patch_size[0], side * patch_size[1])
    return {
        "img_size": img_size,
        "patch_size": tuple(patch_size),
        "in_chans": in_chans,
        "num_classes": len(weights.get("head.weight", ())),
        "embed_dim": embed_dim,
        "depth": len({name.split(".")[1] for name in weights if name.startswith("blocks.")}),
        "num_heads": num_heads or _guess_num_heads(weights, embed_dim, origin=origin),
        "mlp_ratio": hidden_dim / embed_dim,
        "mlp": "swiglu" if is_gated else "gelu",
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "qk_norm": "blocks.0.attn.q_norm.weight" in weights,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in weights else None,
        "global_pool": "token" if class_token and not fc_norm else "avg",
        "class_token": class_token,
        "fc_norm": fc_norm,
        "no_embed_class": no_embed_class,
        "reg_tokens": reg_tokens,
    }


def _guess_num_heads(weights: StateDict, embed_dim: int, *, origin: str) -> int:
    """Return the number of attention heads of a file of weights, which seldom tells it.

    Raises:
        ValueError: No published ViT has this width.
    """
    norm = weights.get("blocks.0.attn.q_norm.weight")
    if norm is not None:
        return embed_dim // len(norm)  # Norms have the width of a head.
    published = _PUBLISHED_HEADS.get(embed_dim)
    if published is None:
        raise ValueError(
            f"{origin} doesn't say how many attention heads share its {embed_dim} channels; give"
            " the number: model.num_heads=N with --init, or vit.load_timm(…, num_heads=N)"
        )
    warnings.warn(
        f"{origin} doesn't say its number of attention heads; published ViTs of {embed_dim}"
        f" channels have {published}, and they are taken",
        stacklevel=2,
    )
    return published
