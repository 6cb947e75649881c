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
    """Compute the logits of a model, in float32 under any autocast (float64 stays).

    The model may return a tensor, a tuple, a dictionary or an output object. A separate head
    (`forward_head`) runs in float32: logits rounded to bfloat16 tie, and ties change top-1 by
    tenths of a percent.

    Args:
        model: Classifier.
        images: Images, normalised for the model.

    Raises:
        ValueError: The model doesn't return [images, classes], or it takes patches instead of
            images.
    """
    net: Any = model
    if not (hasattr(net, "forward_features") and hasattr(net, "forward_head")):
        return at_least_float32(_find_logits(net, _call(net, images)))

    features = _forward_features(net, images)
    with torch.autocast(images.device.type, enabled=False):
        head_logits: Tensor = net.forward_head(features)
    return head_logits


def _forward_features(net: Any, images: Tensor) -> Any:
    """Compute the input of a model's head, in float32."""
    if getattr(net, "num_out_tokens", None) is None:
        features = net.forward_features(images)
    else:  # The last block of our models can skip the other tokens.
        features = net.forward_features(images, num_out_tokens=net.num_out_tokens)
    return at_least_float32(features) if isinstance(features, Tensor) else features


def _call(model: nn.Module, images: Tensor) -> Any:
    """Call a model of any library. Some take images by keyword only."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # compiled code
        return model(images)
    if "spatial_shapes" in parameters:
        raise ValueError(
            f"{type(model).__name__} takes patches with their spatial_shapes, not images; wrap it "
            "in a module that turns images into patches"
        )

    kinds = {parameter.kind for parameter in parameters.values()}
    positional = {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    # Hugging Face calls the images pixel_values.
    if "pixel_values" in parameters or kinds == {inspect.Parameter.VAR_KEYWORD}:
        return model(pixel_values=images)
    if kinds.isdisjoint(positional):
        return model(**{next(iter(parameters)): images})
    return model(images)


def _find_logits(model: nn.Module, output: Any) -> Float[Tensor, "_ classes"]:
    """Find the logits in the output of a forward pass."""
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
            f"{name} returns {len(matrices)} tensors that may be logits [images, classes]; let it "
            'return one, or a dictionary with "logits"'
        )
    raise ValueError(f"{name} returns no logits [images, classes]; use a model with a classifier")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, and leave other tensors as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def has_features(model: nn.Module) -> bool:
    """Tell if `compute_logits_and_features` supports a model. Ours and timm's are supported."""
    net: Any = model
    if hasattr(net, "num_out_tokens"):
        return True
    head = getattr(net, "forward_head", None)
    return head is not None and "pre_logits" in inspect.signature(head).parameters


def count_features(model: nn.Module) -> int:
    """Return the width D of the features of `compute_logits_and_features`."""
    net: Any = model
    # timm's name for this width, which includes layers of the head.
    return int(
        getattr(net, "head_hidden_size", None) or getattr(net, "num_features", net.embed_dim)
    )


def compute_logits_and_features(
    model: nn.Module, images: Float[Tensor, "B C height width"]
) -> tuple[Float[Tensor, "B classes"], Float[Tensor, "B D"]]:
    """Compute logits and the pooled features that the head reads, in one forward pass.

    The logits equal those of `compute_logits` to the last bit.

    Args:
        model: Model for which `has_features` is true.
        images: Images, normalised for the model.
    """
    net: Any = model
    tokens = _forward_features(net, images)
    with torch.autocast(images.device.type, enabled=False):
        logits: Tensor = net.forward_head(tokens)
        if hasattr(net, "num_out_tokens"):
            features = net.pool(tokens, net.global_pool)
        else:
            features = net.forward_head(tokens, pre_logits=True)
    return logits, features.flatten(1)
