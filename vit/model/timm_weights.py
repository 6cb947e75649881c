"""Models of timm: built by name, and described as models of this project."""

import inspect
import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, cast

import timm
import torch
from timm import layers
from timm.models import vision_transformer as timm_vit
from torch import nn

from vit.model.attention import NORM_EPS
from vit.model.model_file import StateDict
from vit.model.model_info import find_image_size, read_object
from vit.model.vision_transformer import Architecture
from vit.model.weights import check_fit, count_blocks, infer_architecture
from vit.runtime.arguments import Size, first_line
from vit.runtime.hub import offline_if_unreachable
from vit.runtime.places import suggest


def create_timm(name: str) -> nn.Module:
    """Create a pretrained module of timm in evaluation mode, of a name in timm or of a folder.
    Raises OSError if the weights can't be downloaded, and ValueError if timm can't load them."""
    folder = Path(name)
    is_folder = folder.is_dir()
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
    if is_folder:
        vars(module)["_model_args"] = read_object(folder / "config.json").get("model_args")
    return module.eval()


def describe_module(
    module: nn.Module, *, num_classes: int, img_size: Size | None
) -> dict[str, Any]:
    """Describe another library's module for a model file: its class, and its name in timm if that
    is enough to build it again."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    timm_name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture", "")
    takes_size = hasattr(getattr(module, "patch_embed", None), "img_size")
    values = {"name": name, "timm": timm_name, "img_size": img_size if takes_size else None}
    # timm keeps the arguments of a module, in older versions `create_timm` and `build_module` do.
    arguments = getattr(module, "_model_args", None) or {}
    values["args"] = {key: value for key, value in arguments.items() if key != "num_classes"}
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
    arguments = dict(values.get("args") or {})
    # Some models take no image size.
    if values.get("img_size"):
        arguments["img_size"] = values["img_size"]
    try:
        # A file must not name other files.
        if foreign := arguments.keys() & inspect.signature(timm.create_model).parameters:
            raise LookupError(f"{min(foreign)} is not an argument of a model")
        with torch.device(device):
            module: nn.Module = timm.create_model(
                values["timm"], pretrained=False, num_classes=num_classes, **arguments
            )
    except (LookupError, TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{values['name']} can't be built from its file alone ({first_line(error)}); use"
            " vit.load_bundle(path, model=…)"
        ) from error
    vars(module)["_model_args"] = arguments
    return module.eval()


def build_dinov3(weights: StateDict, *, origin: str) -> nn.Module:
    """Build timm's module of a published ViT of DINOv3, whose names timm's loader converts. Raises
    ValueError if timm has none of this size."""
    is_gated = "blocks.0.mlp.w1.weight" in weights
    sizes = (len(weights["cls_token"].flatten()), count_blocks(weights), is_gated)
    has_bias = "blocks.0.attn.qkv.bias" in weights
    # First those with this bias, which the others would leave out.
    for name in sorted(timm.list_models("vit_*dinov3*"), reverse=has_bias):
        with torch.device("meta"):
            net: Any = timm.create_model(name)
        if (net.embed_dim, len(net.blocks), hasattr(net.blocks[0].mlp, "fc1_g")) == sizes:
            module: nn.Module = timm.create_model(
                name, pretrained=True, pretrained_cfg_overlay={"state_dict": weights}
            )
            return module.eval()
    raise ValueError(f"{origin}: timm has no DINOv3 of width and depth {sizes[:2]}")


def prepare_timm(module: nn.Module, *, drop_path_rate: float) -> nn.Module:
    """Build a module of timm again for training, with its weights."""
    net: Any = module
    count = net.num_classes
    values = describe_module(module, num_classes=count, img_size=find_image_size(module))
    if drop_path_rate:
        values["args"] = values.get("args", {}) | {"drop_path_rate": drop_path_rate}
    built: Any = build_module(values, num_classes=count)
    built.load_state_dict(module.state_dict())
    built.pretrained_cfg = net.pretrained_cfg
    return cast(nn.Module, built)


def freeze_timm(module: nn.Module, part: Literal["backbone"] | int) -> None:
    """Exclude a part of timm's module from training: "backbone", all but the classifier, or for a
    number n what comes before the blocks, and n of them. Raises ValueError if there are fewer."""
    net: Any = module
    module.requires_grad_(False)
    if part == "backbone":
        net.get_classifier().requires_grad_(True)
        return
    children = dict(module.named_children())
    blocks = list(getattr(module, "blocks", ()))
    if part > len(blocks) or "blocks" not in children:
        raise ValueError(
            f"model.freeze {part}: {type(module).__name__} has {len(blocks)} blocks in a row"
        )
    after = list(children.values())[list(children).index("blocks") + 1 :]
    for trained in (*blocks[part:], *after):
        trained.requires_grad_(True)


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
