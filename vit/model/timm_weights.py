"""Models of timm: built by name, and described as models of this project."""

from collections.abc import Iterator, Mapping
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

_LOCAL = "local-dir:"
# The end of a message about a model that isn't a plain vision transformer.
_OTHER_MODELS = "vit.train(model=…) trains models of other kinds, from Python"


def create_timm(name: str, *, pretrained: bool) -> nn.Module:
    """Create a module of timm in evaluation mode.

    Args:
        name: Name in timm, or a folder with timm's config.json and weights, also as
            `local-dir:FOLDER`.
        pretrained: Load the weights. A name downloads them.

    Raises:
        ValueError: timm doesn't know the name, or can't load the model.
        OSError: The weights can't be downloaded.
    """
    if Path(name).is_dir():
        name = f"{_LOCAL}{name}"
    is_local = name.startswith(_LOCAL)
    if not is_local and not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{suggest(name, timm.list_models())}")
    downloads = pretrained and not is_local
    try:
        with offline_if_unreachable() if downloads else nullcontext():
            module: nn.Module = timm.create_model(name, pretrained=pretrained)
    except OSError as error:
        raise OSError(
            f"the weights of {name!r} cannot be downloaded ({first_line(error)}); download their"
            " folder on another machine (hf download timm/… --local-dir FOLDER) and give its path"
        ) from error
    except Exception as error:  # An odd config.json raises almost any exception in timm.
        hint = f"; {_OTHER_MODELS}" if is_local else ""
        raise ValueError(f"timm can't load {name!r} ({first_line(error)}){hint}") from error
    return module.eval()


def describe_module(module: nn.Module, *, num_classes: int, img_size: Size) -> dict[str, Any]:
    """Describe another library's module for a model file.

    The description has its class, and its name in timm if that is enough to build it again.
    """
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    timm_name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture", "")
    if timm.is_model(timm_name):
        # A model that was changed after timm built it doesn't fit its name any more.
        takes_size = hasattr(getattr(module, "patch_embed", None), "img_size")
        values = {"name": name, "timm": timm_name, "img_size": img_size if takes_size else None}
        with suppress(ValueError):
            rebuilt = build_module(values, num_classes=num_classes, device="meta")
            check_fit(rebuilt, module.state_dict(), origin="")
            return values
    return {"name": name}


def build_module(values: Mapping[str, Any], *, num_classes: int, device: str = "cpu") -> nn.Module:
    """Build the module of a description of `describe_module`, without its weights.

    Raises:
        ValueError: timm can't build it. Its file needs `vit.load_bundle(path, model=…)`.
    """
    name = values.get("timm")
    hint = "use vit.load_bundle(path, model=…)"
    if name is None or not timm.is_model(name):
        raise ValueError(f"{values['name']} can't be built from its file alone; {hint}")
    # Some models take no image size.
    size = {"img_size": values["img_size"]} if values.get("img_size") else {}
    try:
        with torch.device(device):
            module: nn.Module = timm.create_model(
                name, pretrained=False, num_classes=num_classes, **size
            )
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"timm can't build {name!r} ({first_line(error)}); {hint}") from error
    return module.eval()


def describe_timm(module: nn.Module) -> Architecture:
    """Return the arguments of a VisionTransformer that computes the same as a timm model.

    Raises:
        ValueError: The model has a feature that VisionTransformer lacks; the message names it.
    """
    if not isinstance(module, timm_vit.VisionTransformer):
        raise ValueError(
            f"only timm's VisionTransformer loads, not its {type(module).__name__}; {_OTHER_MODELS}"
        )
    feature = next(_list_features_without_counterpart(module), None)
    if feature is not None:
        raise ValueError(
            f"this timm model has {feature}, which our VisionTransformer doesn't have"
            f"; {_OTHER_MODELS}"
        )
    block = module.blocks[0]
    # The shapes tell all arguments but these.
    inferred = infer_architecture(
        module.state_dict(),
        origin="the timm model",
        img_size=module.patch_embed.img_size,
        num_heads=block.attn.num_heads,
    )
    return inferred | {
        "global_pool": module.global_pool,
        "no_embed_class": module.no_embed_class,
        "init_values": getattr(block.ls1, "init_values", None),
    }


def _list_features_without_counterpart(module: timm_vit.VisionTransformer) -> Iterator[str]:
    """List features of a timm model that ours lacks. `check_fit` names those with parameters."""
    block = module.blocks[0]
    for layer, expected in (
        (block, timm_vit.Block),
        (module.patch_embed, layers.PatchEmbed),
        (block.attn, layers.Attention),
    ):
        if type(layer) is not expected:
            yield f"a {type(layer).__name__}"

    if module.global_pool not in ("token", "avg"):
        yield f"pooling {module.global_pool!r}"
    if module.pool_include_prefix:
        yield "pooling over the prefix tokens"

    norms = [block.norm1, *(part for part in module.modules() if isinstance(part, nn.LayerNorm))]
    if not all(isinstance(norm, nn.LayerNorm) and norm.eps == NORM_EPS for norm in norms):
        yield f"norms that aren't LayerNorm with epsilon {NORM_EPS}"

    mlp = block.mlp
    is_gelu = type(mlp) is layers.Mlp and isinstance(mlp.act, nn.GELU)
    is_gelu = is_gelu and mlp.act.approximate == "none"
    is_swiglu = type(mlp) is layers.GluMlp and isinstance(mlp.act, nn.SiLU) and not mlp.gate_last
    if not (is_gelu or is_swiglu):
        yield f"an MLP that is {type(mlp).__name__} with {mlp.act}"
