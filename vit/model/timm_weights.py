"""Models and weights of timm, and the weights that training starts from. The only import of timm."""

import difflib
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm import layers
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_model_data_config
from timm.models import vision_transformer as timm_vit
from torch import nn

from vit.model.attention import NORM_EPS
from vit.model.metadata import build_outline
from vit.model.model_file import MODEL_FILE, State, check_finite
from vit.model.patch_embed import Size
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import check_fit, convert_torchvision, infer_architecture, load_weights, read_weights
from vit.runtime.arguments import first_line
from vit.runtime.hub import without_retries

_LOCAL = "local-dir:"


def create_timm(name: str, *, pretrained: bool) -> nn.Module:
    """timm's own module in evaluation mode. `name` is timm's, or `local-dir:FOLDER` with its config.json and weights.
    Raises ValueError for what timm doesn't know or can't load, OSError where weights can't be downloaded."""
    if not name.startswith(_LOCAL) and not timm.is_model(name):
        near = ", ".join(difflib.get_close_matches(name, timm.list_models(), n=3))
        raise ValueError(f"timm has no model {name!r}; {f'near it: {near}' if near else 'see timm.list_models()'}")
    try:
        with nullcontext() if name.startswith(_LOCAL) or not pretrained else without_retries():
            return cast(nn.Module, timm.create_model(name, pretrained=pretrained).eval())
    except OSError as error:
        cure = "download their file on another machine and give its path"
        raise OSError(f"the weights of {name!r} cannot be downloaded ({first_line(error)}); {cure}") from error
    except Exception as error:  # timm answers an odd config.json with nearly any
        raise ValueError(f"timm can't load {name!r} ({first_line(error)})") from error


def describe_module(module: nn.Module, *, num_classes: int, img_size: Size) -> dict[str, Any]:
    """What a model file says of a module that isn't ours; timm's name where that alone builds the module again."""
    values: dict[str, Any] = {"name": f"{type(module).__module__}.{type(module).__qualname__}"}
    name = (getattr(module, "pretrained_cfg", None) or {}).get("architecture", "")
    if timm.is_model(name):
        sized = hasattr(getattr(module, "patch_embed", None), "img_size")
        known = values | {"timm": name, "img_size": img_size if sized else None}
        with suppress(ValueError):
            check_fit(build_module(known, num_classes=num_classes, device="meta"), module.state_dict(), origin="")
            return known
    return values


def build_module(values: dict[str, Any], *, num_classes: int, device: str = "cpu") -> nn.Module:
    """The module that `describe_module` described, without its weights. Raises ValueError for one that timm can't
    build: its file needs `vit.load_bundle(path, model=…)`."""
    name, size, cure = values["timm"], values.get("img_size"), "give vit.load_bundle(path, model=…)"
    if name is None or not timm.is_model(name):
        raise ValueError(f"{values['name']} can't be built from its file alone; {cure}")
    options = {"num_classes": num_classes, **({"img_size": size} if size else {})}
    try:
        with torch.device(device):
            return cast(nn.Module, timm.create_model(name, pretrained=False, **options).eval())
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"timm can't build {name!r} ({first_line(error)}); {cure}") from error


def load_timm(source: nn.Module | str | Path, *, pretrained: bool = True) -> VisionTransformer:
    """Our VisionTransformer with the weights of a timm module, of a timm name, or of a path.
    A path is a folder with timm's config.json, or a file of weights (safetensors or torch; timm's or torchvision's
    names). A file doesn't tell the number of heads: 64 channels each are assumed, as in every preset. Without
    `pretrained`, a name gives the architecture with timm's random weights."""
    if isinstance(source, nn.Module):
        architecture, weights = describe_timm(source), source.state_dict()
        check_finite(weights, origin="the timm model")
        return _build(architecture, weights, origin=type(source).__name__)
    path = Path(source)
    if isinstance(source, str) and not path.exists():
        return load_timm(create_timm(source, pretrained=pretrained))
    return load_timm(create_timm(f"{_LOCAL}{path}", pretrained=True)) if path.is_dir() else _load_file(path)[0]


def load_pretrained(
    source: str | Path, *, img_size: Size | None, num_classes: int, drop_path_rate: float = 0.0
) -> tuple[VisionTransformer, dict[str, Any] | None]:
    """A model to go on training from: `timm:NAME`, a model file or training directory of ours, or what `load_timm`
    reads; and the values of the `Preprocess` its weights were trained with, None where the file doesn't tell them.
    The architecture is the source's. The head is new where the number of classes differs, learned positions are
    resampled to `img_size` (None: the source's own), and `drop_path_rate` is set."""
    path, preprocess = Path(source), None
    if str(source).startswith("timm:") or (path / "config.json").is_file():
        name = str(source).removeprefix("timm:") if str(source).startswith("timm:") else f"{_LOCAL}{path}"
        module = create_timm(name, pretrained=True)
        original, preprocess = load_timm(module), find_preprocess(module)
    else:
        path = path / MODEL_FILE if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"{source} is no file of weights, no training directory and no timm:NAME")
        original, metadata = _load_file(path)
        preprocess = metadata.get("preprocess")
    architecture = original.architecture | {"drop_path_rate": drop_path_rate}
    model = _build(architecture, original.state_dict(), origin=str(source))
    if model.num_classes != num_classes:
        model.reset_classifier(num_classes)
    if img_size is not None:
        model.set_input_size(img_size)
    return model, preprocess


def find_preprocess(module: nn.Module) -> dict[str, Any]:
    """The values of a timm model's `Preprocess`, from its pretrained_cfg and its own image size."""
    config = resolve_model_data_config(module)
    if config["crop_mode"] != "center":
        ours = "here images keep their aspect ratio and are cropped at the centre"
        warnings.warn(f"these weights were trained with crop_mode {config['crop_mode']!r}; {ours}", stacklevel=2)
    size = getattr(getattr(module, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    values = {"image_size": list(size), "mean": list(config["mean"]), "std": list(config["std"])}
    return values | {key: config[key] for key in ("crop_pct", "interpolation")}


def find_class_names(module: nn.Module) -> tuple[str, ...] | None:
    """The names in a timm model's pretrained_cfg, ImageNet's descriptions, or None for other classes."""
    config: Any = getattr(module, "pretrained_cfg", None)
    count = int(module.num_classes)  # type: ignore[arg-type]
    if not config or not count:
        return None
    if len(config.get("label_names") or ()) == count:
        return tuple(config["label_names"])
    subset = infer_imagenet_subset(module)
    info = ImageNetInfo(subset) if subset else None
    return tuple(info.index_to_description(index) for index in range(count)) if info else None


def describe_timm(module: nn.Module) -> dict[str, Any]:
    """The arguments that make our VisionTransformer compute what this timm model does. Raises ValueError naming the
    first thing that ours doesn't have."""
    if not isinstance(module, timm_vit.VisionTransformer):
        raise ValueError(f"only timm's VisionTransformer loads, not its {type(module).__name__}")
    block = module.blocks[0]
    if type(block) is not timm_vit.Block:
        raise ValueError(f"only models of timm's Block load, not of its {type(block).__name__}")
    for what in (what for what, differs in _list_differences(module).items() if differs):
        raise ValueError(f"this timm model has {what}, which our VisionTransformer has not")
    size, scale = module.patch_embed.img_size, block.ls1
    told = {
        "num_heads": block.attn.num_heads,
        "global_pool": module.global_pool,
        "no_embed_class": module.no_embed_class,
    }
    told["init_values"] = scale.init_values if isinstance(scale, layers.LayerScale) else None
    return infer_architecture(module.state_dict(), origin="the timm model", img_size=size) | told


def _list_differences(module: timm_vit.VisionTransformer) -> dict[str, bool]:
    """The options of timm's that ours lacks, and whether the model uses them."""
    block, patches = module.blocks[0], module.patch_embed
    attention, mlp = block.attn, block.mlp
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    gelu = type(mlp) is layers.Mlp and isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none"
    swiglu = type(mlp) is layers.GluMlp and isinstance(mlp.act, nn.SiLU) and not mlp.gate_last

    def has(part: nn.Module, name: str) -> bool:
        return not isinstance(getattr(part, name, None), nn.Identity | None)

    return {
        f"pooling {module.global_pool!r}": module.global_pool not in ("token", "avg", "max"),
        "pooling over the prefix tokens": module.pool_include_prefix,
        "a norm before the blocks": has(module, "norm_pre"),
        "no final norm": not has(module, "norm") and not has(module, "fc_norm"),
        f"norms that aren't LayerNorm with epsilon {NORM_EPS}": not isinstance(block.norm1, nn.LayerNorm)
        or any(norm.eps != NORM_EPS for norm in norms),
        f"patch embedding {type(patches).__name__}": type(patches) is not layers.PatchEmbed,
        "a norm in its patch embedding": has(patches, "norm"),
        f"attention of type {type(attention).__name__}": type(attention) is not layers.Attention,
        "a gate in its attention": getattr(attention, "gate", None) is not None,
        "a norm inside its attention": has(attention, "norm"),
        f"an MLP that is {type(mlp).__name__} with {mlp.act}": not (gelu or swiglu),
        "a norm inside its MLP": has(mlp, "norm"),
    }


def _build(architecture: dict[str, Any], weights: State, *, origin: str) -> VisionTransformer:
    check_fit(build_outline(architecture, origin=origin), weights, origin=origin)
    model = VisionTransformer(**architecture)
    load_weights(model, weights, origin=origin)
    return model.eval()


def _load_file(path: Path) -> tuple[VisionTransformer, dict[str, Any]]:
    """The model of a file of weights, and its metadata where the file is ours."""
    content = read_weights(path)
    weights = convert_torchvision(content.weights)
    architecture = content.metadata.get("architecture") or infer_architecture(weights, origin=str(path))
    return _build(architecture, weights, origin=str(path)), content.metadata
