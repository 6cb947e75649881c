"""The methods by name, and one call that computes several of them from one forward pass."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.capture.readout import Forward, Images, compute_entropy, run_forward, split_prefix
from vit.explanation.methods import gradients, rollout
from vit.explanation.methods.libra import LibraGradients
from vit.explanation.methods.removal import average_over_subsets, compute_removal_gradient
from vit.explanation.methods.targets import ChooseTargets


@dataclass(frozen=True)
class MapOptions:
    """Options of the methods; each uses those that concern it, and the manifest records all of them."""

    head_fusion: str = "mean"  # rollout
    discard_ratio: float = 0.0  # rollout
    residual: float = 0.5  # rollout, gradient-rollout
    start_layer: int = 0  # rollout, gradient-rollout, gae, legrad: layers before it are left out
    layer: int | None = -1  # raw: which layer, counted from the end when negative; None is every one
    head: int | None = -1  # raw: which head; -1 is their mean, None every one
    passes: int = 1  # removal-gradient: above 1, the mean of as many passes, each with a random half of the patches


@dataclass(frozen=True)
class Method:
    """A way from a recorded forward pass to each token's relevance: `compute(forward, classes, options)` takes a class
    of each image [B] and returns [B, N] (prefix tokens included), or [B, K, N] for the K maps of a contact sheet."""

    name: str
    title: str
    compute: Callable[[Forward, Int[Tensor, " B"], MapOptions], Tensor]
    class_specific: bool = False
    signed: bool = False
    libra: bool = False  # from a forward pass within LibraGradients
    of_removal: bool = False  # made of the removal gradient, in whole or in part: that is no evidence for it


@dataclass
class Maps:
    """Maps of one method: T classes, or T maps of a contact sheet, of each image; T is 1 for a method that does not
    depend on the class."""

    method: Method
    values: Float[Tensor, "B T rows columns"]  # float32
    prefix_mass: Float[Tensor, "B T"]  # fraction of the relevance in prefix tokens, 0 to 1
    entropy: Float[Tensor, "B T"]  # nats, 0 to log(patches)

    @property
    def is_sheet(self) -> bool:
        """Whether these are layers and heads, not explanations of classes."""
        return not self.method.class_specific and self.values.shape[1] > 1


@torch.inference_mode(False)
def compute_maps(
    model: nn.Module,
    images: Images,
    *,
    methods: Sequence[str] = ("rollout",),
    choose_targets: ChooseTargets | None = None,
    options: MapOptions | None = None,
    keep_graph: bool = False,
    block_tokens: bool = False,
    verify: bool = True,
) -> tuple[Forward, Int[Tensor, "B T"], list[Maps]]:
    """One recorded forward pass, the classes explained and the maps of every method. `choose_targets` picks T classes
    an image from the logits; without it, the predicted one. With `keep_graph` the pass has the model's own gradients,
    whatever the methods need; `block_tokens` keeps what leaves each block; `verify` as in `run_forward`."""
    chosen, options = find_methods(methods), options or MapOptions()
    passes = {libra: [method for method in chosen if method.libra is libra] for libra in (False, True)}
    forwards = {}
    for libra, of_pass in passes.items():
        wanted = keep_graph and not libra
        if of_pass or wanted:
            with LibraGradients() if libra else nullcontext():
                gradients = wanted or any(method.class_specific for method in of_pass)
                options_of_pass: dict[str, Any] = {"gradients": gradients, "block_tokens": block_tokens}
                forwards[libra] = run_forward(model, images, **options_of_pass, verify=verify)
    forward = next(iter(forwards.values()))  # their results are the same
    if len(forwards) == 2 and forward.logits.requires_grad:  # the first is the plain one
        forwards[True].plain = forward
    check_options(options, forward.record.layers)
    logits = forward.logits.detach()
    targets = logits.argmax(dim=1, keepdim=True) if choose_targets is None else choose_targets(logits)
    # the forward pass may be in half precision; the products of many matrices are not
    full_precision = torch.autocast(images.device.type, enabled=False)
    with full_precision, torch.enable_grad():
        maps = [_compute_method(method, forwards[method.libra], targets, options) for method in chosen]
    return forward, targets, maps


def check_options(options: MapOptions, layers: Sequence[AttentionLayer]) -> None:
    """Raise ValueError for an option that a model with these layers has no use for."""
    rollout.check_rollout_options(
        len(layers), options.head_fusion, options.discard_ratio, options.residual, options.start_layer
    )
    if options.passes < 1:
        raise ValueError(f"passes {options.passes} is not a number of passes from 1 on")
    if options.layer is not None and not -len(layers) <= options.layer < len(layers):
        raise ValueError(f"layer {options.layer} is outside 0 to {len(layers) - 1}, this model's layers")
    heads = layers[0].num_heads
    if options.head is not None and not -1 <= options.head < heads:
        raise ValueError(f"head {options.head} is outside 0 to {heads - 1}, this model's heads")


def _compute_method(method: Method, forward: Forward, targets: Tensor, options: MapOptions) -> Maps:
    columns = (targets if method.class_specific else targets[:, :1]).unbind(dim=1)
    mass = torch.stack([method.compute(forward, classes, options).detach() for classes in columns], dim=1)
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
    layers = forward.record.layers[options.start_layer :]
    fusion, ratio, prefix = options.head_fusion, options.discard_ratio, forward.num_prefix_tokens
    if fusion == "mean" and ratio == 0:
        return rollout.rollout_row(forward.readout, layers, residual=options.residual)
    fuse = partial(rollout.mixing_matrix, head_fusion=fusion, discard_ratio=ratio, num_prefix_tokens=prefix)
    mix = rollout.through_matrices(lambda layer, images: fuse(layer.attention(images)))
    return rollout.propagate(forward.readout, layers, mix, residual=options.residual)


def _raw(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    """What the readout attends to, uᵀA, as [B, layers · heads, N]."""
    layers = forward.record.layers if options.layer is None else [forward.record.layers[options.layer]]
    readout = forward.readout[:, None, None].float()

    def read(layer: AttentionLayer) -> Float[Tensor, "B H N"]:
        return rollout.in_chunks(layer, lambda images: (readout[images] @ layer.attention(images).float())[:, :, 0])

    rows = torch.stack([read(layer) for layer in layers], dim=1)  # [B, L, H, N]
    if options.head == -1:
        rows = rows.mean(dim=2, keepdim=True)
    elif options.head is not None:
        rows = rows[:, :, options.head : options.head + 1]
    return rows.flatten(1, 2)


def _score(forward: Forward, classes: Int[Tensor, " B"], *, probability: bool = False) -> Float[Tensor, " B"]:
    scores = forward.logits.softmax(dim=1) if probability else forward.logits
    return scores.gather(1, classes[:, None])[:, 0]


def _of_logit(
    name: str, title: str, compute: Callable[..., Tensor], *option_names: str, signed: bool = False, libra: bool = False
) -> Method:
    """A method of the class's logit, from a function of it and of options by name."""

    def compute_map(forward: Forward, classes: Int[Tensor, " B"], options: MapOptions) -> Tensor:
        return compute(
            forward, _score(forward, classes), **{option: getattr(options, option) for option in option_names}
        )

    return Method(name, title, compute_map, class_specific=True, signed=signed, libra=libra)


def _remove(forward: Forward, classes: Tensor, options: MapOptions, *, probability: bool) -> Tensor:
    def compute(forward: Forward) -> Tensor:
        return compute_removal_gradient(forward, _score(forward, classes, probability=probability))

    return compute(forward) if options.passes == 1 else average_over_subsets(forward, compute, passes=options.passes)


def _legrad(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    return gradients.compute_legrad(forward, classes, start_layer=options.start_layer)


def _combine(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    """The mean of libra-fullgrad, libra-input-x-gradient and removal-gradient, each divided by its standard deviation
    over the patches: where patches are left out, where they are painted over, and for one patch alone."""
    if forward.plain is None:
        forward.plain = run_forward(forward.model, forward.images.detach(), gradients=True, verify=False)
    logit, first = _score(forward, classes), forward.num_prefix_tokens
    maps = [gradients.compute_fullgrad_plus(forward, logit), _PIXELS(forward, logit)]
    maps.append(_remove(forward.plain, classes, options, probability=True))
    patches = torch.stack([of_method.detach().float()[:, first:] for of_method in maps])
    combined = (patches / patches.std(dim=-1, keepdim=True).clamp_min(1e-30)).mean(dim=0)
    return torch.nn.functional.pad(combined, (first, 0))


_PIXELS = partial(gradients.compute_input_x_gradient, from_mean=True)
_of_removal = partial(Method, class_specific=True, signed=True, of_removal=True)
_GAE, _GAE_SCALE_FREE = gradients.compute_gae, partial(gradients.compute_gae, scale_free=True)
_ALL = (
    Method("rollout", "attention rollout", _rollout),
    Method("raw", "attention of a layer", _raw),
    _of_logit("gae", "generic attention explanation", _GAE, "start_layer"),
    _of_logit("gae-scale-free", "generic attention explanation, rows normalised", _GAE_SCALE_FREE, "start_layer"),
    _of_logit(
        "gradient-rollout", "gradient-weighted rollout", gradients.compute_gradient_rollout, "residual", "start_layer"
    ),
    _of_logit("attn-gradcam", "Grad-CAM of the last attention", gradients.compute_attention_gradcam),
    Method("legrad", "LeGrad", _legrad, class_specific=True),
    _of_logit("cdam", "class-discriminative attention map", gradients.compute_cdam, signed=True),
    _of_logit("input-x-gradient", "input times gradient", gradients.compute_input_x_gradient, signed=True),
    _of_logit("libra-fullgrad", "Libra FullGrad+", gradients.compute_fullgrad_plus, signed=True, libra=True),
    _of_logit("libra-gae", "Libra generic attention explanation", _GAE, "start_layer", libra=True),
    _of_logit("libra-input-x-gradient", "Libra input times gradient", _PIXELS, signed=True, libra=True),
    _of_removal("removal-gradient", "removal gradient", partial(_remove, probability=True)),
    _of_removal("removal-gradient-logit", "removal gradient of the logit", partial(_remove, probability=False)),
    _of_removal("libra-removal", "Libra FullGrad+, pixels and removal gradient", _combine, libra=True),
)
METHODS = {method.name: method for method in _ALL}
