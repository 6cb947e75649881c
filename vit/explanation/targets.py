"""The number that a map explains: a function of the model's outputs, for most models of one class.

If the model chooses one of several classes, the number is the logit of a class, and the effect of
removed patches is the change of its probability. The probability of a label in a multi-label model
is a sigmoid. The output of a model with one output (regression, or a binary classifier with one
logit) and the result of a function of the outputs are taken as they are.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vit.runtime.arguments import shorten
from vit.runtime.tensors import Logits

# index or name of a class, another text that `build_target` takes, or a function from outputs
# [B, C] to numbers [B]
TargetLike = int | str | Callable[[Any], Any]
Classes = Int[Tensor, " B"]
ChooseClasses = Callable[[Logits], Int[Tensor, "B T"]]
# logits of classes that exclude each other, logits of labels that don't, numbers, or features
# without a classifier
OutputKind = Literal["classes", "labels", "numbers", "features"]

_MAX_CLASSES = 100  # number of classes whose maps are drawn for one image
_MINUS = " - "
_SIGMOID = "sigmoid:"


def choose_predicted(logits: Logits) -> Int[Tensor, "B 1"]:
    """Choose the predicted class of each image."""
    return logits.argmax(dim=1, keepdim=True)


@dataclass(frozen=True)
class Target:
    """A number for each image, computed from its outputs and one class.

    Attributes:
        score: Compute the number that gradients explain.
        value: Compute the number that shows the effect of removed patches; monotone in `score`.
        name: Name of a number that isn't about a class.
        choose: Choose the classes [B, T] of each image. A number that isn't about a class has one
            column of any value.
    """

    score: Callable[[Logits, Classes], Float[Tensor, " B"]]
    value: Callable[[Logits, Classes], Float[Tensor, " B"]]
    name: str | None = None
    choose: ChooseClasses = choose_predicted


class CosineTarget:
    """Cosine similarity of a model's features with an embedding, as a target
    of `vit.explain`.

    Args:
        embedding: D numbers for a model with D features, for example the
            features of another image by a timm model without a classifier
            (`num_classes=0`).

    Raises:
        ValueError: It is called with another number of features.

    Example:
        >>> target = vit.CosineTarget(model(query)[0])  # query: [1, 3, H, W]
        >>> vit.explain(model, "photos", target=target)
    """

    name = "cosine similarity"

    def __init__(self, embedding: Float[Tensor, " D"]) -> None:
        self.embedding = embedding.detach().flatten()

    def __call__(self, features: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        """Compute the cosine of each image's features with the embedding."""
        if features.shape[1] != len(self.embedding):
            raise ValueError(
                f"an embedding of {len(self.embedding)} numbers has no cosine with "
                f"{features.shape[1]} features; take the features of the same model"
            )
        return F.cosine_similarity(features, self.embedding.to(features)[None], dim=1)


def find_output_kind(model: nn.Module, class_names: Sequence[str]) -> OutputKind:
    """Find the kind of the outputs from the number of classes and Hugging Face's `problem_type`."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if not class_names:
        return "features"
    if len(class_names) == 1 or problem == "regression":
        return "numbers"
    return "labels" if problem == "multi_label_classification" else "classes"


def compute_probabilities(logits: Logits, kind: OutputKind) -> Float[Tensor, "B _"]:
    """Compute the probability of each class or label, [B, C]; [B, 0] if the outputs are no
    logits."""
    match kind:
        case "classes":
            return logits.softmax(dim=1)
        case "labels":
            return logits.sigmoid()
        case _:
            return logits[:, :0]


def build_target(
    target: TargetLike, class_names: Sequence[str], kind: OutputKind = "classes"
) -> Target:
    """Build the number that is explained, and the choice of classes.

    Args:
        target: "auto" (the predicted class), a class's name or index, "all", or "top3" (any
            number), the most probable first; "A - B", the difference of two classes' logits;
            "sigmoid:A", one label of a multi-label model; or a function from outputs [B, C] to
            numbers [B].
        class_names: Name of each output.
        kind: Kind of the outputs.

    Raises:
        ValueError: A class is unknown or ambiguous, there are too many, or the model has none.
    """
    if callable(target):
        return _build_function(target)
    if kind == "features":
        raise ValueError(
            f"the model has no classifier, so there is no class {target!r} to explain; target also "
            "takes a function of its features, such as vit.CosineTarget(embedding)"
        )
    text = str(target)
    if kind == "numbers":
        if target == "auto" and len(class_names) > 1:
            names = shorten(", ".join(class_names))
            raise ValueError(f"the model gives several numbers; which is to be explained? {names}")
        index = 0 if target == "auto" else _find_class(target, class_names)
        return Target(_logit, _logit, class_names[index], _choose_one(index))

    # a class may be called "A - B" or "sigmoid:A" itself
    is_named = text in class_names
    if text.startswith(_SIGMOID) and not is_named:
        name = text.removeprefix(_SIGMOID)
        return replace(LABEL, choose=_choose_one(_find_class(name, class_names)))
    if _MINUS in text and not is_named:
        pair = _find_difference(text, class_names)
        if pair is not None:
            return _build_difference(*pair, class_names)
    chosen = LABEL if kind == "labels" else CLASS
    return replace(chosen, choose=_build_choice(target, class_names))


def starts_with_predicted(target: TargetLike, class_names: Sequence[str]) -> bool:
    """Return whether the first class that `build_target` chooses is the predicted one."""
    return not callable(target) and _count_most_probable(target, class_names) is not None


def describe_target(target: TargetLike) -> int | str:
    """Return the target as a manifest has it."""
    return str(_name_function(target)) if callable(target) else target


def _build_choice(target: int | str, class_names: Sequence[str]) -> ChooseClasses:
    """Build a function from logits to the classes of each image that are explained."""
    count = _count_most_probable(target, class_names)
    if count is None:
        return _choose_one(_find_class(target, class_names))

    max_count = min(len(class_names), _MAX_CLASSES)
    if not 1 <= count <= max_count:
        raise ValueError(f"class {target!r} asks for {count} classes; 1 to {max_count} are drawn")
    return lambda logits: logits.topk(count, dim=1).indices


def _logit(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
    return logits.gather(1, classes[:, None])[:, 0]


def _softmax(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
    return _logit(logits.softmax(dim=1), classes)


def _sigmoid(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
    return _logit(logits, classes).sigmoid()


# gradients are those of the logit, because those of the probability vanish if the model is sure
CLASS = Target(_logit, _softmax)
LABEL = Target(_logit, _sigmoid)


def _build_function(function: Callable[[Tensor], Tensor]) -> Target:
    def compute(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
        values = function(logits)
        # a result that keeps an axis would be broadcast over the images without an error
        if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"the target gives {shape} of {len(logits)} images; it takes outputs "
                f"{list(logits.shape)} and gives a number for each image, "
                "as lambda logits: logits[:, 0] does"
            )
        return values

    return Target(compute, compute, _name_function(function), _choose_one(0))


def _name_function(function: Callable[[Tensor], Tensor]) -> str:
    name = getattr(function, "name", getattr(function, "__name__", "<"))
    return "a function of the outputs" if name.startswith("<") else name


def _build_difference(first: int, second: int, class_names: Sequence[str]) -> Target:
    def compute(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
        return logits[:, first] - logits[:, second]

    name = f"{class_names[first]}{_MINUS}{class_names[second]}"
    return Target(compute, compute, name, _choose_one(0))


def _find_difference(text: str, class_names: Sequence[str]) -> tuple[int, int] | None:
    """Find the two classes of "A - B"; None if there are none. Names may contain the separator, so
    each place of it is tried. Raise ValueError if there are several pairs."""
    pairs = set()
    for match in re.finditer(re.escape(_MINUS), text):
        sides = (text[: match.start()], text[match.end() :])
        try:
            first, second = (_find_class(side, class_names) for side in sides)
        except ValueError:
            continue
        pairs.add((first, second))
    if len(pairs) > 1:
        raise ValueError(f"class {text!r} can be read as several differences; give the indices")
    return pairs.pop() if pairs else None


def _choose_one(index: int) -> ChooseClasses:
    return lambda logits: torch.full((len(logits), 1), index, device=logits.device)


def _count_most_probable(target: int | str, class_names: Sequence[str]) -> int | None:
    """Return how many of the most probable classes are asked for; None if one class is named."""
    if str(target) in class_names:
        return None
    if target == "all":
        return len(class_names)
    top = re.fullmatch(r"top(\d+)", str(target))
    if top is not None:
        return int(top[1])
    return 1 if target == "auto" else None


def _find_class(target: int | str, class_names: Sequence[str]) -> int:
    """Find the index of a class by its name, its index or one of its synonyms. A number is an
    index; a text of digits is a name if classes are called by numbers."""
    if not isinstance(target, str) and 0 <= target < len(class_names):
        return int(target)
    name = str(target)
    if name in class_names:
        return list(class_names).index(name)
    are_numbers = all(class_name.isdecimal() for class_name in class_names)
    if name.isdigit() and int(name) < len(class_names) and not are_numbers:
        return int(name)

    # ImageNet's classes have synonyms, separated by commas; case doesn't matter
    matches = []
    for index, class_name in enumerate(class_names):
        synonyms = [class_name, *(synonym.strip() for synonym in class_name.split(","))]
        if name.casefold() in [synonym.casefold() for synonym in synonyms]:
            matches.append(index)
    if len(matches) > 1:
        choices = "; ".join(f"{index} ({class_names[index]})" for index in matches)
        raise ValueError(f"class {target!r} is not unique: {choices}; give the index")
    if not matches:
        indices = "" if are_numbers else f"0 to {len(class_names) - 1} or "
        known = f"auto, all, top3, {indices}{', '.join(class_names)}"
        raise ValueError(f"unknown class {target!r}; known: {shorten(known)}")
    return matches[0]
