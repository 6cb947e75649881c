"""Models of timm: built by name, and described as models of this project."""

import inspect
import json
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm import layers
from timm.models import vision_transformer as timm_vit
from timm.models.eva import checkpoint_filter_fn
from torch import nn

from vit.model.attention import NORM_EPS
from vit.model.model_file import StateDict
from vit.model.vision_transformer import Architecture
from vit.model.weights import check_fit, infer_architecture
from vit.runtime.arguments import first_line
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


def describe_module(module: nn.Module, *, num_classes: int) -> dict[str, Any]:
    """Describe another library's module for a model file: its class, and its name and arguments in
    timm if these are enough to build it again."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    timm_name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture", "")
    values = {
        "name": name,
        "timm": timm_name,
        "args": {**getattr(module, "_model_args", {}), "num_classes": num_classes},
        "img_size": getattr(getattr(module, "patch_embed", None), "img_size", None),
    }
    # A model that was changed after timm built it doesn't fit its name any more, and JSON can't hold
    # each argument.
    with suppress(ValueError, TypeError):
        json.dumps(values)
        rebuilt = build_module(values, num_classes=num_classes, device="meta")
        check_fit(rebuilt, module.state_dict(), origin="")
        return values
    return {"name": name}


def build_module(values: Mapping[str, Any], *, num_classes: int, device: str = "cpu") -> nn.Module:
    """Build the module of a description of `describe_module`, without its weights."""
    arguments = {**values.get("args", {}), "num_classes": num_classes}
    # Some models take no image size.
    if values.get("img_size"):
        arguments["img_size"] = values["img_size"]
    try:
        # A file must not name other files.
        if foreign := arguments.keys() & inspect.signature(timm.create_model).parameters:
            raise LookupError(f"{min(foreign)} is not an argument of a model")
        with torch.device(device):
            module: nn.Module = timm.create_model(values["timm"], pretrained=False, **arguments)
    except (LookupError, TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{values['name']} can't be built from its file alone ({first_line(error)}); use"
            " vit.load_bundle(path, model=…)"
        ) from error
    return module.eval()


def build_dinov3(weights: StateDict, *, origin: str) -> nn.Module:
    """Build timm's module of a published ViT of DINOv3, whose names timm converts."""
    # Names of models with a bias of the queries come first: others would leave it out.
    for name in sorted(timm.list_models("vit_*dinov3*"), reverse=True):
        # timm prints what it leaves out
        with torch.device("meta"), redirect_stdout(None):
            net = timm.create_model(name)
            converted = checkpoint_filter_fn(weights, net)
        with suppress(ValueError):
            check_fit(net, converted, origin=origin)
            module: nn.Module = timm.create_model(name)
            module.load_state_dict(converted)
            return module.eval()
    raise ValueError(f"{origin}: timm has no DINOv3 of these sizes")


def rebuild_timm(module: nn.Module, *, drop_path_rate: float) -> nn.Module:
    """Build a module of timm again, with its weights, to be trained at this rate."""
    net: Any = module
    values = describe_module(module, num_classes=net.num_classes)
    arguments = {**values.get("args", {}), "drop_path_rate": drop_path_rate}
    rebuilt = build_module(values | {"args": arguments}, num_classes=net.num_classes)
    rebuilt.load_state_dict(module.state_dict())
    return rebuilt


def describe_timm(module: nn.Module) -> Architecture:
    """Return the arguments of a VisionTransformer that computes the same as a timm model. Raises
    ValueError if there is none."""
    if not _is_plain(module):
        raise ValueError(
            f"vit.VisionTransformer doesn't compute this {type(module).__name__};"
            " vit.load_bundle opens timm's own module, and vit train --init trains it"
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


def _is_plain(module: nn.Module) -> bool:
    """Return whether a model of timm is of the parts that ours has. `check_fit` finds those with
    other parameters."""
    if not isinstance(module, timm_vit.VisionTransformer):
        return False
    block = module.blocks[0]
    if (type(block), type(module.patch_embed)) != (timm_vit.Block, layers.PatchEmbed):
        return False
    norms = [block.norm1, *(part for part in module.modules() if isinstance(part, nn.LayerNorm))]
    gelu = block.mlp.act
    return (
        (type(block.attn), type(block.mlp)) == (layers.Attention, layers.Mlp)
        and isinstance(gelu, nn.GELU)
        and gelu.approximate == "none"
        and module.global_pool in ("token", "avg")
        and not module.pool_include_prefix
        and all(isinstance(norm, nn.LayerNorm) and norm.eps == NORM_EPS for norm in norms)
    )
