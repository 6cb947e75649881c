"""What a model says about itself: the size and normalisation of its images, and the names of its classes."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

# `model_type` of a model of images and texts in Hugging Face → the image processor whose defaults it was trained with
_PROCESSORS = {"clip": "CLIPImageProcessor", "metaclip_2": "CLIPImageProcessor", "siglip": "SiglipImageProcessor"}


def count_classes(model: nn.Module) -> int | None:
    """The number of logits; None where the model doesn't say."""
    count = getattr(model, "num_classes", getattr(getattr(model, "config", None), "num_labels", None))
    return count if isinstance(count, int) else None


def find_class_names(model: nn.Module) -> tuple[str, ...]:
    """timm's, torchvision's or Hugging Face's (`config.id2label`) names of the classes, otherwise "class 0" and so on.
    Raises ValueError for a model that doesn't tell its number of classes."""
    count, names, library = count_classes(model), None, _find_library(model)
    if count is None:
        raise ValueError(f"{type(model).__name__} doesn't tell its number of classes; give class_names")
    if library == "timm":
        from vit.model import timm_weights

        names = timm_weights.find_class_names(model)
    elif library == "torchvision" and (weights := _find_torchvision_weights(model)):
        names = tuple(weights.meta["categories"])
    elif library == "transformers":
        id2label: Any = model.config.id2label  # type: ignore[union-attr]
        names = tuple(id2label[index] for index in range(count))
    return names or tuple(f"class {index}" for index in range(count))


def find_preprocess(model: nn.Module) -> dict[str, Any]:
    """The values of the `Preprocess` that the weights were trained with, as far as the model tells.

    timm: its pretrained_cfg. torchvision: the transforms of its weights for this architecture and image size (of
    several, IMAGENET1K_V1). Hugging Face: preprocessor_config.json beside the weights or among the downloads, else
    the defaults of its image processor for CLIP, MetaCLIP 2 and SigLIP, for others of ViTImageProcessor; it changes the
    aspect ratio of images that aren't square, we crop them. Others: the image size alone. Raises ValueError for a model
    that doesn't tell it, and for another model of images and texts without preprocessor_config.json.
    """
    library = _find_library(model)
    if library == "timm":
        from vit.model import timm_weights

        return timm_weights.find_preprocess(model)
    if library == "torchvision" and (weights := _find_torchvision_weights(model)):
        transform = weights.transforms()
        crop, interpolation = transform.crop_size, transform.interpolation.value
        geometry = {"image_size": crop * 2, "crop_pct": crop[0] / transform.resize_size[0]}
        return geometry | {"mean": transform.mean, "std": transform.std, "interpolation": interpolation}
    config = getattr(model, "config", None)
    tower = getattr(config, "vision_config", None)
    size: Any = getattr(tower or config, "image_size", getattr(model, "image_size", None))
    size = getattr(getattr(model, "patch_embed", None), "img_size", size)
    if size is None:
        raise ValueError(f"{type(model).__name__} doesn't tell its image size; give preprocess=Preprocess(…)")
    values = {"image_size": [size, size] if isinstance(size, int) else list(size)}
    if library != "transformers" or config is None:
        return values
    from PIL.Image import Resampling
    from transformers.utils.hub import cached_file

    name, path = config.name_or_path, None
    if name:
        with suppress(OSError):
            path = cached_file(name, "preprocessor_config.json", local_files_only=True)
    family = config.model_type.removesuffix("_vision_model")
    if path:
        processor = json.loads(Path(path).read_text(encoding="utf-8"))
    elif family in _PROCESSORS:
        import transformers

        processor = getattr(transformers, _PROCESSORS[family])().to_dict()
    elif tower:
        kind = type(model).__name__
        raise ValueError(f"{kind} doesn't tell the mean and std of its images; give preprocess=Preprocess(…)")
    else:
        processor = {}
    values |= {key: processor.get(f"image_{key}", [0.5, 0.5, 0.5]) for key in ("mean", "std")}
    interpolation = Resampling(processor.get("resample", Resampling.BILINEAR)).name.lower()
    return values | {"interpolation": interpolation}


def _find_library(model: nn.Module) -> str | None:
    """Where the model's class, or one that it derives from, is defined."""
    modules = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    return next((name for name in modules if name in ("timm", "torchvision", "transformers")), None)


def _find_torchvision_weights(model: Any) -> "WeightsEnum | None":
    """The first of torchvision's weights with this architecture, image size and number of classes."""
    from torchvision.models import get_model_weights, list_models

    letter = {768: "b", 1024: "l", 1280: "h"}.get(getattr(model, "hidden_dim", 0))
    name = f"vit_{letter}_{getattr(model, 'patch_size', 0)}"
    for weights in get_model_weights(name) if name in list_models() else ():
        if (weights.transforms().crop_size, len(weights.meta["categories"])) == ([model.image_size], model.num_classes):
            return weights
    return None
