"""The map methods by name."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vit.explanation.capture.reader import ModelReader, Source
from vit.explanation.methods.gradients import (
    compute_difference_x_gradient,
    compute_fullgrad_plus,
    compute_gae,
    compute_grad_cam,
    compute_removal_map,
)
from vit.explanation.methods.rollout import compute_rollout
from vit.runtime.arguments import check_choice


@dataclass(frozen=True, kw_only=True)
class Method:
    """A map method: from a recorded forward pass to the relevance of each token.

    Attributes:
        name: Name of the method, as `vit.explain(methods=…)` takes it.
        compute: Function of a `Forward` and a class of each image [B] to the
            relevance [B, N] of each token, including prefix tokens. Its keyword
            arguments, which have defaults, are the method's options. None: the
            method is made of `parts`.
        class_specific: True if maps depend on the class.
        signed: True if negative values are evidence against the class.
        models: Sources of its maps: "attention"; without it, a "feature map";
            where models are averaged, "pixels".
        libra: True if gradients follow the rules of LibraGrad.
        parts: Names of methods. The map is the mean of theirs, each divided by
            its standard deviation over the patches.

    Example:
        >>> vit.register_method(vit.Method(name="last", compute=last_layer))
    """

    name: str
    compute: Callable[..., Any] | None = None
    class_specific: bool = True
    signed: bool = False
    models: tuple[Source, ...] = ("attention",)
    libra: bool = False
    parts: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """Names of the options of the method."""
        if self.compute is None:
            return []
        parameters = inspect.signature(self.compute).parameters.values()
        return [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]


METHODS: dict[str, Method] = {}


def register_method(method: Method) -> None:
    """Add a map method, which `vit.explain`, `vit explain`, the gallery and
    `vit.measure_faithfulness` then know by its name.

    Args:
        method: The method.

    Raises:
        ValueError: Another method has this name.

    Example:
        >>> def last_layer(forward, classes):  # relevance of each token [B, N]
        ...     layer = forward.record.layers[-1]
        ...     return layer.attend(forward.pool_weights).mean(dim=1)
        >>> vit.register_method(vit.Method(name="last", compute=last_layer))
        >>> vit.explain("runs/digits", "photo.png", methods="last")
    """
    # the same method again, from a module that is imported twice, is no mistake
    if METHODS.setdefault(method.name, method) != method:
        raise ValueError(f"a map method is called {method.name!r} already; give another name")


for _method in (
    Method(name="rollout", compute=compute_rollout, class_specific=False),
    Method(name="gae", compute=compute_gae),
    Method(name="grad-cam", compute=compute_grad_cam, models=("feature map",)),
    Method(name="libra-fullgrad", compute=compute_fullgrad_plus, signed=True, libra=True),
    Method(
        name="libra-input-x-gradient",
        compute=compute_difference_x_gradient,
        models=("attention", "pixels"),
        signed=True,
        libra=True,
    ),
    Method(name="removal-gradient", compute=compute_removal_map, signed=True),
    # one part each for patches that are left out, patches that are painted over, and single patches
    Method(
        name="libra-removal",
        parts=("libra-fullgrad", "libra-input-x-gradient", "removal-gradient"),
        signed=True,
    ),
):
    register_method(_method)


def list_methods(source: Source = "attention") -> list[str]:
    """Return the names of the methods for maps that are read from this source."""
    return [name for name, method in METHODS.items() if source in method.models]


def find_methods(
    names: Sequence[str], reader: ModelReader | None = None, *, options: Iterable[str] = ()
) -> list[Method]:
    """Find methods by name. Raise ValueError if one is unknown or needs what can't be read in the
    model, or if none of them has one of the options."""
    if not names:
        raise ValueError("methods is empty; name at least one")
    known = list(METHODS) if reader is None else list_methods(reader.source)
    for name in names:
        if reader is not None and name in METHODS and name not in known:
            reason = f" ({reader.found.refusal})" if reader.found.refusal else ""
            model, has = type(reader.model).__name__, ", ".join(known)
            raise ValueError(f"{name} is no method for {model}{reason}, which has {has}")
        check_choice(name, known, name="method")
    methods = [METHODS[name] for name in names]
    declared = [option for method in methods for option in method.options]
    for option in options:
        check_choice(option, declared, name=f"option of {', '.join(names)}")
    return methods
