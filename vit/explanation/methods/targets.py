"""Which classes a map is asked about."""

import re
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

ChooseTargets = Callable[[Float[Tensor, "B C"]], Int[Tensor, "B T"]]
_MAX_CLASSES = 100
_TOP = re.compile(r"top(\d+)")


def starts_with_predicted(target: int | str, class_names: Sequence[str]) -> bool:
    """Whether the first class that `build_target_chooser` chooses is the predicted one."""
    if str(target) in class_names:
        return False
    return target in ("auto", "all") or _TOP.fullmatch(str(target)) is not None


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
    if not starts_with_predicted(target, class_names):
        index = _find_class(target, class_names)
        return lambda logits: torch.full((len(logits), 1), index, device=logits.device)

    top = _TOP.fullmatch(str(target))
    if top is not None:
        count = int(top[1])
    elif target == "auto":
        count = 1
    else:
        count = len(class_names)
    if not 0 < count <= len(class_names):
        raise ValueError(f"class {target!r} asks for {count} of {len(class_names)} classes")
    if count > _MAX_CLASSES:
        raise ValueError(
            f"class {target!r} would draw {count} maps an image; name a class or use top3"
        )
    return lambda logits: logits.topk(count, dim=1).indices


def _find_class(target: int | str, class_names: Sequence[str]) -> int:
    """The index of a class by its name, its index or one of its synonyms."""
    if target in class_names:
        return list(class_names).index(str(target))
    name = str(target)
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
        shown = ", ".join(class_names[:20]) + (", …" if len(class_names) > 20 else "")
        known = f"auto, all, top3, 0 to {len(class_names) - 1} or {shown}"
        raise ValueError(f"unknown class {target!r}; known: {known}")
    return matches[0]
