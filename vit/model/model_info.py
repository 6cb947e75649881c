"""Image size, normalisation and class names of a model of timm or Hugging Face."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from vit.runtime.arguments import as_pair
from vit.runtime.documents import read_json

_TURN = threading.RLock()
# Pillow's number → the filter
_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


@contextmanager
def keep_mode(model: object) -> Iterator[None]:
    """Restore the training or evaluation mode of every submodule at the end; for a name, do nothing.

    Threads take turns: otherwise one would restore what another had changed for a while.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    with _TURN:
        modes = [(module, module.training) for module in model.modules()]
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def unwrap_model(model: nn.Module) -> nn.Module:
    """Unwrap a model from torch.compile, DistributedDataParallel, DataParallel or peft, which keeps
    its adapters in the layers."""
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
    counts = (getattr(net, "num_classes", None), getattr(_config(net), "num_labels", None))
    return next((count for count in counts if isinstance(count, int)), None)


def find_class_names(model: nn.Module) -> tuple[str, ...]:
    """Return the class names of timm or Hugging Face (`config.id2label`), else "class 0" and so on;
    none without a classifier, or if the number of classes is unknown (`count_classes`)."""
    known: Mapping[int, str | None] = getattr(_config(model), "id2label", None) or {}
    if is_of(model, "timm"):
        known = _find_timm_names(model)
    return name_classes(known, count_classes(model) or 0)


def name_classes(known: Mapping[int, str | None], count: int) -> tuple[str, ...]:
    """Return the name of each class by its number, or "class N"."""
    return tuple(str(known.get(number) or f"class {number}") for number in range(count))


def find_problem_type(model: nn.Module) -> str | None:
    """Return Hugging Face's `problem_type` of a model's outputs, such as
    "multi_label_classification"; None if the model has none."""
    return getattr(_config(model), "problem_type", None)


def find_image_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the height and width of a model's images; None if it doesn't tell them."""
    net: Any = model
    size = getattr(getattr(net, "patch_embed", None), "img_size", None)
    if size is None and is_of(model, "timm"):
        from timm.data import resolve_model_data_config  # a second to import

        size = resolve_model_data_config(model)["input_size"][1:]
    if size is None:
        # Hugging Face's models for images and texts have a configuration for each.
        config = getattr(_config(net), "vision_config", _config(net))
        size = getattr(config, "image_size", getattr(net, "image_size", None))
    if size is None:
        return None
    return as_pair(size, name="image size")


def find_preprocess(model: nn.Module) -> Mapping[str, Any]:
    """Return the known values of the `Preprocess` that the weights were trained with.

    For timm it is its pretrained_cfg, for Hugging Face the preprocessor_config.json next to the
    weights or among the downloads (`read_processor`), for other models the image size alone.
    """
    image_size = find_image_size(model)
    unknown = f"of {type(model).__name__} unknown; give preprocess=Preprocess(…)"
    if image_size is None:
        raise ValueError(f"image size {unknown}")
    if is_of(model, "timm"):
        return _find_timm_preprocess(model, image_size)
    config = _config(model)
    if not is_of(model, "transformers") or config is None:
        return {"image_size": image_size}

    # The model comes from this library, so it is imported already.
    from transformers.utils.hub import cached_file

    path: str | None = None
    with suppress(OSError):
        if name := config.name_or_path:
            path = cached_file(name, "preprocessor_config.json", local_files_only=True)
    if path is None and config.model_type != "vit":
        raise ValueError(f"mean and std of the images {unknown}")
    return read_processor(Path(path or ""), image_size)


def read_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; empty if there is no file. Raises ValueError for another value."""
    values = {}
    if path.is_file():
        values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    return values


def read_processor(path: Path, image_size: tuple[int, int]) -> Mapping[str, Any]:
    """Return the values of a `Preprocess` for a preprocessor_config.json of Hugging Face, or the
    defaults of its ViTImageProcessor, and a model that has positions for `image_size`. Images that
    aren't square are cropped, where its processors change their aspect ratio."""
    values = read_object(path)
    found: dict[str, Any] = {
        "image_size": list(image_size),
        "mean": values.get("image_mean", [0.5, 0.5, 0.5]),
        "std": values.get("image_std", [0.5, 0.5, 0.5]),
        "interpolation": _INTERPOLATIONS.get(values.get("resample", 2), "bicubic"),
    }
    # DINOv2 has positions for 518 px, and takes crops of 224 px out of 256.
    crop, edge = (_read_side(values.get(name)) for name in ("crop_size", "size"))
    if values.get("do_center_crop") and crop and edge:
        found |= {"image_size": [crop, crop], "crop_pct": min(crop / edge, 1.0)}
    return found


def _read_side(size: Any) -> int | None:
    """Return the side of a size in a published form: a number, the shortest edge, or both sides."""
    if isinstance(size, dict):
        size = size.get("shortest_edge", size.get("height"))
    return size if isinstance(size, int) else None


def _find_timm_names(model: Any) -> Mapping[int, str | None]:
    """Return the names in a timm model's pretrained_cfg, or ImageNet's; none for other classes."""
    from timm.data import ImageNetInfo, infer_imagenet_subset  # a second to import

    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ()
    if not names and (subset := infer_imagenet_subset(model)):
        names = ImageNetInfo(subset).label_descriptions()
    return dict(enumerate(names)) if len(names) == model.num_classes else {}


def _find_timm_preprocess(model: nn.Module, image_size: tuple[int, int]) -> Mapping[str, Any]:
    from timm.data import resolve_model_data_config  # a second to import

    config = resolve_model_data_config(model)
    found = {name: config[name] for name in ("mean", "std", "crop_pct", "interpolation")}
    # timm cuts a part also from what it squashes; we crop at the centre then
    if config["crop_pct"] == 1 and config["crop_mode"] == "squash":
        found["resize_mode"] = "stretch"
    return found | {"image_size": image_size}


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def is_of(model: nn.Module, library: str) -> bool:
    """Return whether a library defines the model's class or one of its base classes."""
    return any(cls.__module__.partition(".")[0] == library for cls in type(model).__mro__)
