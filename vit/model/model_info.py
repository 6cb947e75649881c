"""Image size, normalisation and class names of a model of timm, torchvision or Hugging Face."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# `model_type` of a Hugging Face model for images and texts → its image processor.
_PROCESSORS = {
    "clip": "CLIPImageProcessor",
    "metaclip_2": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
}

# timm's names → ours, for modes that show the whole image
_RESIZE_MODES = {"squash": "stretch", "border": "pad"}


@contextmanager
def keep_mode(model: object) -> Iterator[None]:
    """Restore the training or evaluation mode of every submodule at the end.

    Args:
        model: Module, or another object, which is left alone.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


def unwrap_model(model: nn.Module) -> nn.Module:
    """Unwrap a model from torch.compile, DistributedDataParallel, DataParallel or peft.

    The inner model computes the same: peft keeps its adapters in the layers.
    """
    net: Any = model
    while True:
        if isinstance(net, DataParallel | DistributedDataParallel):
            net = net.module
        elif hasattr(net, "_orig_mod"):  # torch.compile's name for the inner model
            net = net._orig_mod
        elif hasattr(net, "get_base_model"):  # peft's models have this method
            net = net.get_base_model()
        else:
            return cast("nn.Module", net)


def count_classes(model: nn.Module) -> int | None:
    """Return the number of logits, or None if it is unknown."""
    net: Any = model
    num_labels = None
    # earlier versions of transformers raise a TypeError where `id2label` is null
    with suppress(TypeError):
        num_labels = getattr(getattr(net, "config", None), "num_labels", None)
    counts = [
        getattr(net, "num_classes", None),
        num_labels,
        # Hugging Face's classifiers without `id2label`
        getattr(getattr(net, "classifier", None), "out_features", None),
    ]
    return next((count for count in counts if isinstance(count, int)), None)


def find_class_names(model: nn.Module) -> tuple[str, ...]:
    """Return the class names of timm, torchvision or Hugging Face (`config.id2label`).

    Other models get "class 0" and so on. There are none without a classifier, or if the number of
    classes is unknown (`count_classes`).
    """
    net: Any = model
    known: Mapping[int, str | None] = {}
    match _find_library(model):
        case "timm":
            known = _find_timm_names(net)
        case "torchvision":
            if weights := _find_torchvision_weights(net):
                known = dict(enumerate(weights.meta["categories"]))
        case "transformers":
            known = getattr(getattr(net, "config", None), "id2label", None) or {}
    return name_classes(known, count_classes(model) or 0)


def name_classes(known: Mapping[int, str | None], count: int) -> tuple[str, ...]:
    """Return the name of each class by its number, "class N" where it has none."""
    return tuple(str(known.get(number) or f"class {number}") for number in range(count))


def find_problem_type(model: nn.Module) -> str | None:
    """Return Hugging Face's `problem_type` of a model's outputs, such as
    "multi_label_classification"; None if the model has none."""
    return getattr(getattr(model, "config", None), "problem_type", None)


def find_preprocess(model: nn.Module) -> Mapping[str, Any]:
    """Return the known values of the `Preprocess` that the weights were trained with.

    - timm: its pretrained_cfg.
    - torchvision: the transforms of its weights for this architecture and image size, by default
      IMAGENET1K_V1.
    - Hugging Face: preprocessor_config.json next to the weights or among the downloads, else the
      defaults of the image processor of CLIP, MetaCLIP 2 or SigLIP, else of ViTImageProcessor.
      Hugging Face changes the aspect ratio of images that aren't square; we crop them.
    - other models: the image size alone.

    Raises:
        ValueError: The image size is unknown, or another model for images and texts has no
            preprocessor_config.json.
    """
    library = _find_library(model)
    if library == "timm":
        return _find_timm_preprocess(model)
    if library == "torchvision" and (weights := _find_torchvision_weights(model)):
        transform = weights.transforms()
        return {
            "image_size": transform.crop_size * 2,
            "crop_pct": transform.crop_size[0] / transform.resize_size[0],
            "mean": transform.mean,
            "std": transform.std,
            "interpolation": transform.interpolation.value,
        }

    # Hugging Face: a model for images and texts has a configuration for each.
    config = getattr(model, "config", None)
    tower = getattr(config, "vision_config", None)
    size: Any = getattr(tower or config, "image_size", getattr(model, "image_size", None))
    size = getattr(getattr(model, "patch_embed", None), "img_size", size)
    if size is None:
        raise ValueError(
            f"image size of {type(model).__name__} unknown; give preprocess=Preprocess(…)"
        )
    image_size = [size, size] if isinstance(size, int) else list(size)
    if library != "transformers" or config is None:
        return {"image_size": image_size}

    processor = _find_processor(config)
    if processor is None:
        raise ValueError(
            f"mean and std of the images of {type(model).__name__} unknown; "
            "give preprocess=Preprocess(…)"
        )
    from PIL.Image import Resampling

    return {
        "image_size": image_size,
        "mean": processor.get("image_mean", [0.5, 0.5, 0.5]),
        "std": processor.get("image_std", [0.5, 0.5, 0.5]),
        "interpolation": Resampling(processor.get("resample", Resampling.BILINEAR)).name.lower(),
    }


def _find_timm_names(model: Any) -> Mapping[int, str]:
    """Return the names in a timm model's pretrained_cfg, or ImageNet's; none for other classes."""
    from timm.data import ImageNetInfo, infer_imagenet_subset  # a second to import

    config = getattr(model, "pretrained_cfg", None)
    if not config or not model.num_classes:
        return {}
    if len(config.get("label_names") or ()) == model.num_classes:
        return dict(enumerate(config["label_names"]))
    subset = infer_imagenet_subset(model)
    if not subset:
        return {}
    info = ImageNetInfo(subset)
    return {number: info.index_to_description(number) for number in range(model.num_classes)}


def _find_timm_preprocess(model: nn.Module) -> Mapping[str, Any]:
    from timm.data import resolve_model_data_config  # a second to import

    config = resolve_model_data_config(model)
    # timm cuts a part also from what it squashes or pads
    resize_mode = _RESIZE_MODES.get(config["crop_mode"]) if config["crop_pct"] == 1 else None
    if config["crop_mode"] != "center" and resize_mode is None:
        warnings.warn(
            f"these weights were trained with crop_mode {config['crop_mode']!r}; "
            "here images keep their aspect ratio and are cropped at the centre",
            stacklevel=2,
        )
    # The model may have been built for another size.
    img_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return {
        "image_size": list(img_size or config["input_size"][1:]),
        "mean": list(config["mean"]),
        "std": list(config["std"]),
        "crop_pct": config["crop_pct"],
        "interpolation": config["interpolation"],
    } | ({} if resize_mode is None else {"resize_mode": resize_mode})


def _find_processor(config: Any) -> Mapping[str, Any] | None:
    """Return the values of a Hugging Face model's image processor.

    They are empty for the defaults of ViTImageProcessor, and None if they are unknown.
    """
    import transformers  # The model comes from it, so it is imported already.
    from transformers.utils.hub import cached_file

    name = config.name_or_path
    path = None
    if name:
        with suppress(OSError):
            path = cached_file(name, "preprocessor_config.json", local_files_only=True)
    family = config.model_type.removesuffix("_vision_model")
    values: Mapping[str, Any] = {}
    if path:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    elif family in _PROCESSORS:
        values = getattr(transformers, _PROCESSORS[family])().to_dict()
    elif hasattr(config, "vision_config"):
        return None  # The values of other models for images and texts are unknown.
    return values


def _find_library(model: nn.Module) -> str | None:
    """Return the library that defines the model's class or one of its base classes."""
    modules = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    return next((name for name in modules if name in ("timm", "torchvision", "transformers")), None)


def _find_torchvision_weights(model: Any) -> Any:
    """Return torchvision's first weights with this architecture, image size and class count; None
    if there are none."""
    from torchvision.models import get_model_weights, list_models

    letter = {768: "b", 1024: "l", 1280: "h"}.get(getattr(model, "hidden_dim", 0))
    name = f"vit_{letter}_{getattr(model, 'patch_size', 0)}"
    if name not in list_models():
        return None
    for weights in get_model_weights(name):
        sizes = (weights.transforms().crop_size, len(weights.meta["categories"]))
        if sizes == ([model.image_size], model.num_classes):
            return weights
    return None
