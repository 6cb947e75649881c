"""From images to logits and pooled features, for models of this project, timm, torchvision and
Hugging Face.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.model_info import is_of
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import build_to_fit
from vit.runtime.tensors import Images

# A readout is a number of blocks and a pooling: "token" is the class token, "avg" the mean of the
# patches.
Readout = tuple[int, str]
# The one readout of a model of timm: the input of its classifier.
PRE_LOGITS: Readout = (0, "pre_logits")


def compute_logits(model: nn.Module, images: Images) -> Float[Tensor, "_ classes"]:
    """Compute the logits of normalised images, in float32 under any autocast (float64 stays).

    The model returns them, or an object that has them as `logits`. A separate head
    (`forward_head`) runs in float32: logits rounded to bfloat16 tie, and ties change top-1 by
    tenths of a percent.
    """
    net: Any = model
    if not (hasattr(net, "forward_features") and hasattr(net, "forward_head")):
        output = net(images)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise ValueError(
                f"{type(model).__name__} doesn't return logits [images, classes]; wrap it in a"
                " module that does"
            )
        return at_least_float32(logits)
    features = _forward_features(net, images)
    with torch.autocast(images.device.type, enabled=False):
        return at_least_float32(net.forward_head(features))


def _forward_features(net: Any, images: Tensor) -> Any:
    """Compute the input of a model's head, in the type of its weights."""
    if isinstance(net, VisionTransformer):  # its last block can skip the other tokens
        features = net.forward_features(images, num_out_tokens=net.num_out_tokens)
    else:
        features = net.forward_features(images)
    # a model with weights in half precision has a head in half precision; CoaT has a tuple
    if isinstance(features, Tensor):
        return features.to(next(net.parameters()).dtype)
    return features


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, and leave other tensors as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def count_features(model: nn.Module) -> int:
    """Return the width D of the features of `compute_logits_and_features`; 0 for models of other
    libraries than timm."""
    net: Any = model
    if isinstance(model, VisionTransformer):
        return model.embed_dim
    if not is_of(model, "timm"):
        return 0
    return int(getattr(net, "head_hidden_size", None) or net.num_features)


def compute_logits_and_features(
    model: nn.Module, images: Images
) -> tuple[Float[Tensor, "B classes"], Float[Tensor, "B D"]]:
    """Compute logits and the pooled features that the classifier reads, in one forward pass.

    The logits equal those of `compute_logits` to the last bit. A model of timm with 0 classes
    returns its features, which are then both results.
    """
    net: Any = model
    if not count_features(model):
        raise ValueError(
            f"the features of {type(model).__name__} are unknown; models of vit and timm have some"
        )
    tokens = _forward_features(net, images)
    with torch.autocast(images.device.type, enabled=False):
        if isinstance(model, VisionTransformer):
            features = model.pool(tokens, model.global_pool)
            return model.head(features), features
        features = at_least_float32(net.forward_head(tokens, pre_logits=True))
        return at_least_float32(net.forward_head(tokens)), features


def list_readouts(model: nn.Module) -> list[Readout]:
    """List the readouts of `compute_block_features` in its order, first block first."""
    if not isinstance(model, VisionTransformer):
        return [PRE_LOGITS]
    poolings = ["token", "avg"]
    if model.cls_token is None:
        poolings = ["avg"]
    return [(depth, pool) for depth in range(1, len(model.blocks) + 1) for pool in poolings]


def compute_block_features(model: nn.Module, images: Images) -> Float[Tensor, "B R D"]:
    """Compute the features of normalised images at each of the model's R readouts, float32.

    The head would read them if the model ended at that block. They are normed like the input of
    the head. A model of timm has one readout: see `compute_logits_and_features`.
    """
    if not isinstance(model, VisionTransformer):
        return compute_logits_and_features(model, images)[1][:, None]
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
    model: nn.Module,
    readout: Readout,
    *,
    weight: Float[Tensor, "classes D"],
    bias: Float[Tensor, " classes"],
) -> nn.Module:
    """Build a model that ends at a readout, of copied blocks and norm, with a linear layer as its
    head. Its logits are those of this layer for the features of `compute_block_features`. A model
    of timm gets the layer itself."""
    if not isinstance(model, VisionTransformer):
        head = cast(Any, model).get_classifier()
        if not isinstance(head, nn.Linear) or head.weight.shape != weight.shape:
            raise ValueError(
                f"the head of {type(model).__name__} is not a linear layer of its features; set"
                " model.probe=false"
            )
        head.load_state_dict({"weight": weight, "bias": bias})
        return model
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
