"""The number that a map explains: a function of the model's outputs, for most models of one class.

If the model chooses one of several classes, gradients explain the logit of a class, and the effect
of removed patches is the change of its probability. A label of a multi-label model has a sigmoid.
The one output of a model (regression, or a binary classifier with one logit) and the result of a
function of the outputs are taken as they are.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.model.model_info import find_problem_type
from vit.prediction.decision import compute_probabilities, decide_classes, decide_labels
from vit.prediction.probabilities import Float32s
from vit.runtime.arguments import shorten
from vit.runtime.tensors import Logits, describe_shape

# index or name of a class, another text that `build_target` takes, a function from outputs [B, C]
# to numbers [B], or a class for each image
TargetLike = int | str | Callable[[Any], Any] | Sequence[int | str] | Int[Tensor, " n"]
Classes = Int[Tensor, " B"]
Numbers = Float[Tensor, " B"]
# logits of classes that exclude each other, logits of labels that don't, numbers, or features
# without a classifier
OutputKind = Literal["classes", "labels", "numbers", "features"]

_MAX_CLASSES = 100  # number of classes whose maps are drawn for one image
_MINUS = " - "


def _choose_predicted(logits: Logits) -> Int[Tensor, "B 1"]:
    return logits.argmax(dim=1, keepdim=True)


@dataclass(frozen=True)
class Target:
    """A number for each image, computed from its outputs and one class.

    Attributes:
        score: Compute the number that gradients explain.
        value: Compute the number that shows the effect of removed patches; monotone in `score`.
        name: Name of a number that isn't about a class, from what `choose` chooses.
        choose: Choose the classes [B, T] of each image. A number that isn't about a class has one
            column, in which a difference has the first class times C plus the second.
        classes: The column that is chosen, if each image has its own target.
        predicted_first: The first class that is chosen is the predicted one.
    """

    score: Callable[[Logits, Classes], Numbers]
    value: Callable[[Logits, Classes], Numbers]
    name: Callable[[int], str] | None = None
    choose: Callable[[Logits], Int[Tensor, "B T"]] = _choose_predicted
    classes: Int[Tensor, " n"] | None = None
    predicted_first: bool = False

    def with_classes(self, classes: Int[Tensor, " n"]) -> "Target":
        """Return the target with a class for each image, whatever the model predicts."""
        return replace(
            self, choose=lambda logits: classes.to(logits.device)[:, None], classes=classes
        )

    def with_class(self, index: int) -> "Target":
        """Return the target with one class for all images."""
        return replace(
            self, choose=lambda logits: torch.full((len(logits), 1), index, device=logits.device)
        )

    def select(self, rows: Sequence[int]) -> "Target":
        """Return the target of some of the images, by their numbers."""
        if self.classes is None:
            return self
        return self.with_classes(self.classes[list(rows)])


def find_output_kind(
    model: nn.Module, class_names: Sequence[str], *, is_multilabel: bool = False
) -> OutputKind:
    """Find the kind of the outputs from their names, Hugging Face's `problem_type`, and whether an
    image may have several labels by the model's file."""
    if not class_names:
        return "features"
    if is_multilabel:
        return "labels"
    problem = find_problem_type(model)
    if len(class_names) == 1 or problem == "regression":
        return "numbers"
    return "labels" if problem == "multi_label_classification" else "classes"


def find_decided(bundle: Bundle, logits: Float32s) -> list[list[int]]:
    """Find the labels that a model predicts for each image, the most probable first, or its class.

    Args:
        bundle: The model, with its temperature and thresholds.
        logits: [n, C].
    """
    probabilities = compute_probabilities(bundle, logits)
    if not bundle.is_multilabel:
        return [[int(place)] for place in decide_classes(bundle, probabilities)]
    order = np.argsort(-probabilities, axis=1, kind="stable")
    return [
        [place for place in row if present[place]]
        for row, present in zip(order.tolist(), decide_labels(bundle, probabilities), strict=True)
    ]


def choose_decided(bundle: Bundle, logits: Logits) -> Int[Tensor, "B T"]:
    """Choose what a model predicts by its thresholds: the class of each image, or its labels, the
    most probable first (without any, the most probable label). Shorter rows repeat their first
    label."""
    values = logits.float().cpu().numpy()
    chosen = [
        labels[:_MAX_CLASSES] or [int(row.argmax())]
        for labels, row in zip(find_decided(bundle, values), values, strict=True)
    ]
    width = max(map(len, chosen))
    rows = [labels + labels[:1] * (width - len(labels)) for labels in chosen]
    return torch.tensor(rows, device=logits.device)


def list_targets(target: TargetLike, num_images: int) -> TargetLike:
    """Return a target for each image as a list, and other targets as they are. Raise ValueError if
    there are more or fewer than images."""
    if hasattr(target, "tolist"):
        target = target.tolist()
    if isinstance(target, list | tuple) and len(target) != num_images:
        raise ValueError(f"there are {len(target)} targets for {num_images} images")
    return target


def describe_target(target: TargetLike) -> Any:
    """Return the target as a manifest has it."""
    name: str = getattr(target, "__name__", "<")
    if callable(target):
        return "a function of the outputs" if name.startswith("<") else name
    return target


def build_target(
    target: TargetLike, class_names: Sequence[str], kind: OutputKind = "classes"
) -> Target:
    """Build the number that is explained, and the choice of classes.

    Args:
        target: "auto" (the predicted class, or the most probable label), a class's name or index,
            "all", or "top3" (any number), the most probable first; "A - B", the difference of two
            classes' logits; a function from outputs [B, C] to numbers [B]; or a list of a class
            for each image.
        class_names: Name of each output.
        kind: Kind of the outputs.

    Raises:
        ValueError: A class is unknown or ambiguous, there are too many, or the model has none.
    """
    if callable(target):
        score = partial(_apply, target)
        return Target(score, score, lambda _: str(describe_target(target))).with_class(0)
    if kind == "features":
        raise ValueError(
            f"the model has no classifier, so there is no class {target!r} to explain; target also "
            "takes a function of its features, such as lambda features: features[:, 0]"
        )
    record = Target(_logit, _VALUES[kind])
    # removed patches change the number itself
    if kind == "numbers":
        record = replace(record, name=class_names.__getitem__)
        if target == "auto" and len(class_names) == 1:
            return record.with_class(0)
    if isinstance(target, list | tuple):
        classes = [_find_class(entry, class_names) for entry in target]
        return record.with_classes(torch.tensor(classes))

    text = str(target)
    top = re.fullmatch(r"top(\d+)|auto|all", text)
    # a class may have such a name itself
    if text not in class_names and kind != "numbers":
        first, minus, second = text.partition(_MINUS)
        if minus:
            pair = (_find_class(side, class_names) for side in (first, second))
            return build_difference(class_names, *map(torch.tensor, pair))
        if top:
            count = int(top[1] or {"auto": 1}.get(text, len(class_names)))
            max_count = min(len(class_names), _MAX_CLASSES)
            if not 1 <= count <= max_count:
                raise ValueError(f"{text} asks for {count} classes; 1 to {max_count} are drawn")
            chosen = replace(record, choose=lambda logits: logits.topk(count, dim=1).indices)
            return replace(chosen, predicted_first=True)
    return record.with_class(_find_class(target, class_names))


def build_difference(
    class_names: Sequence[str], first: Int[Tensor, "*n"], second: Int[Tensor, "*n"]
) -> Target:
    """Build the difference of two classes' logits: one pair of classes, or one for each image."""
    num_classes = len(class_names)

    def name(pair: int) -> str:
        return _MINUS.join(class_names[index] for index in divmod(pair, num_classes))

    pairs = first * num_classes + second
    target = Target(_subtract, _subtract, name)
    if pairs.ndim == 0:
        return target.with_class(int(pairs))
    return target.with_classes(pairs)


def _logit(logits: Logits, classes: Classes) -> Numbers:
    return logits.gather(1, classes[:, None])[:, 0]


def _softmax(logits: Logits, classes: Classes) -> Numbers:
    return _logit(logits.softmax(dim=1), classes)


def _sigmoid(logits: Logits, classes: Classes) -> Numbers:
    return _logit(logits, classes).sigmoid()


def _subtract(logits: Logits, pairs: Classes) -> Numbers:
    num_classes = logits.shape[1]
    return _logit(logits, pairs // num_classes) - _logit(logits, pairs % num_classes)


def _apply(function: Callable[[Tensor], Any], logits: Logits, classes: Classes) -> Numbers:
    """Compute a user's function of the outputs."""
    values = function(logits)
    # a result that keeps an axis would be broadcast over the images without an error
    if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
        raise ValueError(
            f"the target gives {describe_shape(values)} of {len(logits)} images; it takes outputs "
            f"{list(logits.shape)} and gives a number for each image, "
            "as lambda logits: logits[:, 0] does"
        )
    return values


_VALUES = {"classes": _softmax, "labels": _sigmoid, "numbers": _logit}
# gradients are those of the logit, because those of the probability vanish if the model is sure
CLASS = Target(_logit, _softmax)
LABEL = Target(_logit, _sigmoid)
# maps that are the same for every class, of a model without a classifier
FEATURES = Target(_logit, _logit, lambda _: "no classifier").with_class(0)


def _find_class(target: Any, class_names: Sequence[str]) -> int:
    """Find the index of a class by its name, its index or one of its synonyms. A number is an
    index; a text of digits is a name if a class is called by a number."""
    name = str(target)
    are_numbers = any(class_name.isdecimal() for class_name in class_names)
    is_name = isinstance(target, str) and (are_numbers or name in class_names)
    if name.isdecimal() and int(name) < len(class_names) and not is_name:
        return int(name)
    matches = [index for index, class_name in enumerate(class_names) if class_name == name][:1]
    if not matches:
        # ImageNet's classes have synonyms, separated by commas; case doesn't matter
        for index, class_name in enumerate(class_names):
            synonyms = [class_name, *re.split(r"\s*,\s*", class_name)]
            if name.casefold() in map(str.casefold, synonyms):
                matches.append(index)
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = "; ".join(f"{index} ({class_names[index]})" for index in matches)
        raise ValueError(f"class {target!r} is not unique: {choices}; give the index")
    indices = "" if are_numbers else f"0 to {len(class_names) - 1} or "
    known = shorten(indices + ", ".join(class_names))
    raise ValueError(f"unknown class {target!r}; known: {known}")
