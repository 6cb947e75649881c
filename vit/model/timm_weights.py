"""Models and weights of timm, and the weights that training starts from. The only import of
timm."""

import difflib
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import timm
import torch
from timm import layers
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_model_data_config
from timm.models import vision_transformer as timm_vit
from torch import nn

from vit.model.attention import NORM_EPS
from vit.model.model_file import MODEL_FILE, StateDict, check_finite
from vit.model.patch_embed import Size
from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.model.weights import (
    build_to_fit,
    check_fit,
    infer_architecture,
    load_weights,
    read_weights,
)
from vit.runtime.arguments import first_line
from vit.runtime.hub import offline_if_unreachable

_LOCAL = "local-dir:"


def create_timm(name: str, *, pretrained: bool) -> nn.Module:
    """timm's own module in evaluation mode.

    Args:
        name: timm's name, or `local-dir:FOLDER` of a folder with its config.json and weights.
        pretrained: Load the weights, which downloads those of a name.

    Raises:
        ValueError: for what timm doesn't know or can't load.
        OSError: where weights can't be downloaded.
    """
    is_local = name.startswith(_LOCAL)
    if not is_local and not timm.is_model(name):
        nearest = ", ".join(difflib.get_close_matches(name, timm.list_models(), n=3))
        hint = f"near it: {nearest}" if nearest else "see timm.list_models()"
        raise ValueError(f"timm has no model {name!r}; {hint}")
    downloads = pretrained and not is_local
    try:
        with offline_if_unreachable() if downloads else nullcontext():
            module: nn.Module = timm.create_model(name, pretrained=pretrained)
    except OSError as error:
        raise OSError(
            f"the weights of {name!r} cannot be downloaded ({first_line(error)}); "
            "download their file on another machine and give its path"
        ) from error
    except Exception as error:  # timm answers an odd config.json with nearly any
        raise ValueError(f"timm can't load {name!r} ({first_line(error)})") from error
    return module.eval()


def load_timm(source: nn.Module | str | Path, *, pretrained: bool = True) -> VisionTransformer:
    """Our VisionTransformer with timm's weights, in evaluation mode.

    Args:
        source: A module of timm, one of its names, a folder with its config.json, or a file of
            weights (safetensors or torch; timm's or torchvision's names). A file doesn't tell the
            number of heads: 64 channels each are assumed, as in every preset.
        pretrained: False: a name gives the architecture with timm's random weights.

    Raises:
        ValueError: for what our VisionTransformer can't compute, and for a damaged file.
        OSError: where weights can't be downloaded or read.
    """
    if isinstance(source, str) and not Path(source).exists():
        source = create_timm(source, pretrained=pretrained)
    elif not isinstance(source, nn.Module) and Path(source).is_dir():
        source = create_timm(f"{_LOCAL}{source}", pretrained=True)
    if not isinstance(source, nn.Module):
        model, _ = _load_file(Path(source))
        return model

    weights = source.state_dict()
    check_finite(weights, origin="the timm model")
    return _build(describe_timm(source), weights, origin=type(source).__name__)


def load_pretrained(
    source: str | Path,
    *,
    img_size: Size | None,
    num_classes: int,
    drop_path_rate: float = 0.0,
) -> tuple[VisionTransformer, dict[str, Any] | None]:
    """A model to go on training from. The architecture is the source's.

    Args:
        source: `timm:NAME`, a model file or training directory of ours, or what `load_timm` reads.
        img_size: To which learned positions are resampled; None: the source's own.
        num_classes: The head is new where the source's number differs.
        drop_path_rate: As in `VisionTransformer`.

    Returns:
        The model, and the values of the `Preprocess` that its weights were trained with; None where
        the file doesn't have them.

    Raises:
        FileNotFoundError: where the source is not a file.
        ValueError, OSError: as `load_timm`.
    """
    # the source, as it is
    path = Path(source)
    preprocess: dict[str, Any] | None
    if str(source).startswith("timm:") or (path / "config.json").is_file():
        name = f"{_LOCAL}{path}"
        if str(source).startswith("timm:"):
            name = str(source).removeprefix("timm:")
        module = create_timm(name, pretrained=True)
        original = load_timm(module)
        preprocess = timm_preprocess(module)
    else:
        path = path / MODEL_FILE if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(
                f"{source} is not a file of weights, a training directory or timm:NAME"
            )
        original, preprocess = _load_file(path)

    # and what the training changes in it
    architecture = original.architecture | {"drop_path_rate": drop_path_rate}
    model = _build(architecture, original.state_dict(), origin=str(source))
    if model.num_classes != num_classes:
        model.reset_classifier(num_classes)
    if img_size is not None:
        model.set_input_size(img_size)
    return model, preprocess


def describe_module(module: nn.Module, *, num_classes: int, img_size: Size) -> dict[str, Any]:
    """What a model file records of a module that isn't ours: its class, and timm's name where that
    alone builds the module again."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    timm_name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture", "")
    if timm.is_model(timm_name):
        # a model that was changed after timm built it doesn't fit the one that its name builds
        takes_size = hasattr(getattr(module, "patch_embed", None), "img_size")
        values = {"name": name, "timm": timm_name, "img_size": img_size if takes_size else None}
        with suppress(ValueError):
            rebuilt = build_module(values, num_classes=num_classes, device="meta")
            check_fit(rebuilt, module.state_dict(), origin="")
            return values
    return {"name": name}


def build_module(values: Mapping[str, Any], *, num_classes: int, device: str = "cpu") -> nn.Module:
    """The module that `describe_module` described, without its weights. Raises ValueError for one
    that timm can't build: its file needs `vit.load_bundle(path, model=…)`."""
    name = values["timm"]
    hint = "give vit.load_bundle(path, model=…)"
    if name is None or not timm.is_model(name):
        raise ValueError(f"{values['name']} can't be built from its file alone; {hint}")
    # models whose size isn't an argument refuse it
    size = {"img_size": values["img_size"]} if values.get("img_size") else {}
    try:
        with torch.device(device):
            module: nn.Module = timm.create_model(
                name, pretrained=False, num_classes=num_classes, **size
            )
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"timm can't build {name!r} ({first_line(error)}); {hint}") from error
    return module.eval()


def timm_preprocess(module: nn.Module) -> dict[str, Any]:
    """The values of a timm model's `Preprocess`, from its pretrained_cfg and its own image size."""
    config = resolve_model_data_config(module)
    if config["crop_mode"] != "center":
        warnings.warn(
            f"these weights were trained with crop_mode {config['crop_mode']!r}; "
            "here images keep their aspect ratio and are cropped at the centre",
            stacklevel=2,
        )
    img_size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    return {
        "image_size": list(img_size or config["input_size"][1:]),
        "mean": list(config["mean"]),
        "std": list(config["std"]),
        "crop_pct": config["crop_pct"],
        "interpolation": config["interpolation"],
    }


def timm_class_names(module: nn.Module) -> tuple[str, ...] | None:
    """The names in a timm model's pretrained_cfg, ImageNet's descriptions, or None for other
    classes."""
    net: Any = module
    config = getattr(net, "pretrained_cfg", None)
    if not config or not net.num_classes:
        return None
    if len(config.get("label_names") or ()) == net.num_classes:
        return tuple(config["label_names"])
    subset = infer_imagenet_subset(net)
    if not subset:
        return None
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(index) for index in range(net.num_classes))


def describe_timm(module: nn.Module) -> Architecture:
    """The arguments that make our VisionTransformer compute what this timm model does. Raises
    ValueError naming the first thing that ours doesn't have."""
    if not isinstance(module, timm_vit.VisionTransformer):
        raise ValueError(f"only timm's VisionTransformer loads, not its {type(module).__name__}")
    block = module.blocks[0]
    if type(block) is not timm_vit.Block:
        raise ValueError(f"only models of timm's Block load, not of its {type(block).__name__}")
    for feature, is_used in _list_features(module).items():
        if is_used:
            raise ValueError(
                f"this timm model has {feature}, which our VisionTransformer doesn't have"
            )
    has_scale = isinstance(block.ls1, layers.LayerScale)
    # shapes tell all but four arguments
    inferred = infer_architecture(
        module.state_dict(), origin="the timm model", img_size=module.patch_embed.img_size
    )
    return inferred | {
        "num_heads": block.attn.num_heads,
        "global_pool": module.global_pool,
        "no_embed_class": module.no_embed_class,
        "init_values": block.ls1.init_values if has_scale else None,
    }


def _list_features(module: timm_vit.VisionTransformer) -> dict[str, bool]:
    """The features of timm's that ours lacks and that have no parameters of their own, which
    `check_fit` would name; and whether the model uses them."""
    block = module.blocks[0]
    mlp = block.mlp
    norms = [block.norm1, *(part for part in module.modules() if isinstance(part, nn.LayerNorm))]
    has_our_norms = all(isinstance(norm, nn.LayerNorm) and norm.eps == NORM_EPS for norm in norms)
    is_gelu = type(mlp) is layers.Mlp and isinstance(mlp.act, nn.GELU)
    is_gelu = is_gelu and mlp.act.approximate == "none"
    is_swiglu = type(mlp) is layers.GluMlp and isinstance(mlp.act, nn.SiLU) and not mlp.gate_last
    expected_types = {module.patch_embed: layers.PatchEmbed, block.attn: layers.Attention}
    features = {
        f"a {type(layer).__name__}": type(layer) is not expected
        for layer, expected in expected_types.items()
    }
    return features | {
        f"pooling {module.global_pool!r}": module.global_pool not in ("token", "avg", "max"),
        "pooling over the prefix tokens": module.pool_include_prefix,
        f"norms that aren't LayerNorm with epsilon {NORM_EPS}": not has_our_norms,
        f"an MLP that is {type(mlp).__name__} with {mlp.act}": not (is_gelu or is_swiglu),
    }


def _build(architecture: Architecture, weights: StateDict, *, origin: str) -> VisionTransformer:
    model = build_to_fit(architecture, weights, origin=origin)
    load_weights(model, weights, origin=origin)
    return model.eval()


def _load_file(path: Path) -> tuple[VisionTransformer, dict[str, Any] | None]:
    """The model of a file of weights, and the values of its `Preprocess` where the file is ours."""
    content = read_weights(path)
    architecture = content.metadata.get("architecture")
    if architecture is None:
        architecture = infer_architecture(content.weights, origin=str(path))
    model = _build(architecture, content.weights, origin=str(path))
    return model, content.metadata.get("preprocess")
