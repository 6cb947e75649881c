"""Modules and what they are built from: the description in a model file of this project, a file of
weights, a name in timm, or a folder of timm or Hugging Face."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vit.model.find_file import find_model
from vit.model.huggingface_weights import (
    MODEL_TYPES,
    is_huggingface,
    read_config,
    read_huggingface,
)
from vit.model.model_file import ModelFile, StateDict
from vit.model.model_info import find_preprocess, name_classes
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import (
    build_to_fit,
    check_fit,
    infer_architecture,
    read_weights,
    remove_prefix,
)
from vit.runtime.arguments import check_kind

_MULTILABEL = "multi_label_classification"


class ForeignModel(NamedTuple):
    """A model of another library, and what its folder tells about it.

    Attributes:
        module: The model, on the CPU.
        class_names: Name of each class; None if unknown.
        preprocess: Values of the `Preprocess` that it was trained with; None if unknown.
        is_multilabel: True if an image may have several labels.
    """

    module: nn.Module
    class_names: tuple[str, ...] | None = None
    preprocess: Mapping[str, Any] | None = None
    is_multilabel: bool = False


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
    check_kind(
        source, (str, Path, nn.Module), name="source", expected="a path, a name or an nn.Module"
    )
    return _open_ours(source, pretrained=pretrained, num_heads=num_heads)[0]


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
    loaded, preprocess = _open_ours(find_model(source), num_heads=num_heads)
    model = VisionTransformer(**loaded.architecture | {"drop_path_rate": drop_path_rate})
    model.load_state_dict(loaded.state_dict())
    if preprocess is not None:
        model.set_input_size(tuple(preprocess["image_size"]))
    if model.num_classes != num_classes:
        model.reset_classifier(num_classes)
    return model.eval(), preprocess


def _open_ours(
    source: nn.Module | str | Path, *, pretrained: bool = True, num_heads: int | None = None
) -> tuple[VisionTransformer, Mapping[str, Any] | None]:
    """Open a source of `load_timm`, or a model file, as a model of this project. Return it with the
    values of its `Preprocess`, or None if they are unknown or the source is a module."""
    if not isinstance(source, nn.Module):
        path = Path(source)
        if is_huggingface(path):
            weights, architecture, values = read_huggingface(path)
            return build_to_fit(architecture, weights, origin=str(path)), values
        if path.is_file():
            content = read_weights(path)
            ours = open_file(path, content, num_heads=num_heads)
            return ours, content.metadata.get("preprocess")

    # timm takes seconds to import
    from vit.model.timm_weights import create_timm, describe_timm

    module, preprocess = source, None
    if not isinstance(module, nn.Module):
        module = create_timm(str(source).removeprefix("timm:"), pretrained=pretrained)
        preprocess = find_preprocess(module)
    architecture = describe_timm(module)
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in module.state_dict().items()}
    return build_to_fit(architecture, weights, origin="the timm model"), preprocess


def open_file(path: Path, content: ModelFile, *, num_heads: int | None) -> VisionTransformer:
    """Build the plain vision transformer that a file's weights belong to.

    Args:
        path: The file.
        content: Its content.
        num_heads: See `load_timm`.

    Raises:
        ValueError: They belong to another kind of network, or the number of heads is needed.
    """
    weights, architecture = content.weights, content.metadata.get("architecture")
    if architecture is None:
        weights = remove_prefix(weights)
        architecture = infer_architecture(weights, origin=str(path), num_heads=num_heads)
    return build_to_fit(architecture, weights, origin=str(path))


def load_into(model: nn.Module, weights: StateDict, *, origin: str) -> None:
    """Load a file's weights into a module, without a trainer's prefix before their names.

    Raises:
        ValueError: The weights belong to another model.
    """
    weights = remove_prefix(weights, next(iter(model.state_dict())))
    check_fit(model, weights, origin=origin)
    model.load_state_dict(weights)


def open_folder(source: str) -> ForeignModel:
    """Open a name in timm, or a folder of timm or Hugging Face.

    A folder of Hugging Face becomes a VisionTransformer of this project where that computes the
    same. Otherwise its library opens it.

    Raises:
        ValueError: The model is unknown or can't be loaded, or `transformers` is missing.
        OSError: A file is missing.
    """
    folder = Path(source.removeprefix("local-dir:"))
    config = read_config(folder)
    is_multilabel = config.get("problem_type") == _MULTILABEL
    if not is_huggingface(folder):
        # timm takes seconds to import
        from vit.model.timm_weights import create_timm

        module = create_timm(source, pretrained=True)
        return ForeignModel(module, is_multilabel=is_multilabel)

    if config["model_type"] in MODEL_TYPES:
        weights, architecture, preprocess = read_huggingface(folder)
        count = architecture["num_classes"]
        if count or "ForImageClassification" not in str(config.get("architectures")):
            ours = build_to_fit(architecture, weights, origin=source)
            ours.set_input_size(tuple(preprocess["image_size"]))
            names = config.get("id2label") or {}
            class_names = name_classes({int(place): name for place, name in names.items()}, count)
            return ForeignModel(ours, class_names, preprocess, is_multilabel)
    try:
        from transformers import AutoModelForImageClassification
    except ImportError as error:
        raise ValueError(
            f"{source} holds a {config['model_type']}, which needs Hugging Face's library: pip"
            " install transformers"
        ) from error
    # It loads weights only, and runs no code of the folder.
    return ForeignModel(AutoModelForImageClassification.from_pretrained(folder))


def describe(
    module: nn.Module, *, num_classes: int, img_size: tuple[int, int]
) -> dict[str, dict[str, Any]]:
    """Describe a module for a model file, from which `build` builds it again."""
    if isinstance(module, VisionTransformer):
        return {"architecture": module.architecture}
    # timm takes seconds to import
    from vit.model.timm_weights import describe_module

    return {"module": describe_module(module, num_classes=num_classes, img_size=img_size)}


def build(content: ModelFile, *, origin: str) -> nn.Module:
    """Check that a model file's weights fit its description, and build that module. A model of this
    project has these weights, another one may have random ones.

    Raises:
        ValueError: They don't fit, or the module can't be built from its file alone.
    """
    metadata, weights = content.metadata, content.weights
    num_classes = len(metadata["class_names"])
    if "module" not in metadata:
        check_class_names(metadata["class_names"], metadata["architecture"]["num_classes"])
        return build_to_fit(metadata["architecture"], weights, origin=origin)
    # timm takes seconds to import
    from vit.model.timm_weights import build_module

    build = partial(build_module, metadata["module"], num_classes=num_classes)
    check_fit(build(device="meta"), weights, origin=origin)
    return build()


def check_class_names(names: Sequence[str], count: int | None) -> None:
    """Raise ValueError if there is another number of names than of classes."""
    if count is not None and len(names) != count:
        raise ValueError(f"{len(names)} class names for a model of {count} classes")
