"""Compute the maps of several methods from one forward pass."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.explanation.capture.discovery import evaluation_mode
from vit.explanation.capture.forward import Forward, run_forward, settle_source
from vit.explanation.capture.reader import ModelReader, read_model
from vit.explanation.methods.libra import LibraGradients
from vit.explanation.methods.registry import METHODS, Method, find_methods
from vit.explanation.targets import CLASS, Classes, Target
from vit.runtime.tensors import Images, Logits

# P patches, for each class asked for; for one if maps don't depend on the class
Relevance = Float[Tensor, "B _ P"]


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
    Return the pass, the classes [B, T], and the maps of each of the `methods`, float32.

    Raises ValueError if a method or option is unknown, or the model can't be read, which is checked
    once for a reader, see `settle_source`.
    """
    reader = read_model(model, images)
    # weights may be in half precision
    images = images.to(next(reader.model.parameters()).dtype)
    settle_source(reader, images)
    options = options or {}
    chosen = find_methods(methods, reader, options=options)
    # each method once, also if it is part of several
    names = [name for method in chosen for name in method.parts or (method.name,)]
    found: dict[str, Relevance] = {}
    # layers and heads are evaluated again after the pass, in the same mode
    with evaluation_mode(reader.model):
        for libra in (True, False):
            computed = [METHODS[name] for name in dict.fromkeys(names)]
            computed = [method for method in computed if method.libra == libra]
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


def _score_by_libra(target: Target, logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
    """Compute the number that is explained by LibraGrad's rules, too. A number that they make a
    constant, such as a probability, keeps its own gradient."""
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
    """Compute the mean of several maps, each divided by its standard deviation over the patches,
    because they differ in scale."""
    patches = torch.stack([values.float() for values in parts])
    return (patches / patches.std(dim=-1, keepdim=True).clamp_min(1e-30)).mean(dim=0)
