"""The number that a map explains: a function of the model's outputs, for most models of one class.

If the model chooses one of several classes, gradients explain the logit of a class, and the effect
of removed patches is the change of its probability. A label of a multi-label model has a sigmoid.
The one output of a model (regression, or a binary classifier with one logit) and the result of a
function of the outputs are taken as they are.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeGuard, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vit.bundle import Bundle
from vit.model.model_info import find_problem_type
from vit.prediction.decision import compute_probabilities as predict_probabilities
from vit.prediction.decision import decide_classes, decide_labels
from vit.prediction.probabilities import Float32s
from vit.runtime.arguments import shorten
from vit.runtime.tensors import Logits, describe_shape

# index or name of a class, another text that `build_target` takes, a function from outputs [B, C]
# to numbers [B], or a class for each image
TargetLike = int | str | Callable[[Any], Any] | Sequence[int | str] | Int[Tensor, " n"]
Classes = Int[Tensor, " B"]
ChooseClasses = Callable[[Logits], Int[Tensor, "B T"]]
# logits of classes that exclude each other, logits of labels that don't, numbers, or features
# without a classifier
OutputKind = Literal["classes", "labels", "numbers", "features"]

_MAX_CLASSES = 100  # number of classes whose maps are drawn for one image
_MINUS = " - "
_DIVIDED = "batches are divided, so pass a target for each image, as target=[3, 5] does"


def choose_predicted(logits: Logits) -> Int[Tensor, "B 1"]:
    """Choose the predicted class of each image."""
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
    """

    score: Callable[[Logits, Classes], Float[Tensor, " B"]]
    value: Callable[[Logits, Classes], Float[Tensor, " B"]]
    name: Callable[[int], str] | None = None
    choose: ChooseClasses = choose_predicted
    classes: Int[Tensor, " n"] | None = None

    def with_classes(self, classes: Int[Tensor, " n"]) -> "Target":
        """Return the target with a class for each image, whatever the model predicts."""
        return replace(self, choose=partial(_as_column, classes), classes=classes)

    def select(self, rows: Sequence[int]) -> "Target":
        """Return the target of some of the images, by their numbers."""
        if self.classes is None:
            return self
        return self.with_classes(self.classes[list(rows)])


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


def find_output_kind(
    model: nn.Module, class_names: Sequence[str], *, is_multilabel: bool = False
) -> OutputKind:
    """Find the kind of the outputs from the number of classes and Hugging Face's `problem_type`.

    Args:
        model: The model.
        class_names: Name of each output.
        is_multilabel: An image may have several labels by the model's file.
    """
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
    probabilities = predict_probabilities(bundle, logits)
    if not bundle.is_multilabel:
        return [[int(place)] for place in decide_classes(bundle, probabilities)]
    is_present = decide_labels(bundle, probabilities)
    order = np.argsort(-probabilities, axis=1, kind="stable")
    return [
        [place for place in row if present[place]]
        for row, present in zip(order.tolist(), is_present, strict=True)
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
        target: "auto" (the predicted class, or the most probable label), a class's name or index,
            "all", or "top3" (any number), the most probable first; "A - B", the difference of two
            classes' logits; a function from outputs [B, C] to numbers [B]; or a class or a
            difference for each image.
        class_names: Name of each output.
        kind: Kind of the outputs.

    Raises:
        ValueError: A class is unknown or ambiguous, there are too many, or the model has none.
    """
    if callable(target):
        return _build_function(target)
    if has_many(target):
        return _build_for_each(target, class_names, kind)
    target = cast("int | str", target)
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
        return Target(_logit, _logit, class_names.__getitem__, _choose_one(index))

    # a class may be called "A - B" itself
    if _MINUS in text and text not in class_names:
        pair = _find_difference(text, class_names)
        if pair is not None:
            return build_difference(class_names, *map(torch.tensor, pair))
    record = LABEL if kind == "labels" else CLASS
    count = _count_most_probable(target, class_names)
    if count is None:
        return replace(record, choose=_choose_one(_find_class(target, class_names)))
    max_count = min(len(class_names), _MAX_CLASSES)
    if not 1 <= count <= max_count:
        raise ValueError(f"class {target!r} asks for {count} classes; 1 to {max_count} are drawn")
    return replace(record, choose=lambda logits: logits.topk(count, dim=1).indices)


def starts_with_predicted(target: TargetLike, class_names: Sequence[str]) -> bool:
    """Return whether the first class that `build_target` chooses is the predicted one."""
    if callable(target) or has_many(target):
        return False
    return _count_most_probable(cast("int | str", target), class_names) is not None


def describe_target(target: TargetLike) -> int | str | list[int | str]:
    """Return the target as a manifest has it."""
    if callable(target):
        return str(_name_function(target))
    return list_targets(target) if has_many(target) else cast("int | str", target)


def has_many(target: TargetLike) -> TypeGuard[Sequence[int | str] | Int[Tensor, " n"]]:
    """Return whether each image has its own target."""
    is_list = isinstance(target, Sequence) or getattr(target, "ndim", 0) > 0
    return is_list and not isinstance(target, str)


def check_count(target: TargetLike, num_images: int) -> None:
    """Raise ValueError if there are more or fewer targets than images."""
    if has_many(target) and len(target) != num_images:
        raise ValueError(f"there are {len(target)} targets for {num_images} images")


def list_targets(targets: Sequence[int | str] | Int[Tensor, " n"]) -> list[int | str]:
    """Return the targets of images as a list. Raise ValueError if one is no class."""
    entries = targets.tolist() if hasattr(targets, "tolist") else list(targets)
    for entry in entries:
        if not isinstance(entry, str) and not hasattr(entry, "__index__"):
            raise ValueError(
                f"the target of an image is a name or an index, not {shorten(str(entry))}; pass a "
                "list of them, or a tensor [images] of whole numbers"
            )
    return [entry if isinstance(entry, str) else int(entry) for entry in entries]


def _logit(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
    return logits.gather(1, classes[:, None])[:, 0]


def _softmax(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
    return _logit(logits.softmax(dim=1), classes)


def _sigmoid(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
    return _logit(logits, classes).sigmoid()


# gradients are those of the logit, because those of the probability vanish if the model is sure
CLASS = Target(_logit, _softmax)
LABEL = Target(_logit, _sigmoid)


def _build_for_each(
    targets: Sequence[int | str] | Int[Tensor, " n"],
    class_names: Sequence[str],
    kind: OutputKind,
) -> Target:
    """Build the target of images that each have their own."""
    entries = list_targets(targets)
    if not entries:
        raise ValueError("there are no targets; pass one for each image")
    for entry in entries:
        if starts_with_predicted(entry, class_names):
            raise ValueError(f"the target of an image is a name or an index, not {entry!r}")
    built = {entry: build_target(entry, class_names, kind) for entry in dict.fromkeys(entries)}
    if len({target.score for target in built.values()}) > 1:
        raise ValueError("the targets of images are of one kind: classes, differences or labels")
    no_logits = torch.zeros(1, len(class_names))
    classes = [int(built[entry].choose(no_logits)) for entry in entries]
    return built[entries[0]].with_classes(torch.tensor(classes))


def _build_function(function: Callable[[Tensor], Tensor]) -> Target:
    def compute(logits: Logits, classes: Classes) -> Float[Tensor, " B"]:
        try:
            values = function(logits)
        except (IndexError, RuntimeError) as error:
            raise ValueError(
                f"the target fails for {len(logits)} images ({shorten(str(error))}); {_DIVIDED}"
            ) from error
        # a result that keeps an axis would be broadcast over the images without an error
        if not isinstance(values, Tensor) or values.shape != logits.shape[:1]:
            raise ValueError(
                f"the target gives {describe_shape(values)} of {len(logits)} images; it takes outputs "
                f"{list(logits.shape)} and gives a number for each image, "
                "as lambda logits: logits[:, 0] does"
            )
        return values

    return Target(compute, compute, lambda _: _name_function(function), _choose_one(0))


def _name_function(function: Callable[[Tensor], Tensor]) -> str:
    name = getattr(function, "name", getattr(function, "__name__", "<"))
    return "a function of the outputs" if name.startswith("<") else name


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
        return replace(target, choose=_choose_one(int(pairs)))
    return target.with_classes(pairs)


def _subtract(logits: Logits, pairs: Classes) -> Float[Tensor, " B"]:
    num_classes = logits.shape[1]
    return _logit(logits, pairs // num_classes) - _logit(logits, pairs % num_classes)


def _find_difference(text: str, class_names: Sequence[str]) -> tuple[int, int] | None:
    """Find the two classes of "A - B"; None if there are none. Names may contain the separator, so
    each place of it is tried. Raise ValueError if there are several pairs."""
    parts = text.split(_MINUS)
    pairs = set()
    for place in range(1, len(parts)):
        sides = (_MINUS.join(parts[:place]), _MINUS.join(parts[place:]))
        with suppress(ValueError):
            first, second = (_find_class(side, class_names) for side in sides)
            pairs.add((first, second))
    if len(pairs) > 1:
        raise ValueError(f"class {text!r} can be read as several differences; give the indices")
    return pairs.pop() if pairs else None


def _as_column(classes: Int[Tensor, " n"], logits: Logits) -> Int[Tensor, "B 1"]:
    return classes.to(logits.device)[:, None]


def _choose_one(index: int) -> ChooseClasses:
    return lambda logits: torch.full((len(logits), 1), index, device=logits.device)


# maps that are the same for every class, of a model without a classifier
FEATURES = Target(_logit, _logit, lambda _: "no classifier", _choose_one(0))


def _count_most_probable(target: int | str, class_names: Sequence[str]) -> int | None:
    """Return how many of the most probable classes are asked for; None if one class is named."""
    if str(target) in class_names:
        return None
    if target == "auto":
        return 1
    if target == "all":
        return len(class_names)
    if top := re.fullmatch(r"top(\d+)", str(target)):
        return int(top[1])
    return None


def _find_class(target: int | str, class_names: Sequence[str]) -> int:
    """Find the index of a class by its name, its index or one of its synonyms. A number is an
    index; a text of digits is a name if a class is called by a number."""
    name = str(target)
    are_numbers = any(class_name.isdecimal() for class_name in class_names)
    is_name = isinstance(target, str) and (are_numbers or name in class_names)
    if name.isdecimal() and int(name) < len(class_names) and not is_name:
        return int(name)
    if name in class_names:
        return list(class_names).index(name)

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
