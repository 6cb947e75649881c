"""From a batch of images to the maps of several methods, and the public function `vit.attribute`."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.bundle import ModelLike, keeps_mode, open_model
from vit.explanation.capture.discovery import evaluation_mode
from vit.explanation.capture.forward import Forward, run_forward, settle_source
from vit.explanation.capture.reader import ModelReader, read_model
from vit.explanation.methods.libra import LibraGradients
from vit.explanation.methods.registry import METHODS, Method, find_methods
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
from vit.runtime.device import run_in_memory
from vit.runtime.tensors import Images, Logits

# P patches, for each class asked for; for one if maps don't depend on the class
Relevance = Float[Tensor, "B _ P"]


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
