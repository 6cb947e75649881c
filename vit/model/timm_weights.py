"""Models of timm: built by name, and described as models of this project."""

import inspect
import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from timm import layers
from timm.models import vision_transformer as timm_vit
from torch import nn

from vit.model.attention import NORM_EPS
from vit.model.model_info import find_image_size, read_object
from vit.model.vision_transformer import Architecture
from vit.model.weights import check_fit, infer_architecture
from vit.runtime.arguments import Size, first_line
from vit.runtime.hub import offline_if_unreachable
from vit.runtime.places import suggest

# Arguments of `timm.create_model` that a description has by itself.
_DESCRIBED = ("num_classes", "img_size")


def create_timm(name: str) -> nn.Module:
    """Create a pretrained module of timm in evaluation mode, of a name in timm or of a folder.
    Raises OSError if the weights can't be downloaded, and ValueError if timm can't load them."""
    folder = Path(name)
    is_folder = folder.is_dir()
    if is_folder:
        name = f"local-dir:{name}"
    elif not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}{suggest(name, timm.list_models())}")
    try:
        with nullcontext() if is_folder else offline_if_unreachable():
            module: nn.Module = timm.create_model(name, pretrained=True)
    except OSError as error:
        raise OSError(
            f"the weights of {name!r} cannot be downloaded ({first_line(error)}); download their"
            " folder on another machine (hf download timm/… --local-dir FOLDER) and give its path"
        ) from error
    except Exception as error:  # An odd config.json raises almost any exception in timm.
        raise ValueError(f"timm can't load {name!r} ({first_line(error)})") from error
    if is_folder:
        module._model_args = read_object(folder / "config.json").get("model_args")
    return module.eval()


def describe_module(module: nn.Module, *, num_classes: int, img_size: Size) -> dict[str, Any]:
    """Describe another library's module for a model file: its class, and its name in timm if that
    is enough to build it again."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    timm_name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture", "")
    takes_size = hasattr(getattr(module, "patch_embed", None), "img_size")
    values = {"name": name, "timm": timm_name, "img_size": img_size if takes_size else None}
    # timm keeps the arguments of a module, in older versions `create_timm` and `build_module` do.
    arguments = getattr(module, "_model_args", None) or {}
    values["args"] = {key: value for key, value in arguments.items() if key not in _DESCRIBED}
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
    module._model_args = arguments
    return module.eval()


def prepare_timm(module: nn.Module, *, num_classes: int, drop_path_rate: float) -> nn.Module:
    """Build a module of timm again for training, with its weights. The head is new if the module has
    another number of classes."""
    net: Any = module
    size = find_image_size(module)
    assert size is not None, "timm's modules have one"
    values = describe_module(module, num_classes=net.num_classes, img_size=size)
    if drop_path_rate:
        values["args"] = {**values.get("args", {}), "drop_path_rate": drop_path_rate}
    built: Any = build_module(values, num_classes=net.num_classes)
    built.load_state_dict(module.state_dict())
    built.pretrained_cfg = net.pretrained_cfg
    if net.num_classes != num_classes:
        built.reset_classifier(num_classes)
    return built.eval()  # type: ignore[no-any-return]


def freeze_timm(module: nn.Module, part: Literal["backbone"] | int) -> None:
    """Exclude a part of timm's module from training: "backbone", all but the classifier, or for a
    number n all that comes before the first blocks, and these n. Raises ValueError for a model
    without blocks, or with fewer."""
    net: Any = module
    module.requires_grad_(part != "backbone")
    if part == "backbone":
        net.get_classifier().requires_grad_(True)
        return
    names = [name for name, _ in module.named_children()]
    blocks = getattr(module, "blocks", ())
    if "blocks" not in names or part > len(blocks):
        count = f"{len(blocks)} blocks" if blocks else 'no blocks in a row; take "backbone"'
        raise ValueError(f"model.freeze {part}: {type(module).__name__} has {count}")
    before = [net.get_submodule(name) for name in names[: names.index("blocks")]]
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(False)
    for frozen in (*before, *blocks[:part]):
        frozen.requires_grad_(False)


def describe_timm(module: nn.Module) -> Architecture:
    """Return the arguments of a VisionTransformer that computes the same as a timm model. Raises
    ValueError, which names a feature that VisionTransformer lacks."""
    feature = _find_feature_without_counterpart(module)
    if feature is not None:
        raise ValueError(
            f"this model has {feature}, which our VisionTransformer doesn't have; "
            "vit.load_bundle opens timm's own module, and --init trains it"
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
