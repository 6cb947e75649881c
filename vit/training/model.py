"""Configuration → the model of a run: its weights random, loaded, or passed from Python."""

import torch
from torch import Tensor, nn

from vit.config import Config
from vit.data.preprocess import Preprocess
from vit.data.sources.python_objects import FROM_PYTHON
from vit.model.presets import PRESETS
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import as_pair, check_choice, first_line, resolve_image_sizes


def build_model(
    config: Config, *, num_classes: int, user_model: nn.Module | None = None
) -> tuple[nn.Module, Preprocess | None]:
    """The model of a run.

    Args:
        config: its `model` section; `train.seed` draws the weights that are not loaded.
        num_classes: of the data.
        user_model: passed from Python; taken as it is, if it fits.

    Returns:
        The model on the CPU (a user's where it is), and the preprocessing that loaded weights were
        trained with; None without any.

    Raises:
        ValueError: a model, preset, image or patch size that doesn't fit.
    """
    if user_model is not None:
        _check_user_model(config, user_model, num_classes=num_classes)
        return user_model, None
    if config.model.init == FROM_PYTHON:
        raise ValueError(
            "the model of this run was passed from Python; pass it to vit.train(model=…) again"
        )

    torch.manual_seed(config.train.seed)
    preprocess = None
    if config.model.init is None:
        model = _build_vision_transformer(config, num_classes=num_classes)
    else:
        # timm, which takes seconds to import
        from vit.model.timm_weights import load_pretrained

        model, values = load_pretrained(
            config.model.init,
            num_classes=num_classes,
            drop_path_rate=config.model.drop_path_rate,
        )
        preprocess = Preprocess.from_dict(values) if values else None
        patch_size = model.patch_embed.patch_size
        if "patch_size" in config.model.model_fields_set:
            patch_size = as_pair(config.model.patch_size, name="model.patch_size")
        _check_image_sizes(config, patch_size)
        model.set_input_size(config.data.size, patch_size)
    set_up_training(config, model)
    return model, preprocess


def set_up_training(config: Config, model: VisionTransformer) -> None:
    """What of a model is trained, and how. Raises ValueError for more blocks than there are."""
    if config.model.freeze != "none":
        model.freeze(config.model.freeze)
    model.patch_embed.dynamic_img_size = config.train.image_sizes is not None
    model.grad_checkpointing = config.train.grad_checkpointing


def _build_vision_transformer(config: Config, *, num_classes: int) -> VisionTransformer:
    preset = config.model.preset
    # keys of a preset that the configuration doesn't set are the preset's
    arguments = config.model.model_dump(
        exclude={"init", "preset", "probe", "freeze"}, exclude_unset=preset is not None
    )
    if preset is not None:
        check_choice(preset, PRESETS, name="model.preset")
        arguments = PRESETS[preset] | arguments
        _check_image_sizes(config, as_pair(arguments["patch_size"], name="model.patch_size"))
    arguments["img_size"] = config.data.size
    arguments["num_classes"] = num_classes
    return VisionTransformer(**arguments)


def _check_image_sizes(config: Config, patch_size: tuple[int, int]) -> None:
    """Raise ValueError where an image size of the run isn't a multiple of the patch."""
    resolve_image_sizes(
        config.train.image_sizes, image_size=config.data.image_size, patch_size=patch_size
    )


def _check_user_model(config: Config, model: nn.Module, *, num_classes: int) -> None:
    """Raise ValueError where the model does not map images of the size to logits of the classes."""
    name = type(model).__name__
    if config.train.patch_drop_rates and not hasattr(model, "patch_drop_rate"):
        raise ValueError(f"train.patch_drop_rates is for vit's own models, and {name} is not one")
    image_size = config.data.size
    images = torch.zeros(2, 3, *image_size, device=next(model.parameters()).device)
    was_training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(images)
    except Exception as error:  # modules answer images of another size with nearly any
        raise ValueError(
            f"{name} does not take images {list(images.shape)} ({first_line(error)}); "
            "set data.image_size to the size that it was built for"
        ) from error
    finally:
        model.train(was_training)

    shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != [2, num_classes]:
        raise ValueError(
            f"{name} makes {shape} of {list(images.shape)}, "
            f"not logits [2, {num_classes}] of the classes"
        )
