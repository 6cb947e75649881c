"""What a map is asked about: a number that is made of the model's outputs, of a class in most cases.

Where the model chooses one of several classes, that is the logit of a class, and what removing
patches does is measured by its probability. Of several labels that don't exclude each other the
probability is a sigmoid; one number (regression, or a binary classifier with one logit) is taken as
it is, and so is what a function makes of the outputs.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vit.options import TargetLike
from vit.runtime.arguments import shorten
from vit.runtime.tensors import Logits

Classes = Int[Tensor, " B"]
ChooseTargets = Callable[[Logits], Int[Tensor, "B T"]]
# what the outputs of a model are: logits of classes that exclude each other, logits of labels that
# don't, numbers, or features without a classifier
OutputKind = Literal["classes", "labels", "numbers", "features"]

_MAX_CLASSES = 100  # whose maps are drawn of an image
_MINUS = " - "
_SIGMOID = "sigmoid:"


@dataclass(frozen=True)
class Target:
    """A number of each image, of its outputs and one class.

    Args:
        score: what gradients explain.
        value: what removing patches is measured by; monotone in `score`.
        name: of what is no probability of a class.
    """

    score: Callable[[Logits, Classes], Float[Tensor, " B"]]
    value: Callable[[Logits, Classes], Float[Tensor, " B"]]
    name: str | None = None


class CosineTarget:
    """The cosine similarity of a model's features with an embedding, to be explained:
    `vit.explain(model, images, target=vit.CosineTarget(embedding))`.

    Args:
        embedding: of D numbers, as the model gives D features: a timm model without a classifier
            (`num_classes=0`), for example, and its features of another image.

    Raises:
        ValueError: when it is called with another number of features than the embedding has.

    Example:
        >>> target = vit.CosineTarget(model(query)[0])  # model gives features, query is [1, 3, H, W]
        >>> vit.explain(model, "photos", target=target)
    """

    name = "cosine similarity"

    def __init__(self, embedding: Float[Tensor, " D"]) -> None:
        self.embedding = embedding.detach().flatten()

    def __call__(self, features: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        """The cosine of each image's features with the embedding."""
        if features.shape[1] != len(self.embedding):
            raise ValueError(
                f"an embedding of {len(self.embedding)} numbers has no cosine with "
                f"{features.shape[1]} features; take the features of the same model"
            )
        return F.cosine_similarity(features, self.embedding.to(features)[None], dim=1)


def find_output_kind(model: nn.Module, class_names: Sequence[str]) -> OutputKind:
    """What the outputs are, by the number of classes and Hugging Face's `problem_type`."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if not class_names:
        return "features"
    if len(class_names) == 1 or problem == "regression":
        return "numbers"
    return "labels" if problem == "multi_label_classification" else "classes"


def compute_probabilities(logits: Logits, kind: OutputKind) -> Float[Tensor, "B _"]:
    """Of each class or label, [B, C]; [B, 0] of outputs that are no logits."""
    match kind:
        case "classes":
            return logits.softmax(dim=1)
        case "labels":
            return logits.sigmoid()
        case _:
            return logits[:, :0]


def build_target(
    target: TargetLike, class_names: Sequence[str], kind: OutputKind = "classes"
) -> tuple[Target, ChooseTargets]:
    """The number that is explained, and of which classes.

    Args:
        target: "auto" (the predicted class), a class's name or index, "all", or "top3" (any number),
            the most probable first; "A - B", the difference of two classes' logits; "sigmoid:A", a
            label that others don't exclude; or a function from outputs [B, C] to numbers [B].
        class_names: of the model.
        kind: of its outputs.

    Returns:
        The target, and a function from logits [B, C] to classes [B, T]; of a target that isn't of a
        class, whatever is in its one column.

    Raises:
        ValueError: for an unknown or ambiguous class, for too many, and for a class of a model
            without classes.
    """
    if callable(target):
        return _build_function(target), _choose_nothing
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
        return Target(_logit, _logit, class_names[index]), _choose_one(index)

    is_named = text in class_names
    if text.startswith(_SIGMOID) and not is_named:
        name = text.removeprefix(_SIGMOID)
        return LABEL, _choose_one(_find_class(name, class_names))
    if _MINUS in text and not is_named:
        pair = _find_difference(text, class_names)
        if pair is not None:
            return _build_difference(*pair, class_names), _choose_nothing

    chosen = LABEL if kind == "labels" else CLASS
    return chosen, build_target_chooser(target, class_names)


def starts_with_predicted(target: TargetLike, class_names: Sequence[str]) -> bool:
    """Whether the first class that `build_target` chooses is the predicted one."""
    return not callable(target) and _count_most_probable(target, class_names) is not None


def describe_target(target: TargetLike) -> int | str:
    """What a manifest says of it."""
    return str(_name_function(target)) if callable(target) else target


def build_target_chooser(target: int | str, class_names: Sequence[str]) -> ChooseTargets:
    """From logits to the classes of each image that are to be explained.

    Args:
        target: "auto" (the predicted class), a class's name or index, "all", or "top3" (any
            number), the most probable first.
        class_names: of the model.

    Returns:
        A function from logits [B, C] to classes [B, T].

    Raises:
        ValueError: for an unknown or ambiguous class, and for too many.
    """
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


# one class of several, and one label beside others: gradients of the probability would vanish where
# the model is sure
CLASS = Target(_logit, _softmax)
LABEL = Target(_logit, _sigmoid)


def _build_function(function: Callable[[Tensor], Tensor]) -> Target:
    def compute(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
        values = function(logits)
        if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"the target gives {shape} of {len(logits)} images; it takes outputs "
                f"{list(logits.shape)} and gives a number for each image, "
                "as lambda logits: logits[:, 0] does"
            )
        return values

    return Target(compute, compute, _name_function(function))


def _name_function(function: Callable[[Tensor], Tensor]) -> str:
    name = getattr(function, "name", getattr(function, "__name__", "<"))
    return "a function of the outputs" if name.startswith("<") else name


def _build_difference(first: int, second: int, class_names: Sequence[str]) -> Target:
    def compute(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
        return logits[:, first] - logits[:, second]

    return Target(compute, compute, f"{class_names[first]}{_MINUS}{class_names[second]}")


def _find_difference(text: str, class_names: Sequence[str]) -> tuple[int, int] | None:
    """The two classes of "A - B". Names may contain the separator: wherever it stands, both sides
    must be classes. Raises ValueError where several pairs are; None where none is."""
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


def _choose_one(index: int) -> ChooseTargets:
    return lambda logits: torch.full((len(logits), 1), index, device=logits.device)


def _choose_nothing(logits: Logits) -> Int[Tensor, "B 1"]:
    """A column for a target that reads no class."""
    return torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)


def _count_most_probable(target: int | str, class_names: Sequence[str]) -> int | None:
    """How many of the most probable classes are asked for; None where one class is named."""
    if str(target) in class_names:
        return None
    if target == "all":
        return len(class_names)
    top = re.fullmatch(r"top(\d+)", str(target))
    if top is not None:
        return int(top[1])
    return 1 if target == "auto" else None


def _find_class(target: int | str, class_names: Sequence[str]) -> int:
    """The index of a class by its name, its index or one of its synonyms."""
    name = str(target)
    if name in class_names:
        return list(class_names).index(name)
    if name.isdigit() and int(name) < len(class_names):
        return int(name)

    # a class may have synonyms, separated by commas, as ImageNet's have; any case
    matches = []
    for index, class_name in enumerate(class_names):
        synonyms = [class_name, *(synonym.strip() for synonym in class_name.split(","))]
        if name.casefold() in [synonym.casefold() for synonym in synonyms]:
            matches.append(index)
    if len(matches) > 1:
        choices = "; ".join(f"{index} ({class_names[index]})" for index in matches)
        raise ValueError(f"class {target!r} is not unique: {choices}; give the index")
    if not matches:
        known = f"auto, all, top3, 0 to {len(class_names) - 1} or {', '.join(class_names)}"
        raise ValueError(f"unknown class {target!r}; known: {shorten(known)}")
    return matches[0]
