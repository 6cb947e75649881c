"""The map methods by name, and one call that computes several of them from one forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vit.explanation.capture.feature_maps import run_classifier
from vit.explanation.capture.forward import Forward, compute_entropy, split_prefix
from vit.explanation.capture.layers import (
    AttentionLayer,
    NoAttentionError,
    find_attention_layers,
    has_attention,
)
from vit.explanation.methods.gradients import (
    compute_attention_gradcam,
    compute_cdam,
    compute_fullgrad_plus,
    compute_gae,
    compute_grad_cam,
    compute_gradient_rollout,
    compute_input_x_gradient,
    compute_legrad,
)
from vit.explanation.methods.libra import LibraGradients
from vit.explanation.methods.removal import compute_removal_gradient
from vit.explanation.methods.rollout import check_range, check_rollout_options, compute_rollout
from vit.explanation.methods.sinks import find_sinks
from vit.explanation.targets import CLASS, ChooseTargets, Target
from vit.options import MapOptions as MapOptions
from vit.runtime.tensors import Images

Relevance = Float[Tensor, "B _ N"]  # of one class of each image, or of each class asked for
Compute = Callable[[Forward, Int[Tensor, " B"], MapOptions], Tensor]


@dataclass(frozen=True)
class Method:
    """A way from a recorded forward pass to each token's relevance.

    Args:
        name: what `--method` takes.
        title: what legends say.
        compute: takes the forward pass, a class of each image [B] and the options, and returns
            [B, N], prefix tokens included. None for a method that is made of others (`parts`).
        class_specific: whether the maps depend on the class.
        signed: whether values below zero speak against the class.
        libra: whether it takes the gradients of a forward pass within `LibraGradients`.
        uses_removal: whether it is made of the removal gradient, in whole or in part: that is no
            evidence for it.
        parts: of a method without `compute`: it is their mean, each divided by its standard
            deviation over the patches.
        has_sinks: whether patches that draw attention without being looked at show in its maps.
    """

    name: str
    title: str
    compute: Compute | None = None
    class_specific: bool = True
    signed: bool = False
    libra: bool = False
    uses_removal: bool = False
    has_sinks: bool = False
    parts: "tuple[Method, ...]" = ()


class Maps(NamedTuple):
    """Maps of one method: of T classes of each image; T is 1 for a method that does not depend on
    the class."""

    method: Method
    values: Float[Tensor, "B T rows columns"]  # float32
    prefix_mass: Float[Tensor, "B T"]  # fraction of the relevance in prefix tokens, 0 to 1
    entropy: Float[Tensor, "B T"]  # nats, 0 to log(patches)
    # attention sinks, where the method has any
    sinks: Bool[Tensor, "B layers rows columns"] | None = None


@torch.inference_mode(False)
def compute_maps(
    model: nn.Module,
    images: Images,
    *,
    methods: Sequence[str] = ("rollout",),
    choose_targets: ChooseTargets | None = None,
    target: Target = CLASS,
    options: MapOptions | None = None,
    keep_graph: bool = False,
    block_tokens: bool = False,
    verify: bool = True,
) -> tuple[Forward, Int[Tensor, "B T"], list[Maps]]:
    """One recorded forward pass, the classes explained and the maps of every method.

    Args:
        model: any model whose attention `capture_attention` understands, or one without attention.
        images: normalised images [B, 3, height, width].
        methods: names, see `METHODS`, or `METHODS_WITHOUT_ATTENTION`.
        choose_targets: picks T classes of each image from the logits; by default the predicted one.
        target: the number of a class that is explained.
        options: of the methods.
        keep_graph: keep the model's own gradients, whatever the methods need.
        block_tokens: keep what leaves each block.
        verify: check that the recorded attention is the model's, see `run_forward`.

    Returns:
        The forward pass, the classes [B, T], and the maps in the order of `methods`.

    Raises:
        ValueError: for an unknown method, an option outside its range, and a model whose attention
            is not understood.
    """
    chosen = find_methods(methods, model)
    options = options or MapOptions()
    # what is computed, each once, whatever it is a part of
    computed = dict.fromkeys(part for method in chosen for part in method.parts or (method,))
    libra_methods = [method for method in computed if method.libra]
    own_methods = [method for method in computed if not method.libra]

    run = partial(run_classifier, model, images, block_tokens=block_tokens, verify=verify)
    relevance: dict[Method, Relevance] = {}
    forward = None
    if libra_methods:
        with LibraGradients():
            forward = run(gradients=True)
        forward.target = target
        targets = _choose_targets(forward, choose_targets)
        relevance |= _compute_relevance(forward, libra_methods, targets, options)
    if own_methods or keep_graph:
        # its graph is freed before there is another one of the same size; the logits are the same
        forward = None
        needs_graph = any(method.class_specific for method in own_methods)
        forward = run(gradients=keep_graph or needs_graph)
        forward.target = target
        targets = _choose_targets(forward, choose_targets)
        relevance |= _compute_relevance(forward, own_methods, targets, options)

    assert forward is not None
    for method in chosen:
        if method.parts:
            parts = [relevance[part] for part in method.parts]
            relevance[method] = _combine(parts, forward.num_prefix_tokens)
    return (
        forward,
        targets,
        [_make_maps(method, relevance[method], forward, options) for method in chosen],
    )


def _choose_targets(forward: Forward, choose_targets: ChooseTargets | None) -> Int[Tensor, "B T"]:
    logits = forward.logits.detach()
    return logits.argmax(dim=1, keepdim=True) if choose_targets is None else choose_targets(logits)


def _compute_relevance(
    forward: Forward,
    methods: Sequence[Method],
    targets: Int[Tensor, "B T"],
    options: MapOptions,
) -> dict[Method, Relevance]:
    """Of each method, from one pass."""
    check_options(options, forward.record.layers)
    relevance = {}
    # the forward pass may be in half precision; the products of many matrices are not
    with torch.autocast(forward.images.device.type, enabled=False), torch.enable_grad():
        for method in methods:
            assert method.compute is not None
            classes = targets if method.class_specific else targets[:, :1]
            columns = [
                method.compute(forward, column, options).detach()
                for column in classes.unbind(dim=1)
            ]
            relevance[method] = torch.stack(columns, dim=1)
    return relevance


def _combine(parts: Sequence[Relevance], num_prefix_tokens: int) -> Relevance:
    """The mean of several maps, which differ in scale: each is divided by its standard deviation
    over the patches. Prefix tokens get nothing."""
    patches = torch.stack([values.float()[..., num_prefix_tokens:] for values in parts])
    combined = (patches / patches.std(dim=-1, keepdim=True).clamp_min(1e-30)).mean(dim=0)
    return torch.nn.functional.pad(combined, (num_prefix_tokens, 0))


def find_methods(names: Sequence[str], model: nn.Module | None = None) -> list[Method]:
    """Methods by name.

    Args:
        names: of the methods.
        model: the methods are of this model. None: of any that has attention.

    Raises:
        ValueError: for an unknown method, with the known ones, and for one that needs attention
            which the model doesn't have.
    """
    methods = METHODS
    if model is not None and not has_attention(model):
        methods = METHODS_WITHOUT_ATTENTION
    unknown = [name for name in names if name not in methods]
    if not unknown:
        return [methods[name] for name in names]
    if model is not None and unknown[0] in METHODS:
        try:
            find_attention_layers(model)
        except NoAttentionError as error:
            raise ValueError(f"{unknown[0]} needs attention: {error}") from error
    raise ValueError(f"unknown method {unknown[0]!r}; known: {', '.join(methods)}")


def check_options(options: MapOptions, layers: Sequence[AttentionLayer]) -> None:
    """Raise ValueError for an option that a model with these layers has no use for; one without
    attention uses none."""
    if not layers:
        return
    check_rollout_options(options, len(layers))
    check_range("layer", options.layer, -len(layers), len(layers) - 1)
    if isinstance(options.head, int):
        check_range("head", options.head, 0, layers[0].num_heads - 1)


def _make_maps(method: Method, relevance: Relevance, forward: Forward, options: MapOptions) -> Maps:
    values, prefix_mass = split_prefix(
        relevance, num_prefix_tokens=forward.num_prefix_tokens, grid=forward.grid
    )
    sinks = None
    if method.has_sinks:
        sinks = find_sinks(forward, start_layer=options.start_layer)
    return Maps(method, values.float(), prefix_mass.float(), compute_entropy(values).float(), sinks)


def _raw(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    """What the pooled feature attends to in one layer, uᵀA."""
    layer = forward.record.layers[options.layer]
    rows = layer.in_chunks(partial(layer.attend, forward.pool_weights))  # [B, H, N]
    if options.head == "mean":
        return rows.mean(dim=1)
    return rows[:, options.head]


def _removal_gradient(forward: Forward, classes: Tensor, options: MapOptions) -> Tensor:
    # of the probability, as the sanity checks' evidence: a logit may rise for all classes alike
    return compute_removal_gradient(forward, forward.value(classes))


_FULLGRAD = Method(
    "libra-fullgrad", "Libra FullGrad+", compute_fullgrad_plus, signed=True, libra=True
)
_LIBRA_PIXELS = Method(
    "libra-input-x-gradient",
    "Libra input times gradient",
    # from the mean colour: what painting a patch over removes
    partial(compute_input_x_gradient, from_mean=True),
    signed=True,
    libra=True,
)
_REMOVAL_GRADIENT = Method(
    "removal-gradient", "removal gradient", _removal_gradient, signed=True, uses_removal=True
)

_ALL_METHODS = (
    # of the attention alone
    Method(
        "rollout",
        "attention rollout",
        compute_rollout,
        class_specific=False,
        has_sinks=True,
    ),
    Method("raw", "attention of a layer", _raw, class_specific=False),
    # attention weighted by gradients
    Method("gae", "generic attention explanation", compute_gae),
    Method(
        "gradient-rollout",
        "gradient-weighted rollout",
        compute_gradient_rollout,
    ),
    Method(
        "attn-gradcam",
        "Grad-CAM of the last attention",
        compute_attention_gradcam,
    ),
    Method("legrad", "LeGrad", compute_legrad),
    # input or tokens times gradient, signed
    Method(
        "cdam",
        "class-discriminative attention map",
        compute_cdam,
        signed=True,
    ),
    Method(
        "input-x-gradient",
        "input times gradient",
        compute_input_x_gradient,
        signed=True,
    ),
    # the same with LibraGrad's gradients
    _FULLGRAD,
    Method(
        "libra-gae",
        "Libra generic attention explanation",
        compute_gae,
        libra=True,
    ),
    _LIBRA_PIXELS,
    # what leaving a token out would do
    _REMOVAL_GRADIENT,
    # where patches are left out, where they are painted over, and for one patch alone
    Method(
        "libra-removal",
        "Libra FullGrad+, pixels and removal gradient",
        parts=(_FULLGRAD, _LIBRA_PIXELS, _REMOVAL_GRADIENT),
        signed=True,
        uses_removal=True,
    ),
)
METHODS = {method.name: method for method in _ALL_METHODS}
# by name, in the order in which a person wants to see them
METHODS_WITHOUT_ATTENTION = {
    "grad-cam": Method("grad-cam", "Grad-CAM of the last feature map", compute_grad_cam),
    "input-x-gradient": METHODS["input-x-gradient"],
}
