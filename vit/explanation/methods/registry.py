"""The map methods by name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from vit.explanation.methods.gradients import (
    compute_difference_x_gradient,
    compute_fullgrad_plus,
    compute_gae,
    compute_grad_cam,
)
from vit.explanation.methods.removal import compute_removal_map
from vit.explanation.methods.rollout import check_rollout_options, compute_rollout
from vit.runtime.arguments import check_kind

if TYPE_CHECKING:
    from vit.explanation.capture.reader import ModelReader


@dataclass(frozen=True, kw_only=True)
class Method:
    """A map method: from a recorded forward pass to the relevance of each token.

    Attributes:
        name: Name of the method, as `vit.explain(methods=…)` takes it.
        title: Name in legends.
        compute: Function of a `Forward` and a class of each image [B] to the
            relevance [B, N] of each token, including prefix tokens. Its keyword
            arguments, which have defaults, are the method's options. None: the
            method is made of `parts`.
        class_specific: True if maps depend on the class.
        signed: True if negative values are evidence against the class.
        models: Models that have such maps: those with "attention" that can be
            read, others with a "feature map", or "all".
        libra: True if gradients follow the rules of LibraGrad.
        parts: Names of methods. The map is the mean of theirs, each divided by
            its standard deviation over the patches.

    Example:
        >>> vit.register_method(vit.Method(name="last", title="last layer", compute=last_layer))
    """

    name: str
    title: str
    compute: Callable[..., Any] | None = None
    class_specific: bool = True
    signed: bool = False
    models: Literal["attention", "feature map", "all"] = "attention"
    libra: bool = False
    parts: tuple[str, ...] = ()

    @cached_property
    def options(self) -> Mapping[str, inspect.Parameter]:
        """The options of the method, by name. Methods that are parts have none."""
        if self.compute is None:
            return {}
        parameters = inspect.signature(self.compute, eval_str=True).parameters
        return {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }


_BUILT_IN = (
    Method(
        name="rollout", title="attention rollout", compute=compute_rollout, class_specific=False
    ),
    Method(name="gae", title="generic attention explanation", compute=compute_gae),
    # the first choice for models without readable attention
    Method(
        name="grad-cam",
        title="Grad-CAM of the last feature map",
        compute=compute_grad_cam,
        models="feature map",
    ),
    Method(
        name="libra-fullgrad",
        title="Libra FullGrad+",
        compute=compute_fullgrad_plus,
        signed=True,
        libra=True,
    ),
    Method(
        name="libra-input-x-gradient",
        title="Libra input times gradient",
        compute=compute_difference_x_gradient,
        signed=True,
        models="all",
        libra=True,
    ),
    Method(
        name="removal-gradient",
        title="removal gradient",
        compute=compute_removal_map,
        signed=True,
    ),
    # one part each for patches that are left out, patches that are painted over, and single patches
    Method(
        name="libra-removal",
        title="Libra FullGrad+, pixels and removal gradient",
        parts=("libra-fullgrad", "libra-input-x-gradient", "removal-gradient"),
        signed=True,
    ),
)
METHODS = {method.name: method for method in _BUILT_IN}


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
        >>> vit.register_method(
        ...     vit.Method(name="last", title="last layer", compute=last_layer)
        ... )
        >>> vit.explain("runs/digits", "photo.png", methods="last")
    """
    check_kind(method, Method, name="method", expected="a vit.Method")
    # the same method again, from a module that is imported twice, is no mistake
    if METHODS.setdefault(method.name, method) != method:
        raise ValueError(f"a map method is called {method.name!r} already; give another name")


def list_methods(reader: "ModelReader | None" = None) -> list[str]:
    """Return the names of the methods for a model; None: a model with attention."""
    source = "attention" if reader is None else reader.source
    return [name for name, method in METHODS.items() if method.models in (source, "all")]


def find_methods(names: Sequence[str], reader: "ModelReader | None" = None) -> list[Method]:
    """Find methods by name.

    Args:
        names: Names of the methods.
        reader: A model that the methods must be able to explain. None: any model.

    Raises:
        ValueError: A method is unknown, or it needs what can't be read in the model.
    """
    for name in names:
        known = ", ".join(METHODS if reader is None else list_methods(reader))
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; known: {known}")
        if reader is None or name in list_methods(reader):
            continue
        reason = "is for models without readable attention"
        if not reader.has_attention:
            source = METHODS[name].models
            assert source != "all"
            reason = f"needs the model's {source}: {reader.explain_refusal(source)}"
        raise ValueError(f"{name} {reason}; {type(reader.model).__name__} has {known}")
    return [METHODS[name] for name in names]


def check_options(
    methods: Sequence[Method], options: Mapping[str, object], reader: "ModelReader"
) -> dict[str, Any]:
    """Check the values of options.

    Args:
        methods: The methods that will get them.
        options: Values by name.
        reader: The model.

    Returns:
        The options of the methods by name: their defaults, and the values in place of these.

    Raises:
        ValueError: No method has an option of this name, or its value is outside the range that the model allows.
    """
    declared = {name: option for method in methods for name, option in method.options.items()}
    values = {name: option.default for name, option in declared.items()}
    for name, value in options.items():
        if name not in declared:
            chosen = ", ".join(method.name for method in methods)
            known = ", ".join(declared) or "none"
            raise ValueError(f"{name} is no option of the methods {chosen}; known: {known}")
        values[name] = value
    if reader.has_attention:
        of_rollout = METHODS["rollout"].options
        ranged = {name: value for name, value in values.items() if name in of_rollout}
        check_rollout_options(len(reader.places), **ranged)
    return values
