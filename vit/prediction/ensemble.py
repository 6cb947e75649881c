"""Several models whose probabilities are averaged."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from vit.bundle import Bundle, ModelLike, open_model
from vit.prediction.labels import compute_probabilities
from vit.prediction.probabilities import Float32s, chunk_rows
from vit.runtime.arguments import shorten

# Smallest probability that is kept apart from 0, and the smallest distance from 1.
_SMALLEST = 1e-37
_EPSILON = 1e-16


@dataclass(frozen=True, repr=False)
class Ensemble(Bundle):
    """Several models as one, whose probabilities are the mean of theirs (Lakshminarayanan, Pritzel &
    Blundell 2017). It has the preprocessing of the first model, and neither a temperature nor
    thresholds of its own.

    Attributes:
        members: The models, with the same classes in any order.
    """

    members: tuple[Bundle, ...] = ()


def list_members(bundle: Bundle) -> tuple[Bundle, ...]:
    """Return the models of an ensemble, or the model itself."""
    return bundle.members if isinstance(bundle, Ensemble) else (bundle,)


def open_models(
    model: ModelLike | Sequence[ModelLike],
    *,
    device: str = "auto",
    class_names: Sequence[str] | None = None,
) -> Bundle:
    """Open a model, or several as one.

    Args:
        model: One model, see `vit.bundle.open_model`, or several.
        device: See `vit.bundle.open_model`.
        class_names: See `vit.bundle.open_model`.

    Raises:
        ValueError: There is none, or they have other classes.
    """
    # a module may be a sequence, too
    if isinstance(model, str | Path | Bundle | nn.Module) or not isinstance(model, Sequence):
        return open_model(model, device=device, class_names=class_names)
    members = tuple(open_model(each, device=device, class_names=class_names) for each in model)
    if not members:
        raise ValueError("model is an empty list; name at least one model")
    first, *others = members
    if not others:
        return first
    for other in others:
        if other.is_multilabel != first.is_multilabel:
            ours, theirs = ("one class", "several labels")[:: -1 if first.is_multilabel else 1]
            raise ValueError(
                f"{first.name} predicts {ours} an image and {other.name} {theirs}; name models of one"
                " kind"
            )
        if sorted(other.class_names) != sorted(first.class_names):
            only = sorted(set(first.class_names) ^ set(other.class_names))
            raise ValueError(
                f"{first.name} and {other.name} have other classes:"
                f" {shorten(', '.join(only)) or 'equal names'} in one of them; name models with the"
                " same classes"
            )
    hashes = [member.training_hashes for member in members if member.training_hashes is not None]
    joined = None
    if len(hashes) == len(members):
        joined = (
            np.concatenate([digests for digests, _ in hashes]),
            np.concatenate([dhashes for _, dhashes in hashes]),
        )
    return Ensemble(
        model=first.model,
        preprocess=first.preprocess,
        class_names=first.class_names,
        name=" + ".join(member.name for member in members),
        sha256=hashlib.sha256("".join(member.sha256 for member in members).encode()).hexdigest(),
        data={"task": first.data.get("task")},
        training_hashes=joined,
        passed_images=first.passed_images,
        members=members,
    )


def average_logits(ensemble: Ensemble, logits: Sequence[Float32s]) -> Float32s:
    """Average the probabilities of several models, each with its temperature.

    Args:
        ensemble: The models.
        logits: Logits of each model, [n, C] each, in the order of its own classes.

    Returns:
        Logits [n, C] in the order of the first model's classes, whose softmax, or sigmoid where an
        image may have several labels, is the mean.
    """
    averaged = np.empty_like(logits[0])
    orders = [
        [member.class_names.index(name) for name in ensemble.class_names]
        for member in ensemble.members
    ]
    for rows in chunk_rows(averaged):
        probabilities = [
            compute_probabilities(member, values[rows])[:, order]
            for member, values, order in zip(ensemble.members, logits, orders, strict=True)
        ]
        mean = np.maximum(np.mean(probabilities, axis=0), _SMALLEST)
        averaged[rows] = np.log(mean)
        if ensemble.is_multilabel:
            averaged[rows] = np.log(mean) - np.log(np.maximum(1 - mean, _EPSILON))
    return averaged
