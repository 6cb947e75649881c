"""Weights of other programs: read without pickle, recognised, and loaded or refused with a reason."""

import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vit.model.model_file import ModelFile, State, check_finite, read_model_file
from vit.model.presets import PRESETS
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import as_pair, first_line
from vit.runtime.files import read_tensors


def read_weights(path: Path) -> ModelFile:
    """A safetensors file or, with `weights_only=True`, a torch file, without the wrappings that trainers put around
    the weights. Raises ValueError for a file that is neither and for weights that are not finite."""
    if path.suffix == ".safetensors":
        return read_model_file(path)
    try:
        content = read_tensors(path)
        for key in ("state_dict", "model"):
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                content = content[key]
        items = content.items() if isinstance(content, dict) else ()
        weights = {str(name).removeprefix("module."): value for name, value in items if isinstance(value, Tensor)}
        if not weights:
            raise ValueError("it has no tensors by name")
    except ValueError as error:
        raise ValueError(f"{path} holds no weights that can be read ({first_line(error)})") from error
    check_finite(weights, origin=str(path))
    return ModelFile(weights)


def load_weights(model: nn.Module, state: State, *, origin: str) -> None:
    """Load every weight or none. Raises ValueError where they don't fit."""
    check_fit(model, state, origin=origin)
    model.load_state_dict(state, strict=True)


def check_fit(model: nn.Module, state: State, *, origin: str) -> None:
    """Raise ValueError, with the first differences and, of ours, what would fit, where the weights are of another
    model."""
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in state.items()}
    differences = [name for name in expected | found if expected.get(name) != found.get(name)]
    if not differences:
        return
    shapes = [(name, found.get(name, "absent"), expected.get(name, "absent")) for name in differences[:3]]
    lines = "; ".join(f"{name} is {theirs} there and {ours} in the model" for name, theirs, ours in shapes)
    more = f", and {len(differences) - 3} more differ" if len(differences) > 3 else ""
    advice = f". {_advise(model, state)}" if isinstance(model, VisionTransformer) else ""
    raise ValueError(f"{origin} does not fit this model: {lines}{more}{advice}")


def infer_architecture(state: State, *, origin: str, img_size: tuple[int, int] | None = None) -> dict[str, Any]:
    """The arguments of the VisionTransformer whose weights these are. Shapes don't tell the number of heads (64
    channels each are assumed, as in every preset), nor, without `img_size`, a grid that isn't square."""
    try:
        embed_dim, in_chans, *patch_size = state["patch_embed.proj.weight"].shape
        hidden, halved = state["blocks.0.mlp.fc1.weight"].shape[0], state["blocks.0.mlp.fc2.weight"].shape[1]
    except (KeyError, ValueError):
        held = f"it holds {', '.join(list(state)[:3])} …"
        raise ValueError(f"{origin} is no vision transformer of timm's or torchvision's layout; {held}") from None
    class_token, distilled, fc_norm = "cls_token" in state, "dist_token" in state, "fc_norm.weight" in state
    reg_tokens = state["reg_token"].shape[1] if "reg_token" in state else 0
    positions = state["pos_embed"].shape[1] if "pos_embed" in state else 0
    prefix = class_token + distilled + reg_tokens
    no_embed_class = prefix > 0 and math.isqrt(positions) ** 2 == positions
    if img_size is None:
        patches = positions - (0 if no_embed_class or not positions else prefix)
        side = math.isqrt(patches)
        if side**2 != patches:
            cure = "load it as a folder with timm's config.json"
            raise ValueError(f"{origin}: {positions} positions are no square grid; {cure}")
        img_size = (side * patch_size[0], side * patch_size[1]) if positions else (224, 224)
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    num_classes = state["head.weight"].shape[0] if "head.weight" in state else 0
    found: dict[str, Any] = {"img_size": img_size, "patch_size": tuple(patch_size), "in_chans": in_chans}
    found |= {"num_classes": num_classes, "embed_dim": embed_dim, "depth": depth, "num_heads": max(embed_dim // 64, 1)}
    found |= {"mlp_ratio": hidden / embed_dim, "mlp": "gelu" if hidden == halved else "swiglu"}
    found |= {"qkv_bias": "blocks.0.attn.qkv.bias" in state, "qk_norm": "blocks.0.attn.q_norm.weight" in state}
    found |= {"init_values": 1e-5 if "blocks.0.ls1.gamma" in state else None}
    found |= {"global_pool": "token" if class_token and not fc_norm else "avg", "class_token": class_token}
    found |= {"fc_norm": fc_norm, "pos_embed": "learned" if positions else "none", "no_embed_class": no_embed_class}
    return found | {"reg_tokens": reg_tokens, "distilled": distilled}


def convert_torchvision(state: State) -> State:
    """torchvision's names (`encoder.layers.encoder_layer_0.self_attention…`) to ours; others pass unchanged."""
    if "conv_proj.weight" not in state:
        return state
    names = {"class_token": "cls_token", "conv_proj.": "patch_embed.proj.", "encoder.pos_embedding": "pos_embed"}
    names |= {"encoder.layers.encoder_layer_": "blocks.", "encoder.ln.": "norm.", ".ln_": ".norm"}
    names |= {".self_attention.in_proj_": ".attn.qkv.", ".self_attention.out_proj.": ".attn.proj."}
    names |= {".mlp.0.": ".mlp.fc1.", ".mlp.3.": ".mlp.fc2.", "heads.head.": "head."}
    converted = {}
    for name, tensor in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        converted[name] = tensor
    return converted


def _advise(model: VisionTransformer, state: State) -> str:
    """What would fit: the settings in which the weights' own architecture differs, and the presets that have it."""
    try:
        theirs = infer_architecture(state, origin="these weights")
    except ValueError as error:
        return str(error)
    ours = model.architecture | {"init_values": theirs["init_values"]}
    settings = [f"{key}={value}" for key, value in theirs.items() if ours[key] != value]
    alike = [name for name, preset in PRESETS.items() if _outline(preset) == _outline(theirs)]
    presets = f" (as in {', '.join(alike[:3])})" if alike else ""
    return f"A model with {', '.join(settings)} would fit{presets}"


def _outline(architecture: dict[str, Any]) -> tuple[Any, ...]:
    """What tells presets apart in a state dict, whatever its image size and classes."""
    patch_size = as_pair(architecture["patch_size"], name="patch_size")
    options = [int(architecture.get(key, 0)) for key in ("distilled", "reg_tokens", "no_embed_class")]
    has_scale = architecture.get("init_values") is not None
    return patch_size, architecture["embed_dim"], architecture["depth"], options, has_scale
