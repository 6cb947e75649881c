"""From images to logits, for models of this project, timm, torchvision and Hugging Face."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


def compute_logits(
    model: nn.Module, images: Float[Tensor, "B C height width"]
) -> Float[Tensor, "_ classes"]:
    """The model's logits, in float32 (float64 stays) under any autocast, also where a tuple, a
    dictionary or an output object holds them.

    A separate head (`forward_head`) runs in float32: logits rounded to bfloat16 tie, and ties
    change top-1 by tenths of a percent.

    Args:
        model: A classifier.
        images: Normalised, as the model takes them.

    Raises:
        ValueError: for a model that doesn't give [images, classes], and for one that takes patches
            in the place of images.
    """
    net: Any = model
    if not (hasattr(net, "forward_features") and hasattr(net, "forward_head")):
        return at_least_float32(_find_logits(net, _call(net, images)))

    num_out_tokens = getattr(net, "num_out_tokens", None)
    if num_out_tokens is None:
        features = net.forward_features(images)
    else:  # one of ours, whose last block can skip the other tokens
        features = net.forward_features(images, num_out_tokens=num_out_tokens)
    with torch.autocast(images.device.type, enabled=False):
        if isinstance(features, Tensor):
            features = at_least_float32(features)
        head_logits: Tensor = net.forward_head(features)
    return head_logits


def _call(model: nn.Module, images: Tensor) -> Any:
    """The forward pass of any library's model. Some take images by name alone, or after others."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # compiled code
        return model(images)
    if "spatial_shapes" in parameters:
        raise ValueError(
            f"{type(model).__name__} takes patches with their spatial_shapes, not images; wrap it "
            "in a module that makes them of images"
        )

    kinds = {parameter.kind for parameter in parameters.values()}
    positional = {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    # the name in Hugging Face
    if "pixel_values" in parameters or kinds == {inspect.Parameter.VAR_KEYWORD}:
        return model(pixel_values=images)
    if kinds.isdisjoint(positional):
        return model(**{next(iter(parameters)): images})
    return model(images)


def _find_logits(model: nn.Module, output: Any) -> Float[Tensor, "_ classes"]:
    """The logits among what a forward pass gives."""
    if isinstance(output, Mapping):
        candidates = [output.get("logits")]
    elif isinstance(output, tuple | list) and not hasattr(output, "logits"):
        candidates = list(output)
    else:
        candidates = [getattr(output, "logits", output)]
    matrices = [
        candidate
        for candidate in candidates
        if isinstance(candidate, Tensor) and candidate.ndim == 2
    ]
    if len(matrices) == 1:
        return matrices[0]
    name = type(model).__name__
    if matrices:
        raise ValueError(
            f"{name} gives {len(matrices)} tensors that may be logits [images, classes]; let it give "
            'one, or a dictionary with "logits"'
        )
    raise ValueError(f"{name} gives no logits [images, classes]; take it with a classifier")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision as float32; others as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def has_features(model: nn.Module) -> bool:
    """Whether `compute_logits_and_features` can take a model: one of ours, or of timm."""
    net: Any = model
    if hasattr(net, "num_out_tokens"):
        return True
    head = getattr(net, "forward_head", None)
    return head is not None and "pre_logits" in inspect.signature(head).parameters


def count_features(model: nn.Module) -> int:
    """The width D of the features of `compute_logits_and_features`."""
    net: Any = model
    # timm's name for them, which includes what a head adds
    return int(
        getattr(net, "head_hidden_size", None) or getattr(net, "num_features", net.embed_dim)
    )


def compute_logits_and_features(
    model: nn.Module, images: Float[Tensor, "B C height width"]
) -> tuple[Float[Tensor, "B classes"], Float[Tensor, "B D"]]:
    """The logits of `compute_logits`, to the last bit, and the pooled features that the head reads,
    from one forward pass.

    Args:
        model: For which `has_features` is true.
        images: Normalised, as the model takes them.
    """
    net: Any = model
    is_ours = hasattr(net, "num_out_tokens")
    if is_ours:
        tokens = net.forward_features(images, num_out_tokens=net.num_out_tokens)
    else:
        tokens = net.forward_features(images)
    with torch.autocast(images.device.type, enabled=False):
        tokens = at_least_float32(tokens)
        logits: Tensor = net.forward_head(tokens)
        if is_ours:
            features = net.pool(tokens, net.global_pool)
        else:
            features = net.forward_head(tokens, pre_logits=True)
    return logits, features.flatten(1)
