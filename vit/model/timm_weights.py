"""Models of timm: built by name, and described as models of this project."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm import layers
from timm.models import vision_transformer as timm_vit
from torch import nn

from vit.model.attention import NORM_EPS
from vit.model.vision_transformer import Architecture
from vit.model.weights import check_fit, infer_architecture
from vit.runtime.arguments import Size, first_line
from vit.runtime.hub import offline_if_unreachable
from vit.runtime.places import suggest


def create_timm(name: str) -> nn.Module:
    """Create a pretrained module of timm in evaluation mode, of a name in timm or of a folder.
    Raises OSError if the weights can't be downloaded, and ValueError if timm can't load them."""
    is_folder = Path(name).is_dir()
    if is_folder:
        name = f"local-dir:{name}"
    elif not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{suggest(name, timm.list_models())}")
    repository = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
    try:
        with nullcontext() if is_folder else offline_if_unreachable(repository):
            module: nn.Module = timm.create_model(name, pretrained=True)
    except OSError as error:
        raise OSError(
            f"the weights of {name!r} cannot be downloaded ({first_line(error)}); download their"
            " folder on another machine (hf download timm/… --local-dir FOLDER) and give its path"
        ) from error
    except Exception as error:  # An odd config.json raises almost any exception in timm.
        raise ValueError(f"timm can't load {name!r} ({first_line(error)})") from error
    return module.eval()


def describe_module(module: nn.Module, *, num_classes: int, img_size: Size) -> dict[str, Any]:
    """Describe another library's module for a model file: its class, and its name in timm if that
    is enough to build it again."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    timm_name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture", "")
    takes_size = hasattr(getattr(module, "patch_embed", None), "img_size")
    values = {"name": name, "timm": timm_name, "img_size": img_size if takes_size else None}
    # A model that was changed after timm built it doesn't fit its name any more.
    with suppress(ValueError):
        rebuilt = build_module(values, num_classes=num_classes, device="meta")
        check_fit(rebuilt, module.state_dict(), origin="")
        return values
    return {"name": name}


def build_module(values: Mapping[str, Any], *, num_classes: int, device: str = "cpu") -> nn.Module:
    """Build the module of a description of `describe_module`, without its weights."""
    # Some models take no image size.
    size = {"img_size": values["img_size"]} if values.get("img_size") else {}
    try:
        with torch.device(device):
            module: nn.Module = timm.create_model(
                values["timm"], pretrained=False, num_classes=num_classes, **size
            )
    except (LookupError, TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{values['name']} can't be built from its file alone ({first_line(error)}); use"
            " vit.load_bundle(path, model=…)"
        ) from error
    return module.eval()


def describe_timm(module: nn.Module) -> Architecture:
    """Return the arguments of a VisionTransformer that computes the same as a timm model. Raises
    ValueError, which names a feature that VisionTransformer lacks."""
    feature = _find_feature_without_counterpart(module)
    if feature is not None:
        raise ValueError(
            f"this model has {feature}, which our VisionTransformer doesn't have; "
            "vit.train(model=…) trains models of other kinds, from Python"
        )
    net: Any = module
    block = net.blocks[0]
    # The shapes tell all arguments but these.
    inferred = infer_architecture(
        module.state_dict(),
        origin="the timm model",
        img_size=net.patch_embed.img_size,
        num_heads=block.attn.num_heads,
    )
    return inferred | {
        "global_pool": net.global_pool,
        "no_embed_class": net.no_embed_class,
        "init_values": getattr(block.ls1, "init_values", None),
    }


def _find_feature_without_counterpart(module: nn.Module) -> str | None:
    """Return a feature of a timm model that ours lacks. `check_fit` names those with parameters."""
    if not isinstance(module, timm_vit.VisionTransformer):
        return f"the class {type(module).__name__}, not timm's VisionTransformer"
    block = module.blocks[0]
    for layer, expected in (
        (block, timm_vit.Block),
        (module.patch_embed, layers.PatchEmbed),
        (block.attn, layers.Attention),
    ):
        if type(layer) is not expected:
            return f"a {type(layer).__name__}"

    if module.global_pool not in ("token", "avg") or module.pool_include_prefix:
        return f"pooling {module.global_pool!r} over other tokens"

    norms = [block.norm1, *(part for part in module.modules() if isinstance(part, nn.LayerNorm))]
    if not all(isinstance(norm, nn.LayerNorm) and norm.eps == NORM_EPS for norm in norms):
        return f"norms that aren't LayerNorm with epsilon {NORM_EPS}"

    mlp = block.mlp
    is_gelu = isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none"
    if type(mlp) is not layers.Mlp or not is_gelu:
        return f"an MLP that is {type(mlp).__name__} with {mlp.act}"
    return None
