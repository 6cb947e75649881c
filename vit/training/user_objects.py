"""What is passed to `vit.train` from Python and no configuration file can hold."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vit.data.sources.python_objects import FROM_PYTHON
from vit.data.transforms import Transform
from vit.runtime.arguments import check_kind, describe_kind
from vit.training.observers import Observer


@dataclass(frozen=True, kw_only=True, eq=False)
class UserObjects:
    """The objects among the arguments of `vit.train`; they are described there."""

    transform: Transform | None = None
    dataset: Any = None
    class_names: Sequence[str] | None = None
    model: nn.Module | None = None
    callbacks: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for what is of another kind."""
        if self.transform is not None and not callable(self.transform):
            kind = describe_kind(self.transform)
            raise ValueError(f"transform is {kind}, not a function of an image")
        if self.model is not None:
            check_kind(self.model, nn.Module, name="model", expected="an object of an nn.Module")
        expected = "a list of objects of vit.Observer's subclasses"
        check_kind(self.callbacks, (list, tuple), name="callbacks", expected=expected)
        for callback in self.callbacks:
            expected = "an object of a subclass of vit.Observer"
            check_kind(callback, Observer, name="a callback", expected=expected)

    def mark_sections(self, sections: dict[str, Any]) -> None:
        """Say in a configuration's sections what is replaced, so that its file doesn't name images
        or weights that were not used."""
        if self.dataset is not None:
            data = sections.setdefault("data", {})
            data.update(name=FROM_PYTHON, root=None, classes=None)
        if self.model is not None:
            sections.setdefault("model", {})["init"] = FROM_PYTHON

    def describe(self) -> dict[str, str | None]:
        """What tells this run from others; the images have a fingerprint of their own."""
        transform = model = None
        if self.transform is not None:
            # an object's address in memory is another one in every process
            text = re.sub(" at 0x[0-9a-f]+", "", repr(self.transform))
            transform = " ".join(text.split())
        if self.model is not None:
            model = type(self.model).__qualname__
        return {"the argument transform": transform, "the argument model": model}
