"""Models and weights of timm, and the weights that training starts from."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm import layers
from timm.models import vision_transformer as timm_vit
from torch import nn

from vit.model.attention import NORM_EPS
from vit.model.huggingface_weights import is_huggingface, read_huggingface
from vit.model.model_file import MODEL_FILE, StateDict
from vit.model.model_info import find_preprocess
from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.model.weights import (
    build_to_fit,
    check_fit,
    find_num_heads,
    infer_architecture,
    read_weights,
)
from vit.runtime.arguments import Size, check_kind, first_line
from vit.runtime.hub import offline_if_unreachable

_LOCAL = "local-dir:"
_TIMM_ORIGIN = "the timm model"  # in messages
# The end of a message about a model that isn't a plain vision transformer.
OTHER_MODELS = "vit.train(model=…) trains models of other kinds, from Python"


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
        nearest = ", ".join(difflib.get_close_matches(name, timm.list_models(), n=3))
        hint = f"similar names: {nearest}" if nearest else "see timm.list_models()"
        raise ValueError(f"timm has no model {name!r}; {hint}")
    downloads = pretrained and not is_local
    try:
        with offline_if_unreachable() if downloads else nullcontext():
            module: nn.Module = timm.create_model(name, pretrained=pretrained)
    except OSError as error:
        config = timm.get_pretrained_cfg(name)
        command = ""
        if config is not None and config.hf_hub_id:
            command = f" (hf download {config.hf_hub_id} --local-dir FOLDER)"
        raise OSError(
            f"the weights of {name!r} cannot be downloaded ({first_line(error)}); "
            f"download their file on another machine{command} and give its path"
        ) from error
    except Exception as error:  # An odd config.json raises almost any exception in timm.
        hint = f"; {OTHER_MODELS}" if is_local else ""
        raise ValueError(f"timm can't load {name!r} ({first_line(error)}){hint}") from error
    return module.eval()


def load_timm(
    source: nn.Module | str | Path, *, pretrained: bool = True, num_heads: int | None = None
) -> VisionTransformer:
    """Load timm's weights into a VisionTransformer of vit.

    Args:
        source: A module of timm, a name in timm, a folder with the config.json
            of timm or of a Hugging Face ViT or DINOv2, or a file of weights
            with timm's names (safetensors or torch).
        pretrained: Load the weights. False keeps timm's random weights.
        num_heads: Number of attention heads, which a file of weights doesn't
            tell. None: that of the published ViTs of this width, with a
            warning.

    Returns:
        The model in evaluation mode. It computes timm's logits.

    Raises:
        ValueError: VisionTransformer can't compute this model, the file is
            damaged, or its number of heads is needed.
        OSError: The weights can't be downloaded or read.

    Example:
        >>> model = vit.load_timm("vit_small_patch16_224")
        >>> model(images)  # normalised [B, 3, 224, 224] → [B, 1000]
    """
    if not isinstance(source, nn.Module):
        check_kind(source, (str, Path), name="source", expected="a path, a name or an nn.Module")
        content = _read_content(Path(source), num_heads=num_heads)
        if content is not None:
            return _build(content.architecture, content.weights, origin=content.origin)
        source = create_timm(str(source), pretrained=pretrained)
    return _build(describe_timm(source), source.state_dict(), origin=_TIMM_ORIGIN)


def load_pretrained(
    source: str | Path,
    *,
    num_classes: int,
    drop_path_rate: float = 0.0,
    num_heads: int | None = None,
) -> tuple[VisionTransformer, Mapping[str, Any] | None]:
    """Load a pretrained model for training.

    Args:
        source: `timm:NAME`, a model file or run of vit, or a source of `load_timm`.
        num_classes: Number of classes. If the source has another number, the head is new.
        drop_path_rate: See `VisionTransformer`.
        num_heads: See `load_timm`.

    Returns:
        The model, and the values of the `Preprocess` that its weights were trained with, or None
        if the file doesn't have them.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError, OSError: See `load_timm`.
    """
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        path = path / MODEL_FILE
    if not (str(source).startswith("timm:") or path.exists()):
        raise FileNotFoundError(
            f"{source} is not a file of weights, a training directory or timm:NAME"
        )
    content = _read_content(path, num_heads=num_heads)
    if content is None:
        module = create_timm(str(path).removeprefix("timm:"), pretrained=True)
        weights = module.state_dict()
        content = _Content(describe_timm(module), weights, find_preprocess(module), _TIMM_ORIGIN)
    architecture = content.architecture | {"drop_path_rate": drop_path_rate}
    model = _build(architecture, content.weights, origin=content.origin)
    if content.preprocess is not None:
        model.set_input_size(tuple(content.preprocess["image_size"]))
    if model.num_classes != num_classes:
        model.reset_classifier(num_classes)
    return model, content.preprocess


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
            f"only timm's VisionTransformer loads, not its {type(module).__name__}; {OTHER_MODELS}"
        )
    feature = next(_list_features_without_counterpart(module), None)
    if feature is not None:
        raise ValueError(
            f"this timm model has {feature}, which our VisionTransformer doesn't have"
            f"; {OTHER_MODELS}"
        )

    block = module.blocks[0]
    has_scale = isinstance(block.ls1, layers.LayerScale)
    # The shapes tell all arguments but four.
    inferred = infer_architecture(
        module.state_dict(),
        origin=_TIMM_ORIGIN,
        img_size=module.patch_embed.img_size,
        num_heads=block.attn.num_heads,
    )
    return inferred | {
        "global_pool": module.global_pool,
        "no_embed_class": module.no_embed_class,
        "init_values": block.ls1.init_values if has_scale else None,
    }


def _list_features_without_counterpart(module: timm_vit.VisionTransformer) -> Iterator[str]:
    """List features of a timm model that ours lacks. `check_fit` names those with parameters."""
    block = module.blocks[0]
    if type(block) is not timm_vit.Block:
        yield f"a {type(block).__name__}"
    for layer, expected in (
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


def _build(architecture: Architecture, weights: StateDict, *, origin: str) -> VisionTransformer:
    model = build_to_fit(architecture, weights, origin=origin)
    model.load_state_dict(weights)
    return model.eval()


class _Content(NamedTuple):
    """Weights of another program, and what they are for.

    Attributes:
        preprocess: Values of the `Preprocess` that they were trained with; None if unknown.
        origin: Name of the weights in messages.
    """

    architecture: Architecture
    weights: StateDict
    preprocess: Mapping[str, Any] | None
    origin: str


def _read_content(path: Path, *, num_heads: int | None) -> _Content | None:
    """Read a file of weights or a folder of Hugging Face's; return None for what only timm knows."""
    if is_huggingface(path):
        weights, architecture, preprocess = read_huggingface(path)
        return _Content(architecture, weights, preprocess, str(path))
    if not path.is_file():
        return None
    content = read_weights(path)
    known = content.metadata.get("architecture")
    if known is None:
        num_heads = find_num_heads(content.weights, num_heads, origin=str(path))
        known = infer_architecture(content.weights, origin=str(path), num_heads=num_heads)
    return _Content(known, content.weights, content.metadata.get("preprocess"), str(path))
