"""The methods by name, and one call that computes several of them from one forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.data.images import Preprocess
from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.capture.readout import Forward, compute_entropy, run_forward, split_prefix
from vit.explanation.methods.compat import vit_explain_gradient_rollout, vit_explain_rollout
from vit.explanation.methods.gradients import (
    compute_attention_gradcam,
    compute_cdam,
    compute_gae,
    compute_gradient_rollout,
    compute_input_x_gradient,
    compute_legrad,
)
from vit.explanation.methods.rollout import (
    check_rollout_options,
    chunks,
    mixing_matrix,
    rollout_row,
    rollout_row_from,
)
from vit.explanation.methods.targets import ChooseTargets

COMPATIBLE = ("vit-explain",)


@runtime_checkable
class Explainable(Protocol):
    """What explanation needs of a bundle."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def preprocess(self) -> Preprocess: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class MapOptions:
    """What the methods can be told; each uses what concerns it, and the manifest records all of it."""

    head_fusion: str = "mean"  # rollout
    discard_ratio: float = 0.0  # rollout
    residual: float = 0.5  # rollout, gradient-rollout
    start_layer: int = 0  # rollout, gradient-rollout, gae, legrad: layers before it are left out
    compat: str | None = None  # rollout, gradient-rollout: another program whose numbers to reproduce
    layer: int | None = -1  # raw: which layer, counted from the end when negative; None is every one
    head: int | None = -1  # raw: which head; -1 is their mean, None every one


@dataclass(frozen=True)
class Method:
    """A way from a recorded forward pass to each token's relevance.

    `compute(forward, classes, options)` takes the class to explain of each image [B] and returns [B, N]
    (prefix tokens included), or [B, K, N] for the K pictures of a sheet.
    """

    name: str
    title: str
    compute: Callable[[Forward, Int[Tensor, " B"], MapOptions], Tensor]
    class_specific: bool
    signed: bool = False


@dataclass
class Maps:
    """Maps of one method: T classes, or T pictures of a sheet, of each image; T is 1 for one that knows no
    class."""

    method: Method
    values: Float[Tensor, "B T rows columns"]  # float32
    prefix_mass: Float[Tensor, "B T"]  # share of the relevance in prefix tokens, 0 to 1
    entropy: Float[Tensor, "B T"]  # nats, 0 to log(patches)


def compute_maps(
    model: nn.Module,
    images: Float[Tensor, "B 3 height width"],
    *,
    methods: Sequence[str] = ("rollout",),
    choose_targets: ChooseTargets | None = None,
    options: MapOptions | None = None,
) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B T"], list[Maps]]:
    """Logits, the classes explained and the maps of every method, from one forward pass.

    `choose_targets` picks T classes an image from the logits; without it, the predicted one.
    """
    chosen = find_methods(methods)
    forward = run_methods_forward(model, images, chosen)
    targets, maps = explain_forward(forward, chosen, choose_targets=choose_targets, options=options)
    return forward.logits.detach(), targets, maps


def run_methods_forward(
    model: nn.Module, images: Float[Tensor, "B 3 height width"], methods: Sequence[Method]
) -> Forward:
    """A forward pass that records what these methods need."""
    return run_forward(
        model,
        images,
        gradients=any(method.class_specific for method in methods),
        lean=all(method.name == "chunked" for method in methods),
    )


def explain_forward(
    forward: Forward,
    methods: Sequence[Method],
    *,
    choose_targets: ChooseTargets | None = None,
    options: MapOptions | None = None,
) -> tuple[Int[Tensor, "B T"], list[Maps]]:
    """The classes explained and the maps of every method. Class-specific methods need a forward pass with
    gradients."""
    options = options or MapOptions()
    check_options(options, forward.record.layers)
    logits = forward.logits.detach()
    targets = logits.argmax(dim=1, keepdim=True) if choose_targets is None else choose_targets(logits)
    # the forward pass may be in half precision; the products of many matrices are not
    full_precision = torch.autocast(forward.images.device.type, enabled=False)
    with full_precision, torch.set_grad_enabled(forward.logits.requires_grad):
        return targets, [_compute(method, forward, targets, options) for method in methods]


def check_options(options: MapOptions, layers: Sequence[AttentionLayer]) -> None:
    """Raise ValueError for an option that a model with these layers has no use for."""
    check_rollout_options(
        len(layers), options.head_fusion, options.discard_ratio, options.residual, options.start_layer
    )
    if options.compat is not None and options.compat not in COMPATIBLE:
        raise ValueError(f"unknown compat {options.compat!r}; known: {', '.join(COMPATIBLE)}")
    if options.layer is not None and not -len(layers) <= options.layer < len(layers):
        raise ValueError(f"layer {options.layer} is outside 0 to {len(layers) - 1}, this model's layers")
    heads = layers[0].num_heads
    if options.head is not None and not -1 <= options.head < heads:
        raise ValueError(f"head {options.head} is outside 0 to {heads - 1}, this model's heads")


def _compute(method: Method, forward: Forward, targets: Tensor, options: MapOptions) -> Maps:
    classes = targets.unbind(dim=1) if method.class_specific else targets[:, :1].unbind(dim=1)
    mass = torch.stack([method.compute(forward, of_image, options).detach() for of_image in classes], dim=1)
    mass = mass.flatten(1, -2)  # [B, T, N]
    values, prefix_mass = split_prefix(mass, num_prefix_tokens=forward.num_prefix_tokens, grid=forward.grid)
    return Maps(method, values.float(), prefix_mass.float(), compute_entropy(values).float())


def find_methods(names: Sequence[str]) -> list[Method]:
    """Methods by name; ValueError lists the known ones."""
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    return [METHODS[name] for name in names]


def _rollout(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    layers = forward.record.layers
    if options.compat is not None:
        patches = vit_explain_rollout(
            forward.record.attentions, head_fusion=options.head_fusion, discard_ratio=options.discard_ratio
        )
        return torch.cat([torch.zeros_like(patches[:, :1]), patches], dim=1)
    if options.head_fusion == "mean" and options.discard_ratio == 0:
        return rollout_row(
            forward.readout, layers, residual=options.residual, start_layer=options.start_layer
        )
    return rollout_row_from(
        forward.readout,
        layers[options.start_layer :],
        lambda layer, images: mixing_matrix(
            layer.attention(images),
            head_fusion=options.head_fusion,
            discard_ratio=options.discard_ratio,
            num_prefix_tokens=forward.num_prefix_tokens,
        ),
        residual=options.residual,
    )


def _chunked(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    if options.head_fusion != "mean" or options.discard_ratio or options.compat:
        raise ValueError("chunked rollout is of the mean over heads; use method rollout for other options")
    return _rollout(forward, classes, options)


def _gradient_rollout(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    score = _logit(forward, classes)
    if options.compat is not None:
        gradients = forward.record.gradients(score, retain_graph=True)
        patches = vit_explain_gradient_rollout(
            forward.record.attentions, gradients, discard_ratio=options.discard_ratio
        )
        return torch.cat([torch.zeros_like(patches[:, :1]), patches], dim=1)
    return compute_gradient_rollout(
        forward, score, residual=options.residual, start_layer=options.start_layer
    )


def _raw(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    """What the readout attends to, uᵀA, as [B, layers · heads, N]."""
    layers = forward.record.layers
    if options.layer is not None:
        layers = [layers[options.layer]]
    rows = torch.stack([_read_layer(forward, layer) for layer in layers], dim=1)  # [B, L, H, N]
    if options.head == -1:
        rows = rows.mean(dim=2, keepdim=True)
    elif options.head is not None:
        rows = rows[:, :, options.head : options.head + 1]
    return rows.flatten(1, 2)


def _read_layer(forward: Forward, layer: AttentionLayer) -> Float[Tensor, "B H N"]:
    readout = forward.readout[:, None, None]
    return torch.cat(
        [
            (readout[images].to(torch.float32) @ layer.attention(images).float())[:, :, 0]
            for images in chunks(layer)
        ]
    )


def _logit(forward: Forward, classes: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    return forward.logits.gather(1, classes[:, None])[:, 0]


METHODS = {
    method.name: method
    for method in (
        Method("rollout", "attention rollout", _rollout, class_specific=False),
        Method("chunked", "attention rollout", _chunked, class_specific=False),
        Method("raw", "attention of a layer", _raw, class_specific=False),
        Method(
            "gae",
            "generic attention explanation",
            lambda forward, classes, options: compute_gae(
                forward, _logit(forward, classes), start_layer=options.start_layer
            ),
            class_specific=True,
        ),
        Method(
            "gae-scale-free",
            "generic attention explanation, rows normalised",
            lambda forward, classes, options: compute_gae(
                forward, _logit(forward, classes), start_layer=options.start_layer, scale_free=True
            ),
            class_specific=True,
        ),
        Method("gradient-rollout", "gradient-weighted rollout", _gradient_rollout, class_specific=True),
        Method(
            "attn-gradcam",
            "Grad-CAM of the last attention",
            lambda forward, classes, options: compute_attention_gradcam(forward, _logit(forward, classes)),
            class_specific=True,
        ),
        Method(
            "legrad",
            "LeGrad",
            lambda forward, classes, options: compute_legrad(
                forward, classes, start_layer=options.start_layer
            ),
            class_specific=True,
        ),
        Method(
            "cdam",
            "class-discriminative attention map",
            lambda forward, classes, options: compute_cdam(forward, _logit(forward, classes)),
            class_specific=True,
            signed=True,
        ),
        Method(
            "input-x-gradient",
            "input times gradient",
            lambda forward, classes, options: compute_input_x_gradient(forward, _logit(forward, classes)),
            class_specific=True,
            signed=True,
        ),
    )
}
