"""The number that a map explains: a function of the model's outputs, for most models of one class.

Gradients explain the logit of a class or label, and the effect of removed patches is the change of
its probability. The one output of a model (regression, or a binary classifier with one logit) and
the result of a function of the outputs are taken as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.model.model_info import find_problem_type
from vit.prediction.decision import (
    compute_probabilities,
    decide_labels,
    find_class,
    rank_classes,
)
from vit.prediction.probabilities import Floats
from vit.runtime.arguments import shorten
from vit.runtime.tensors import Logits

# index or name of a class, another text that `build_target` takes, a function from outputs [B, C]
# to numbers [B], or a class for each image
TargetLike = int | str | Callable[[Any], Any] | Sequence[int | str] | Int[Tensor, " n"]
Classes = Int[Tensor, " B"]
Numbers = Float[Tensor, " B"]
# logits of classes that exclude each other, logits of labels that don't, numbers, or features
# without a classifier
OutputKind = Literal["classes", "labels", "numbers", "features"]

_MINUS = " - "
_choose_predicted = partial(torch.argmax, dim=1, keepdim=True)


@dataclass(frozen=True)
class Target:
    """A number for each image, computed from its outputs and one class: `score`, which gradients
    explain, and `value`, which shows the effect of removed patches and is monotone in it."""

    score: Callable[[Logits, Classes], Numbers]
    value: Callable[[Logits, Classes], Numbers]
    # name of a number that isn't about a class, from what is chosen
    name: Callable[[int], str] | None = None
    # the class of each image, or one for all; for a difference, the first class times C plus the
    # second; None: `predict` chooses the classes [B, T] of each image
    classes: Int[Tensor, "*n"] | None = None
    predict: Callable[[Logits], Int[Tensor, "B T"]] = _choose_predicted

    def choose(self, logits: Logits) -> Int[Tensor, "B T"]:
        """Choose the classes that are explained for each image."""
        if self.classes is None:
            return self.predict(logits)
        if self.classes.ndim == 0:
            # a number needs no copy to the device
            return torch.full((len(logits), 1), int(self.classes), device=logits.device)
        return self.classes.to(logits.device)[:, None]

    def with_classes(self, classes: Int[Tensor, "*n"]) -> "Target":
        """Return the target with a class for each image, or for all."""
        return replace(self, classes=classes)

    def select(self, rows: Sequence[int]) -> "Target":
        """Return the target of some of the images, by their numbers."""
        if self.classes is None or self.classes.ndim == 0:
            return self
        return self.with_classes(self.classes[list(rows)])


def _logit(logits: Logits, classes: Classes) -> Numbers:
    return logits.gather(1, classes[:, None])[:, 0]


def _softmax(logits: Logits, classes: Classes) -> Numbers:
    return _logit(logits.softmax(dim=1), classes)


def _sigmoid(logits: Logits, classes: Classes) -> Numbers:
    return _logit(logits, classes).sigmoid()


def _subtract(logits: Logits, pairs: Classes) -> Numbers:
    num_classes = logits.shape[1]
    return _logit(logits, pairs // num_classes) - _logit(logits, pairs % num_classes)


# gradients are those of the logit, because those of the probability vanish if the model is sure
CLASS = Target(_logit, _softmax)
LABEL = Target(_logit, _sigmoid)
# maps that are the same for every class, of a model without a classifier
FEATURES = Target(_logit, _logit, lambda _: "no classifier", torch.tensor(0))


def find_output_kind(
    model: nn.Module, class_names: Sequence[str], *, is_multilabel: bool = False
) -> OutputKind:
    """Find the kind of the outputs from their names and Hugging Face's `problem_type`."""
    if not class_names:
        return "features"
    problem = find_problem_type(model)
    if is_multilabel or (problem == "multi_label_classification" and len(class_names) > 1):
        return "labels"
    return "numbers" if len(class_names) == 1 or problem == "regression" else "classes"


def find_decided(bundle: Bundle, probabilities: Floats) -> list[list[int]]:
    """Find the class that a model predicts for each image by its thresholds, or its labels, the most
    probable first."""
    ranked = rank_classes(bundle, probabilities)
    if not bundle.is_multilabel:
        return [row[:1] for row in ranked]
    pairs = zip(ranked, decide_labels(bundle, probabilities), strict=True)
    return [[label for label in row if present[label]] for row, present in pairs]


def choose_decided(bundle: Bundle, logits: Logits) -> Int[Tensor, "B T"]:
    """Choose what a model predicts for each image, or else its most probable label. Shorter rows
    repeat their first label."""
    probabilities = compute_probabilities(bundle, logits.float().cpu().numpy())
    chosen = [
        labels or [int(row.argmax())]
        for labels, row in zip(find_decided(bundle, probabilities), probabilities, strict=True)
    ]
    width = max(map(len, chosen))
    rows = [labels + labels[:1] * (width - len(labels)) for labels in chosen]
    return torch.tensor(rows, device=logits.device)


def describe_target(target: TargetLike) -> Any:
    """Return the target as a manifest has it."""
    if callable(target):
        name = getattr(target, "__name__", "<")
        return "a function of the outputs" if name.startswith("<") else name
    if hasattr(target, "tolist"):
        return target.tolist()
    return list(map(describe_target, target)) if isinstance(target, list | tuple) else target


def build_target(
    target: TargetLike,
    class_names: Sequence[str],
    kind: OutputKind = "classes",
    *,
    num_images: int | None = None,
) -> Target:
    """Build the number that is explained, and the choice of classes. Raise ValueError if a class is
    unknown or ambiguous, the model has none, or there isn't one for each image.

    Args:
        target: "auto" (the predicted class, or the most probable label), a class's name or index;
            "A - B", the difference of two classes' logits; a function from outputs [B, C] to
            numbers [B]; or a class for each image.
        class_names: Name of each output.
        kind: Kind of the outputs.
        num_images: Number of images that need a class each.
    """
    if callable(target):
        name = str(describe_target(target))
        score = partial(_apply, target)
        return Target(score, score, lambda _: name, torch.tensor(0))
    if kind == "features":
        raise ValueError(
            f"the model has no classifier, so there is no class {target!r} to explain; target also "
            "takes a function of its features, such as lambda features: features[:, 0]"
        )
    found = LABEL if kind == "labels" else CLASS
    if kind == "numbers":
        # removed patches change the number itself
        found = Target(_logit, _logit, class_names.__getitem__)
    if hasattr(target, "tolist"):
        target = target.tolist()
    if isinstance(target, list | tuple):
        if num_images not in (None, len(target)):
            raise ValueError(f"there are {len(target)} targets for {num_images} images")
        return found.with_classes(torch.tensor([find_class(one, class_names) for one in target]))

    # a class may have such a name itself
    if target not in class_names:
        first, minus, second = str(target).partition(_MINUS)
        if minus and kind != "numbers":
            pair = (torch.tensor(find_class(side, class_names)) for side in (first, second))
            return build_difference(class_names, *pair)
        if target == "auto" and (kind != "numbers" or len(class_names) == 1):
            return found
    return found.with_classes(torch.tensor(find_class(target, class_names)))


def build_difference(
    class_names: Sequence[str], first: Int[Tensor, "*n"], second: Int[Tensor, "*n"]
) -> Target:
    """Build the difference of two classes' logits: one pair of classes, or one for each image."""
    num_classes = len(class_names)

    def name(pair: int) -> str:
        return _MINUS.join(class_names[index] for index in divmod(pair, num_classes))

    return Target(_subtract, _subtract, name, first * num_classes + second)


def _apply(function: Callable[[Tensor], Any], logits: Logits, classes: Classes) -> Numbers:
    """Compute a user's function of the outputs."""
    values = function(logits)
    # a result that keeps an axis would be broadcast over the images without an error
    if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
        raise ValueError(
            f"the target gives {shorten(repr(values))} of {len(logits)} images; it takes outputs "
            f"{list(logits.shape)} and gives a number for each image, "
            "as lambda logits: logits[:, 0] does"
        )
    return values
