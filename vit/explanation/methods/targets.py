"""Which classes a map is asked about."""

import re
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

ChooseTargets = Callable[[Float[Tensor, "B C"]], Int[Tensor, "B T"]]
_MOST_CLASSES = 100
_TOP = r"top(\d+)"


def asks_for_predicted(target: int | str, class_names: Sequence[str]) -> bool:
    """Whether the first class that `build_target_chooser` chooses is the predicted one."""
    return str(target) not in class_names and bool(re.fullmatch(f"auto|all|{_TOP}", str(target)))


def build_target_chooser(target: int | str, class_names: Sequence[str]) -> ChooseTargets:
    """From logits to the T classes of each image that are to be explained.

    `target`: "auto" (the predicted class), a class's name or index, "all", or "top3" (any number), the most
    probable first. Raises ValueError for anything else.
    """
    if asks_for_predicted(target, class_names):
        top = re.fullmatch(_TOP, str(target))
        count = int(top[1]) if top else 1 if target == "auto" else len(class_names)
        if not 0 < count <= len(class_names):
            raise ValueError(f"class {target!r} asks for {count} of {len(class_names)} classes")
        if count > _MOST_CLASSES:
            raise ValueError(f"class {target!r} would draw {count} maps an image; name a class or use top3")
        return lambda logits: logits.topk(count, dim=1).indices
    if target in class_names:
        index = list(class_names).index(str(target))
    elif str(target).isdigit() and int(target) < len(class_names):
        index = int(target)  # no class is called so
    elif found := _find_synonym(str(target), class_names):
        if len(found) > 1:
            known = "; ".join(f"{place} ({class_names[place]})" for place in found)
            raise ValueError(f"class {target!r} is not unique: {known}; give the index")
        index = found[0]
    else:
        shown = ", ".join(class_names[:20]) + (", …" if len(class_names) > 20 else "")
        raise ValueError(f"unknown class {target!r}; known: auto, all, top3, 0 to {len(class_names) - 1} or {shown}")
    return lambda logits: torch.full((len(logits), 1), index, device=logits.device)


def _find_synonym(name: str, class_names: Sequence[str]) -> list[int]:
    """Classes called `name`, in whole or by one of the synonyms that commas separate, as ImageNet's; any case."""
    called = [{known.casefold(), *(part.strip().casefold() for part in known.split(","))} for known in class_names]
    return [place for place, names in enumerate(called) if name.casefold() in names]
