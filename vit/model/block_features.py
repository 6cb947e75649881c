"""Pooled features of each block, from one forward pass.

A model that ended at that block would classify by them.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.logits import at_least_float32
from vit.model.model_info import count_classes
from vit.model.vision_transformer import VisionTransformer

# A readout is a number of blocks and a pooling: "token" is the class token, "avg" the mean of the
# patches.
Readout = tuple[int, str]
# The one readout of another library's model: the input of its last linear layer.
PRE_LOGITS: Readout = (0, "pre_logits")


def list_readouts(model: nn.Module) -> list[Readout]:
    """List the readouts of `compute_block_features` in its order, first block first."""
    if not isinstance(model, VisionTransformer):
        return [PRE_LOGITS]
    poolings = ["token", "avg"]
    if model.cls_token is None:
        poolings = ["avg"]
    # A distilled model can't read the mean.
    elif model.dist_token is not None:
        poolings = ["token"]
    return [(depth, pool) for depth in range(1, len(model.blocks) + 1) for pool in poolings]


def compute_block_features(
    model: nn.Module, images: Float[Tensor, "B C height width"]
) -> Float[Tensor, "B R D"]:
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
    # Without memory: the weights below replace it, so that no random ones are drawn.
    with torch.device("meta"):
        cut = VisionTransformer(**model.architecture | values)
    kept = cut.state_dict().keys()
    weights = {name: value.clone() for name, value in model.state_dict().items() if name in kept}
    head = {"head.weight": weight, "head.bias": bias}
    if cut.head_dist is not None:
        # A distilled model averages two heads, and the second starts at zero.
        head = {name: 2 * value for name, value in head.items()}
        head["head_dist.weight"] = torch.zeros_like(weight)
        head["head_dist.bias"] = torch.zeros_like(bias)
    head = {name: value.to(model.pos_embed.device) for name, value in head.items()}
    cut.load_state_dict(weights | head, assign=True)
    # Fixed positions are no weights.
    if not isinstance(cut.pos_embed, nn.Parameter):
        cut.pos_embed = model.pos_embed.clone()
    return cut.train(model.training)


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
