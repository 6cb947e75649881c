"""The map methods by name, the maps of a batch by several of them, and the public function
`vit.attribute`."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.bundle import ModelLike, keeps_mode, open_model
from vit.explanation.capture.discovery import evaluation_mode
from vit.explanation.capture.forward import Forward, run_forward, settle_source
from vit.explanation.capture.reader import ModelReader, Source, read_model
from vit.explanation.methods.gradients import (
    compute_difference_x_gradient,
    compute_fullgrad_plus,
    compute_gae,
    compute_grad_cam,
    compute_removal_map,
)
from vit.explanation.methods.libra import LibraGradients
from vit.explanation.methods.rollout import compute_rollout
from vit.explanation.targets import (
    CLASS,
    Classes,
    Numbers,
    Target,
    TargetLike,
    build_target,
    find_output_kind,
)
from vit.model.logits import compute_logits
from vit.model.model_info import count_classes, find_class_names, keep_mode
from vit.runtime.arguments import check_choice
from vit.runtime.device import run_in_memory
from vit.runtime.tensors import Images, Logits

# P patches, for each class asked for; for one if maps don't depend on the class
Relevance = Float[Tensor, "B _ P"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A map method: from a recorded forward pass to the relevance of each token.

    Attributes:
        name: Name of the method, as `vit.explain(methods=…)` takes it.
        compute: Function of a `Forward` and a class of each image [B] to the
            relevance [B, N] of each token, including prefix tokens. Its keyword
            arguments, which have defaults, are the method's options. None: the
            method is made of `parts`.
        class_specific: True if maps depend on the class.
        signed: True if negative values are evidence against the class.
        models: Sources of its maps: "attention"; without it, a "feature map";
            where models are averaged, "pixels".
        libra: True if gradients follow the rules of LibraGrad.
        parts: Names of methods. The map is the mean of theirs, each divided by
            its standard deviation over the patches.

    Example:
        >>> from vit.explanation.methods.maps import METHODS
        >>> METHODS["last"] = vit.Method(name="last", compute=last_layer)
    """

    name: str
    compute: Callable[..., Any] | None = None
    class_specific: bool = True
    signed: bool = False
    models: tuple[Source, ...] = ("attention",)
    libra: bool = False
    parts: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """Names of the options of the method."""
        if self.compute is None:
            return []
        parameters = inspect.signature(self.compute).parameters.values()
        return [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]


# name → method; another one that is put here is known to every function and command
METHODS = {
    method.name: method
    for method in (
        Method(name="rollout", compute=compute_rollout, class_specific=False),
        Method(name="gae", compute=compute_gae),
        Method(name="grad-cam", compute=compute_grad_cam, models=("feature map",)),
        Method(name="libra-fullgrad", compute=compute_fullgrad_plus, signed=True, libra=True),
        Method(
            name="libra-input-x-gradient",
            compute=compute_difference_x_gradient,
            models=("attention", "pixels"),
            signed=True,
            libra=True,
        ),
        Method(name="removal-gradient", compute=compute_removal_map, signed=True),
        # one part each for patches that are left out, patches that are painted over, and single patches
        Method(
            name="libra-removal",
            parts=("libra-fullgrad", "libra-input-x-gradient", "removal-gradient"),
            signed=True,
        ),
    )
}


def list_methods(source: Source = "attention") -> list[str]:
    """Return the names of the methods for maps that are read from this source."""
    return [name for name, method in METHODS.items() if source in method.models]


def find_methods(
    names: Sequence[str], reader: ModelReader | None = None, *, options: Iterable[str] = ()
) -> list[Method]:
    """Find methods by name. Raise ValueError if one is unknown or needs what can't be read in the
    model, or if none of them has one of the options."""
    if not names:
        raise ValueError("methods is empty; name at least one")
    known = list(METHODS) if reader is None else list_methods(reader.source)
    for name in names:
        if reader is not None and name in METHODS and name not in known:
            reason = f" ({reader.found.refusal})" if reader.found.refusal else ""
            model, has = type(reader.model).__name__, ", ".join(known)
            raise ValueError(f"{name} is no method for {model}{reason}, which has {has}")
        check_choice(name, known, name="method")
    methods = [METHODS[name] for name in names]
    declared = [option for method in methods for option in method.options]
    for option in options:
        check_choice(option, declared, name=f"option of {', '.join(names)}")
    return methods


@keeps_mode
def attribute(
    model: ModelLike,
    images: Images,
    *,
    method: str = "libra-removal",
    target: TargetLike = "auto",
    map_options: Mapping[str, object] | None = None,
    class_names: Sequence[str] | None = None,
) -> Float[Tensor, "B rows columns"]:
    """Compute the maps of normalised images that are tensors, for example in a
    training loop.

    Args:
        model: See `vit.evaluate`. Maps of a module in training mode are those
            of evaluation mode; its mode comes back.
        images: Normalised images [B, C, H, W], on the model's device.
        method: Name of a method of `vit.explain`.
        target: See `vit.explain`. A list or a tensor [B] has a class for each
            image. For several labels, "auto" is the most probable one.
        map_options: See `vit.explain`.
        class_names: Name of each class, for a module. None: the model's own, or
            "class 0" and so on.

    Returns:
        The maps [B, rows, columns] on the device of the images, without a
        graph.

    Raises:
        ValueError: The images aren't normalised tensors of finite values on the
            model's device, the model can't be read, or an option is unknown.

    Example:
        >>> maps = vit.attribute(model, images, target=labels)
        >>> maps.shape  # [B, rows, columns]
    """
    is_multilabel = False
    if not isinstance(model, nn.Module):
        device = str(images.device) if isinstance(model, str | Path) else "auto"
        bundle = open_model(model, device=device, class_names=class_names)
        model, class_names = bundle.model, bundle.class_names
        is_multilabel = bundle.is_multilabel
    _check_images(images, model)
    reader = read_model(model, images)
    (chosen,) = find_methods([method])
    built = CLASS
    # a map that is the same for every class needs none
    if chosen.class_specific or not isinstance(target, str) or target != "auto":
        names = class_names or _name_outputs(reader.model, images)
        kind = find_output_kind(reader.model, names, is_multilabel=is_multilabel)
        built = build_target(target, names, kind, num_images=len(images))
    parts = []

    def explain_part(first: int, end: int) -> None:
        _, _, (maps,) = compute_maps(
            reader,
            images[first:end],
            methods=[method],
            target=built.select(range(first, end)),
            options=map_options,
        )
        parts.append(maps)

    part_size = choose_explain_batch_size(images.shape[-2:], images.device)
    run_in_memory(explain_part, 0, len(images), part_size=part_size, device=images.device)
    return torch.cat(parts).squeeze(1)


def _name_outputs(model: nn.Module, images: Images) -> tuple[str, ...]:
    """Return the names of a model's classes, by default "class 0" and so on; none without a
    classifier."""
    if count_classes(model) is not None:
        return find_class_names(model)
    with keep_mode(model), torch.no_grad():
        logits = compute_logits(model.eval(), images[:1])
    return tuple(f"class {index}" for index in range(logits.shape[1]))


def _check_images(images: Images, model: nn.Module) -> None:
    """Raise ValueError unless a model can take the images."""
    device = next(model.parameters()).device
    is_batch = images.ndim == 4 and len(images) and images.is_floating_point()
    if not is_batch or images.device != device or not images.isfinite().all():
        raise ValueError(
            "images are a normalised tensor [B, C, H, W] of finite floating-point values on the "
            f"model's device, {device}, not {images.dtype} {list(images.shape)} on "
            f"{images.device}; vit.explain takes photos"
        )


def choose_explain_batch_size(image_size: Sequence[int], device: torch.device) -> int:
    """Choose the images at a time, by measurements on a CPU; four times as many on a GPU."""
    batch_size = 64 if max(image_size) <= 64 else 16
    return batch_size if device.type == "cpu" else 4 * batch_size


@torch.inference_mode(False)
def compute_maps(
    model: nn.Module | ModelReader,
    images: Images,
    *,
    methods: Sequence[str] = ("rollout",),
    target: Target = CLASS,
    options: Mapping[str, object] | None = None,
) -> tuple[Forward, Int[Tensor, "B T"], list[Float[Tensor, "B _ rows columns"]]]:
    """Compute the maps of several methods from one recorded forward pass of normalised images.
    Return the pass, the classes [B, T], and the maps of each of the `methods`, float32. Raise
    ValueError if a method or option is unknown, or the model can't be read, see `settle_source`.
    """
    reader = read_model(model, images)
    # weights may be in half precision
    images = images.to(next(reader.model.parameters()).dtype)
    settle_source(reader, images)
    options = options or {}
    chosen = find_methods(methods, reader, options=options)
    names = [name for method in chosen for name in method.parts or (method.name,)]
    # each method once, also if it is part of several
    needed = [METHODS[name] for name in dict.fromkeys(names)]
    found: dict[str, Relevance] = {}
    # layers and heads are evaluated again after the pass, in the same mode
    with evaluation_mode(reader.model):
        for libra in (True, False):
            computed = [method for method in needed if method.libra == libra]
            if not computed:
                continue
            # frees the first graph before there is another of the same size
            forward = None
            gradients = any(method.class_specific for method in computed)
            with LibraGradients() if libra else nullcontext():
                forward = run_forward(reader, images, gradients=gradients)
            forward.target = target
            if libra:
                forward.target = replace(target, score=partial(_score_by_libra, target))
            targets = target.choose(forward.logits.detach())
            for method in computed:
                found[method.name] = _compute_relevance(forward, method, targets, options)
        assert forward is not None
        for method in chosen:
            if method.parts:
                found[method.name] = _combine([found[part] for part in method.parts])
        relevance = [found[method.name].float() for method in chosen]
        return forward, targets, [torch.unflatten(each, -1, forward.grid) for each in relevance]


def _score_by_libra(target: Target, logits: Logits, classes: Classes) -> Numbers:
    """Compute the number that is explained by LibraGrad's rules, too, unless they make it a
    constant, such as a probability."""
    with LibraGradients():
        score = target.score(logits, classes)
    return score if score.requires_grad else target.score(logits, classes)


def _compute_relevance(
    forward: Forward, method: Method, targets: Int[Tensor, "B T"], options: Mapping[str, Any]
) -> Relevance:
    """Compute the relevance by one method, once if it is the same for every class."""
    assert method.compute is not None
    columns = targets.unbind(dim=1)
    if not method.class_specific:
        columns = columns[:1]
    own = {name: options[name] for name in method.options if name in options}
    # the forward pass may be in half precision; the products of many matrices are not
    with torch.autocast(forward.images.device.type, enabled=False), torch.enable_grad():
        found = [method.compute(forward, column, **own).detach() for column in columns]
    return torch.stack(found, dim=1)[..., forward.num_prefix_tokens :]


def _combine(parts: Sequence[Relevance]) -> Relevance:
    """Compute the mean of several maps, each divided by its standard deviation over the patches."""
    patches = torch.stack([values.float() for values in parts])
    return (patches / patches.std(dim=-1, keepdim=True).clamp_min(1e-30)).mean(dim=0)
