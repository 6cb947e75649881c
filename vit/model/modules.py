"""Modules and what they are built from: the description in a model file of this project, a file of
weights, a name in timm, or a folder of timm or Hugging Face."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vit.model.find_file import find_model
from vit.model.huggingface_weights import read_huggingface
from vit.model.model_file import ModelFile, StateDict
from vit.model.model_info import find_preprocess, name_classes, read_object, read_processor
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import (
    build_to_fit,
    check_fit,
    infer_architecture,
    read_weights,
    remove_decoder,
    remove_prefix,
)


class OpenedModel(NamedTuple):
    """A model on the CPU, and what only its folder tells about it: the name of each class, the
    values of the `Preprocess` that it was trained with, and if an image may have several labels."""

    module: nn.Module
    class_names: tuple[str, ...] | None = None
    preprocess: Mapping[str, Any] | None = None
    is_multilabel: bool = False


def load_timm(source: nn.Module | str | Path) -> VisionTransformer:
    """Load timm's weights into a VisionTransformer of vit.

    Args:
        source: A module of timm, timm:NAME, a folder with the config.json
            of timm or of a Hugging Face ViT, a model file or run of vit, or a
            file of weights with timm's names (safetensors or torch), which
            has the attention heads of the published ViTs of its width.

    Returns:
        The model in evaluation mode, which computes timm's logits. A module
        of this project is returned as it is.

    Raises:
        ValueError: VisionTransformer can't compute this model, the file is
            damaged, or no published ViT has its width.
        OSError: The weights can't be downloaded or read.

    Example:
        >>> model = vit.load_timm("timm:vit_small_patch16_224")
        >>> model(images)  # normalised [B, 3, 224, 224] → [B, 1000]
    """
    if isinstance(source, nn.Module):
        return _convert(source)
    return _convert(_open(source).module)


def load_pretrained(
    source: str | Path,
    *,
    num_classes: int,
    class_names: Sequence[str] = (),
    drop_path_rate: float = 0.0,
) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """Load a pretrained model for training, from any source of `load_timm`: one of this project if
    that computes the same, otherwise timm's own module.

    Args:
        num_classes: Number of classes that the model is trained on.
        class_names: Their names. The head keeps its rows of classes of these names; without names
            it is new.

    Returns:
        The model, and the values of the `Preprocess` that its weights were trained with, or None
        if the file doesn't have them.
    """
    opened = _open(source)
    model: Any = opened.module
    preprocess = opened.preprocess
    try:
        loaded = _convert(model)
    except ValueError:
        # timm takes seconds to import
        from vit.model.timm_weights import rebuild_timm

        model = rebuild_timm(model, drop_path_rate=drop_path_rate)
    else:
        model = VisionTransformer(**loaded.architecture | {"drop_path_rate": drop_path_rate})
        model.load_state_dict(loaded.state_dict())
        if preprocess is not None:
            model.set_input_size(tuple(preprocess["image_size"]))
    known = opened.class_names or ()
    if not class_names or tuple(class_names) != known:
        old = model.get_classifier()
        model.reset_classifier(num_classes)
        new = model.get_classifier()
        kept = [name for name in class_names if name in known]
        for name in kept:
            for part, values in old.state_dict().items():
                new.state_dict()[part][class_names.index(name)] = values[known.index(name)]
        if kept:
            warnings.warn(
                f"the head keeps {len(kept)} of {num_classes} classes, which {source} has by name;"
                " the others start anew",
                stacklevel=2,
            )
    return model.eval(), preprocess


def _convert(module: nn.Module) -> VisionTransformer:
    """Return a module as one of this project, with a copy of its weights; one of this project as it
    is."""
    if isinstance(module, VisionTransformer):
        return module
    # timm takes seconds to import
    from vit.model.timm_weights import describe_timm

    architecture = describe_timm(module)
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in module.state_dict().items()}
    return build_to_fit(architecture, weights, origin="the timm model")


def _open(source: str | Path) -> OpenedModel:
    path = find_model(source)
    if isinstance(path, str) or path.is_dir():
        return open_folder(path)
    content = read_weights(path)
    module = build(content, origin=str(path))
    values = content.metadata
    return OpenedModel(module, tuple(values.get("class_names", ())), values.get("preprocess"))


def open_folder(source: str | Path) -> OpenedModel:
    """Open timm:NAME, or a folder of timm or of Hugging Face's ViT, which becomes a
    VisionTransformer of this project."""
    folder = Path(str(source).removeprefix("timm:"))
    config = read_object(folder / "config.json")
    is_multilabel = config.get("problem_type") == "multi_label_classification"
    kind = config.get("model_type")
    if kind is None:
        # timm takes seconds to import
        from vit.model.timm_weights import create_timm

        module = create_timm(str(folder))
        preprocess = find_preprocess(module)
        return OpenedModel(module, preprocess=preprocess, is_multilabel=is_multilabel)
    if kind != "vit":
        raise ValueError(
            f"{folder} holds a {kind}, not a ViT of Hugging Face; take timm:NAME, such as"
            " timm:vit_small_patch16_dinov3.lvd1689m, or pass its module from Python"
        )
    weights, architecture = read_huggingface(folder, config)
    ours = build_to_fit(architecture, weights, origin=str(folder))
    preprocess = read_processor(folder / "preprocessor_config.json", architecture["img_size"])
    ours.set_input_size(tuple(preprocess["image_size"]))
    names = {int(place): name for place, name in (config.get("id2label") or {}).items()}
    class_names = name_classes(names, ours.num_classes)
    return OpenedModel(ours, class_names, preprocess, is_multilabel)


def describe(module: nn.Module, *, num_classes: int) -> dict[str, dict[str, Any]]:
    """Describe a module for a model file, from which `build` builds it again."""
    if isinstance(module, VisionTransformer):
        return {"architecture": module.architecture}
    # timm takes seconds to import
    from vit.model.timm_weights import describe_module

    return {"module": describe_module(module, num_classes=num_classes)}


def build(content: ModelFile, *, origin: str) -> nn.Module:
    """Build the module that a file's weights belong to, and load them, after a check that they fit
    its description. Without one, it is a plain vision transformer."""
    metadata, weights = content.metadata, content.weights
    if "module" in metadata:
        # timm takes seconds to import
        from vit.model.timm_weights import build_module

        count = len(metadata["class_names"])
        create = partial(build_module, metadata["module"], num_classes=count)
        check_fit(create(device="meta"), weights, origin=origin)
        module = create()
        module.load_state_dict(weights)
        return module
    if metadata:
        architecture = metadata["architecture"]
        check_class_names(metadata["class_names"], architecture["num_classes"])
    else:
        weights = remove_prefix(weights, origin=origin)
        # DINOv3's name of its registers
        if "storage_tokens" in weights:
            # timm takes seconds to import
            from vit.model.timm_weights import build_dinov3

            return build_dinov3(weights, origin=origin)
        weights = remove_decoder(weights, origin=origin)
        architecture = infer_architecture(weights, origin=origin)
    return build_to_fit(architecture, weights, origin=origin)


def load_into(model: nn.Module, weights: StateDict, *, origin: str) -> None:
    """Load a file's weights into a module, without a trainer's prefix before their names. Raises
    ValueError for those of another model."""
    weights = remove_prefix(weights, next(iter(model.state_dict())), origin=origin)
    check_fit(model, weights, origin=origin)
    model.load_state_dict(weights)


def check_class_names(names: Sequence[str], count: int | None) -> None:
    """Raise ValueError if there is another number of names than of classes."""
    if count is not None and len(names) != count:
        raise ValueError(f"{len(names)} class names for a model of {count} classes")
