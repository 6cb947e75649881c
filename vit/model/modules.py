"""Modules and what they are built from: the description in a model file of this project, a file of
weights, a name in timm, or a folder of timm or Hugging Face."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vit.model.huggingface_weights import MODEL_TYPES, is_huggingface, read_huggingface
from vit.model.model_file import ModelFile, StateDict
from vit.model.vision_transformer import Architecture, VisionTransformer
from vit.model.weights import (
    build_to_fit,
    check_fit,
    find_num_heads,
    infer_architecture,
    read_state_dict,
)
from vit.runtime.documents import read_json

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


def describe(
    module: nn.Module, *, num_classes: int, img_size: tuple[int, int]
) -> dict[str, dict[str, Any]]:
    """Describe a module for a model file, from which `build` builds it again."""
    if isinstance(module, VisionTransformer):
        return {"architecture": module.architecture}
    # timm takes seconds to import
    from vit.model.timm_weights import describe_module

    return {"module": describe_module(module, num_classes=num_classes, img_size=img_size)}


def build(content: ModelFile, *, origin: str, is_random: bool) -> nn.Module:
    """Check that a model file's weights fit its description, and build that module. Its weights are
    random, or may be.

    Raises:
        ValueError: They don't fit, or the module can't be built from its file alone.
    """
    metadata, weights = content.metadata, content.weights
    num_classes = len(metadata["class_names"])
    if "module" not in metadata:
        check_class_names(metadata["class_names"], metadata["architecture"]["num_classes"])
        return build_to_fit(metadata["architecture"], weights, origin=origin, is_random=is_random)
    # timm takes seconds to import
    from vit.model.timm_weights import build_module

    build = partial(build_module, metadata["module"], num_classes=num_classes)
    check_fit(build(device="meta"), weights, origin=origin)
    return build()


def check_class_names(names: Sequence[str], count: int | None) -> None:
    """Raise ValueError if there is another number of names than of classes."""
    if count is not None and len(names) != count:
        raise ValueError(f"{len(names)} class names for a model of {count} classes")


def open_file(path: Path, weights: StateDict, *, num_heads: int | None) -> ForeignModel:
    """Build the plain vision transformer that a file's weights belong to.

    Args:
        path: The file.
        weights: Its weights with our names.
        num_heads: See `vit.load_timm`.

    Raises:
        ValueError: They belong to another kind of network, or the number of heads is needed.
    """
    num_heads = find_num_heads(weights, num_heads, origin=str(path))
    architecture = infer_architecture(weights, origin=str(path), num_heads=num_heads)
    return ForeignModel(_build(architecture, weights, origin=str(path)))


def load_into(model: nn.Module, path: Path) -> ForeignModel:
    """Load a file's weights into a module, without the prefix that a trainer put before their names.

    Raises:
        ValueError: The weights belong to another model.
    """
    weights = read_state_dict(path)
    first = next(iter(model.state_dict()))
    prefixes = [name.removesuffix(first) for name in weights if name.endswith(first)]
    if prefixes:
        start = min(prefixes, key=len)
        weights = {
            name.removeprefix(start): tensor
            for name, tensor in weights.items()
            if name.startswith(start)
        }
    check_fit(model, weights, origin=str(path))
    model.load_state_dict(weights)
    return ForeignModel(model)


def open_folder(source: str, *, pretrained: bool) -> ForeignModel:
    """Open a name in timm, or a folder of timm or Hugging Face.

    A folder of Hugging Face becomes a VisionTransformer of this project where that computes the same.
    Otherwise its library opens it.

    Raises:
        ValueError: The model is unknown or can't be loaded, or `transformers` is missing.
        OSError: A file is missing.
    """
    folder = Path(source.removeprefix("local-dir:"))
    if not is_huggingface(folder):
        # timm takes seconds to import
        from vit.model.timm_weights import create_timm

        module = create_timm(source, pretrained=pretrained)
        is_multilabel = folder.is_dir() and _read_problem(folder) == _MULTILABEL
        return ForeignModel(module, is_multilabel=is_multilabel)

    config = read_json(folder / "config.json")
    is_classifier = "ForImageClassification" in str(config.get("architectures"))
    if config["model_type"] in MODEL_TYPES:
        weights, architecture, preprocess = read_huggingface(folder)
        if architecture["num_classes"] or not is_classifier:
            ours = _build(architecture, weights, origin=source)
            ours.set_input_size(tuple(preprocess["image_size"]))
            names = config.get("id2label") or {}
            class_names = tuple(
                str(names.get(str(index)) or f"class {index}") for index in range(ours.num_classes)
            )
            is_multilabel = _read_problem(folder) == _MULTILABEL
            return ForeignModel(ours, class_names, preprocess, is_multilabel)
    try:
        from transformers import AutoModelForImageClassification
    except ImportError as error:
        raise ValueError(
            f"{source} holds a {config['model_type']}, which needs Hugging Face's library: pip install"
            " transformers"
        ) from error
    # It loads weights only, and runs no code of the folder.
    return ForeignModel(AutoModelForImageClassification.from_pretrained(folder))


def _read_problem(folder: Path) -> object:
    config = read_json(folder / "config.json")
    return config.get("problem_type") if isinstance(config, dict) else None


def _build(architecture: Architecture, weights: StateDict, *, origin: str) -> VisionTransformer:
    return build_to_fit(architecture, weights, origin=origin, is_random=False)
