"""From images to logits and pooled features, for models of this project, timm, torchvision and
Hugging Face.
"""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.model_info import count_classes
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import build_to_fit
from vit.runtime.tensors import Images

# A readout is a number of blocks and a pooling: "token" is the class token, "avg" the mean of the
# patches.
Readout = tuple[int, str]
# The one readout of another library's model: the input of its last linear layer.
PRE_LOGITS: Readout = (0, "pre_logits")


def compute_logits(model: nn.Module, images: Images) -> Float[Tensor, "_ classes"]:
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
        return at_least_float32(net.forward_head(features))


def _forward_features(net: Any, images: Tensor) -> Any:
    """Compute the input of a model's head, in the type of its weights."""
    num_out_tokens = getattr(net, "num_out_tokens", None)
    if num_out_tokens is None:
        features = net.forward_features(images)
    else:  # The last block of our models can skip the other tokens.
        features = net.forward_features(images, num_out_tokens=num_out_tokens)
    # a model with weights in half precision has a head in half precision
    dtype = next(net.parameters()).dtype
    if isinstance(features, Tensor):
        return features.to(torch.promote_types(features.dtype, dtype))
    return features


def _call(model: nn.Module, images: Tensor) -> Any:
    """Call a model of any library. Some take images by keyword only."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # compiled code
        parameters = inspect.signature(model.forward).parameters
    if "spatial_shapes" in parameters:
        raise ValueError(
            f"{type(model).__name__} takes patches with their spatial_shapes, not images; wrap it "
            "in a module that turns images into patches"
        )
    first = next(iter(parameters.values()), None)
    if first is not None and first.kind is inspect.Parameter.KEYWORD_ONLY:
        return model(**{first.name: images})
    # Hugging Face calls the images pixel_values.
    if "pixel_values" in parameters or (first is not None and first.kind is first.VAR_KEYWORD):
        return model(pixel_values=images)
    return model(images)


def _find_logits(model: nn.Module, output: Any) -> Float[Tensor, "_ classes"]:
    """Find the logits in the output of a forward pass."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    output = getattr(output, "logits", output)
    candidates = output if isinstance(output, tuple | list) else [output]
    matrices = [each for each in candidates if isinstance(each, Tensor) and each.ndim == 2]
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
    model: nn.Module, images: Images
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
        logits = net.forward_head(tokens)
        if hasattr(net, "num_out_tokens"):
            features = net.pool(tokens, net.global_pool)
        else:
            features = net.forward_head(tokens, pre_logits=True)
    return logits, features.flatten(1)


def list_readouts(model: nn.Module) -> list[Readout]:
    """List the readouts of `compute_block_features` in its order, first block first."""
    if not isinstance(model, VisionTransformer):
        return [PRE_LOGITS]
    poolings = ["avg"] if model.cls_token is None else ["token", "avg"]
    return [(depth, pool) for depth in range(1, len(model.blocks) + 1) for pool in poolings]


def compute_block_features(model: nn.Module, images: Images) -> Float[Tensor, "B R D"]:
    """Compute the features of images at each of the model's R readouts, float32.

    The head would read them if the model ended at that block. They are normed like the input of
    the head.

    Args:
        model: Model in evaluation mode. A model of another library has one readout: the input of
            its last linear layer.
        images: Images, normalised for the model.

    Raises:
        ValueError: A model of another library has no last linear layer that reads [B, D].
    """
    if not isinstance(model, VisionTransformer):
        return _compute_pre_logits(model, images)[:, None]
    poolings = [pool for depth, pool in list_readouts(model) if depth == 1]
    features = []
    for tokens in model.forward_intermediates(images):
        normed = model.norm(tokens)
        # See `compute_logits`: pooling and head run in float32.
        with torch.autocast(images.device.type, enabled=False):
            normed = at_least_float32(normed)
            features += [model.pool(normed, pool) for pool in poolings]
    return torch.stack(features, dim=1)


@torch.no_grad()
def cut_model(
    model: VisionTransformer,
    readout: Readout,
    *,
    weight: Float[Tensor, "classes D"],
    bias: Float[Tensor, " classes"],
) -> VisionTransformer:
    """Build a model that ends at a readout, with a linear layer as its head.

    Its logits are those of this layer for the features of `compute_block_features`.

    Args:
        model: Model whose first blocks and final norm are copied.
        readout: Number of blocks to keep, and the pooling.
        weight, bias: Parameters of the head.
    """
    depth, global_pool = readout
    values = {"depth": depth, "global_pool": global_pool, "num_classes": len(weight)}
    left_out = tuple(f"blocks.{layer}." for layer in range(depth, len(model.blocks)))
    weights = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if not name.startswith(("head.", *left_out))
    }
    device = model.pos_embed.device
    weights |= {"head.weight": weight.to(device), "head.bias": bias.to(device)}
    cut = build_to_fit(model.architecture | values, weights, origin="the model")
    return cut.to(device).train(model.training)


def count_channels(model: nn.Module) -> int:
    """Return the width D of the features. See `compute_block_features` for errors."""
    if isinstance(model, VisionTransformer):
        return model.embed_dim
    return _find_classifier(model).in_features


def _find_classifier(model: nn.Module) -> nn.Linear:
    """Find the last linear layer of another library's model, which computes its logits."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    num_classes = count_classes(model)
    if not linear or num_classes not in (None, linear[-1].out_features):
        raise ValueError(
            f"{type(model).__name__} has no last linear layer whose input could be its features; "
            "take a vision transformer of vit or timm"
        )
    return linear[-1]


def _compute_pre_logits(model: nn.Module, images: Tensor) -> Float[Tensor, "B D"]:
    inputs: list[Tensor] = []

    def keep_input(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(arguments[0])

    hook = _find_classifier(model).register_forward_pre_hook(keep_input)
    try:
        model(images)
    finally:
        hook.remove()
    if not inputs or inputs[-1].ndim != 2:
        raise ValueError(
            f"the last linear layer of {type(model).__name__} doesn't read one feature vector an "
            "image; take a vision transformer of vit or timm"
        )
    return at_least_float32(inputs[-1])
