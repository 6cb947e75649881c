"""Compute the maps of several methods from one forward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.explanation.capture.forward import (
    Forward,
    evaluation_mode,
    run_forward,
    settle_source,
)
from vit.explanation.capture.reader import ModelReader, read_model
from vit.explanation.methods.libra import LibraGradients
from vit.explanation.methods.registry import METHODS, Method, find_methods
from vit.explanation.targets import CLASS, Classes, Target
from vit.runtime.tensors import Images, Logits

Relevance = Float[Tensor, "B _ N"]  # for one class of each image, or for each class asked for


class Maps(NamedTuple):
    """Maps of one method for T classes of each image, float32; T is 1 if maps don't depend on the
    class."""

    method: Method
    values: Float[Tensor, "B T rows columns"]


@torch.inference_mode(False)
def compute_maps(
    model: nn.Module | ModelReader,
    images: Images,
    *,
    methods: Sequence[str] = ("rollout",),
    target: Target = CLASS,
    options: Mapping[str, object] | None = None,
    verify: bool = True,
) -> tuple[Forward, Int[Tensor, "B T"], list[Maps]]:
    """Compute the maps of several methods from one recorded forward pass.

    Args:
        model: A model that `run_forward` can read.
        images: Normalised images [B, 3, height, width].
        methods: Names of registered methods.
        target: The number that is explained, and the classes.
        options: Options of the methods by name. None: their defaults.
        verify: Check that maps are the model's, if that isn't known, see `settle_source`.

    Returns:
        The forward pass, the classes [B, T], and the maps in the order of `methods`.

    Raises:
        ValueError: A method is unknown, an option is outside its range, or the model can't be read.
    """
    reader = read_model(model, images)
    # weights may be in half precision
    images = images.to(next(reader.model.parameters()).dtype)
    if verify:
        settle_source(reader, images)
    chosen = find_methods(methods, reader, options=options or ())
    # each method once, also if it is part of several
    names = [name for method in chosen for name in method.parts or (method.name,)]
    computed = [METHODS[name] for name in dict.fromkeys(names)]
    relevance: dict[str, Relevance] = {}
    # layers and heads are evaluated again after the pass, in the same mode
    with evaluation_mode(reader.model):
        for libra in (True, False):
            of_pass = [method for method in computed if method.libra == libra]
            if not of_pass:
                continue
            # frees the first graph before there is another of the same size; the logits are the
            # same
            forward = None
            gradients = any(method.class_specific for method in of_pass)
            if libra:
                with LibraGradients():
                    forward = run_forward(reader, images, gradients=gradients, verify=False)
                forward.target = replace(target, score=partial(_score_by_libra, target))
            else:
                forward = run_forward(reader, images, gradients=gradients, verify=False)
                forward.target = target
            targets = target.choose(forward.logits.detach())
            for method in of_pass:
                relevance[method.name] = _compute_relevance(forward, method, targets, options or {})

        assert forward is not None
        num_prefix = forward.num_prefix_tokens
        maps = []
        for method in chosen:
            if method.parts:
                found = _combine([relevance[part] for part in method.parts], num_prefix)
            else:
                found = relevance[method.name]
            patches = torch.unflatten(found[..., num_prefix:], -1, forward.grid)
            maps.append(Maps(method, patches.float()))
        return forward, targets, maps


def _score_by_libra(target: Target, logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
    """Compute the number that is explained by LibraGrad's rules, too. A number that they make a
    constant, such as a probability, keeps its own gradient."""
    with LibraGradients():
        score = target.score(logits, classes)
    return score if score.requires_grad else target.score(logits, classes)


def _compute_relevance(
    forward: Forward, method: Method, targets: Int[Tensor, "B T"], options: Mapping[str, Any]
) -> Relevance:
    """Compute the relevance by one method: once if it is the same for every class."""
    assert method.compute is not None
    columns = targets.unbind(dim=1)[: None if method.class_specific else 1]
    own = {name: options[name] for name in method.options if name in options}
    # the forward pass may be in half precision; the products of many matrices are not
    with torch.autocast(forward.images.device.type, enabled=False), torch.enable_grad():
        found = [method.compute(forward, column, **own).detach() for column in columns]
    return torch.stack(found, dim=1)


def _combine(parts: Sequence[Relevance], num_prefix_tokens: int) -> Relevance:
    """Compute the mean of several maps, each divided by its standard deviation over the patches,
    because they differ in scale. Prefix tokens get 0."""
    patches = torch.stack([values.float()[..., num_prefix_tokens:] for values in parts])
    combined = (patches / patches.std(dim=-1, keepdim=True).clamp_min(1e-30)).mean(dim=0)
    return torch.nn.functional.pad(combined, (num_prefix_tokens, 0))
