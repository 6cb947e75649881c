"""Configuration → the model of a run: its weights random, loaded, or passed from Python."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vit.config import Config
from vit.data.preprocess import Preprocess
from vit.data.sources.python_objects import FROM_PYTHON
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import as_pair, first_line

# Keys of the section `model` that are about the training of any model.
_TRAINING_KEYS = {"init", "probe", "freeze"}


def build_model(
    config: Config, *, class_names: Sequence[str]
) -> tuple[nn.Module, Preprocess | None]:
    """Build the model of a run on the CPU, with random weights by `train.seed` or those of
    `model.init`. Returns it and the preprocessing that loaded weights were trained with."""
    torch.manual_seed(config.train.seed)
    preprocess: Preprocess | None = None
    model: nn.Module
    if config.model.init is not None:
        model, preprocess = _load_model(config, config.model.init, class_names)
    else:
        arguments = config.model.model_dump(exclude=_TRAINING_KEYS)
        model = VisionTransformer(config.data.size, num_classes=len(class_names), **arguments)
    set_up_training(config, model)
    return model, preprocess


def _load_model(
    config: Config, init: str, class_names: Sequence[str]
) -> tuple[nn.Module, Preprocess | None]:
    """Load weights, and give the model the image size of the configuration."""
    # timm takes seconds to import
    from vit.model.modules import load_pretrained

    if init == FROM_PYTHON:
        raise ValueError(
            "the model of this run was passed from Python; pass it to vit.train(model=…) again"
        )
    model: Any
    model, values = load_pretrained(
        init,
        num_classes=len(class_names),
        # a probe replaces the head
        class_names=() if config.model.probe else class_names,
        drop_path_rate=config.model.drop_path_rate,
    )
    # defaults aren't the user's choice
    given = config.model.model_dump(exclude_unset=True, exclude={*_TRAINING_KEYS, "drop_path_rate"})
    if "patch_size" in given:
        given["patch_size"] = as_pair(given["patch_size"], name="model.patch_size")
    # timm's own modules don't say theirs
    architecture = getattr(model, "architecture", {})
    for key, value in given.items():
        held = architecture.get(key, "their own")
        if value != held:
            raise ValueError(f"model.{key} {value}: the weights of --init have {held}")
    # convolutional models take any size
    if config.data.image_size is not None and hasattr(model, "set_input_size"):
        model.set_input_size(config.data.size)
    return model, Preprocess.from_dict(values) if values else None


def set_up_training(config: Config, model: nn.Module) -> None:
    """Freeze what the configuration freezes. Raises ValueError for blocks that there aren't."""
    part = config.model.freeze
    net: Any = model
    if isinstance(model, VisionTransformer):
        model.num_frozen_blocks = 0
        if part != "none":
            model.freeze(part)
        model.grad_checkpointing = config.train.grad_checkpointing
        return
    if config.train.grad_checkpointing:
        net.set_grad_checkpointing()
    if part == "backbone":
        model.requires_grad_(False)
        net.get_classifier().requires_grad_(True)
    elif part != "none":
        raise ValueError(
            f"model.freeze={part} is for vit's own models, and {type(model).__name__} is not one; take"
            " backbone or none"
        )


def check_model(config: Config, model: nn.Module, *, num_classes: int) -> None:
    """Raise ValueError where a model doesn't map images of the configured size to logits of the
    classes."""
    name = type(model).__name__
    if config.train.patch_drop_rates and not hasattr(model, "patch_drop_rate"):
        raise ValueError(
            f"train.patch_drop_rates is for vit's own models, and {name} is not one; set it to null"
        )
    images = torch.zeros(2, 3, *config.data.size, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            shape = list(model.eval()(images).shape)
    except Exception as error:  # a module may raise anything for images of another size
        raise ValueError(
            f"{name} does not take images {list(images.shape)} ({first_line(error)}); "
            "set data.image_size to the size that it was built for"
        ) from error
    if shape != [2, num_classes]:
        raise ValueError(
            f"{name} makes {shape} of images {list(images.shape)}, not logits [2, {num_classes}]"
        )
