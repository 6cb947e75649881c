"""The sizes of attention's scores, the products before its softmax."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit.model.attention import MultiHeadAttention
from vit.model.model_info import keep_mode
from vit.runtime.device import Precision, autocast

# Images whose scores are computed.
NUM_IMAGES = 4
# Above it, attention of a small model is nearly one-hot, and gradients of queries and keys are more
# than 5 % off in bfloat16 (research/attention_scores.py). Pretrained models may begin there.
_WARNING_SCORE = 100.0
_WARNING_GROWTH = 2.0


@torch.no_grad()
def measure_scores(model: nn.Module, images: Tensor, *, precision: Precision) -> dict[str, float]:
    """Return the largest magnitude of a score in each attention layer of ours, by the layer's name.

    Args:
        model: Model that computes as in evaluation mode.
        images: The model's input; the first four are taken.
        precision: Precision of the forward pass.
    """
    largest: dict[str, Tensor] = {}

    def watch(layer: MultiHeadAttention, arguments: tuple[Tensor, ...], *, name: str) -> None:
        query, key, _ = layer._project(*arguments, *(None,) * (3 - len(arguments)))
        largest[name] = (query @ key.mT).abs().amax().float() * layer.scale

    hooks: list[Any] = []
    for name, layer in model.named_modules():
        if isinstance(layer, MultiHeadAttention):
            hooks.append(layer.register_forward_pre_hook(partial(watch, name=name)))
    if not hooks:
        return {}
    try:
        with keep_mode(model), autocast(images.device, precision):
            model.eval()(images[:NUM_IMAGES])
    finally:
        for hook in hooks:
            hook.remove()
    # With one tensor the host waits for the device once.
    return dict(zip(largest, torch.stack(list(largest.values())).tolist(), strict=True))


def describe_growth(first: dict[str, float], last: dict[str, float]) -> str | None:
    """Return a sentence on the layer with the largest scores of those that have grown too large; None
    without any.

    Args:
        first, last: Results of `measure_scores` before training and now.
    """
    grown = [
        name
        for name, score in last.items()
        if score > max(_WARNING_SCORE, _WARNING_GROWTH * first[name])
    ]
    if not grown:
        return None
    name = max(grown, key=last.__getitem__)
    return (
        f"attention scores of {name} have grown to {last[name]:.0f}, so that its weights are nearly"
        " one-hot and its gradients imprecise; train with model.qk_norm=true or a lower learning rate"
    )
