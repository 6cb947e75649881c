"""Which classes a map is asked about."""

import re
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.runtime.arguments import shorten

ChooseTargets = Callable[[Float[Tensor, "B C"]], Int[Tensor, "B T"]]
_MAX_CLASSES = 100  # whose maps are drawn of an image


def starts_with_predicted(target: int | str, class_names: Sequence[str]) -> bool:
    """Whether the first class that `build_target_chooser` chooses is the predicted one."""
    return _count_most_probable(target, class_names) is not None


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
        index = _find_class(target, class_names)
        return lambda logits: torch.full((len(logits), 1), index, device=logits.device)

    max_count = min(len(class_names), _MAX_CLASSES)
    if not 1 <= count <= max_count:
        raise ValueError(f"class {target!r} asks for {count} classes; 1 to {max_count} are drawn")
    return lambda logits: logits.topk(count, dim=1).indices


def check_one_class_each(model: nn.Module, class_names: Sequence[str]) -> None:
    """Raise ValueError for a model that doesn't choose one of several classes: the softmax of its
    logits is no probability, and maps and checks of it mean nothing."""
    if len(class_names) == 1:
        raise ValueError(
            f"{type(model).__name__} gives one number, so its softmax is always 1 and no class "
            "can be explained; of a binary classifier with the logit z take the logits (0, z)"
        )
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if problem in ("regression", "multi_label_classification"):
        raise ValueError(
            f"{type(model).__name__} is for {problem.replace('_', ' ')}, so the softmax of its "
            "logits is not a probability; maps are made for one class of several"
        )


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
