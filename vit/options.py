"""The options of each command and of the function behind it, typed once.

The command line's parameters are generated from these records (`vit.cli.parameters`): an option's
help is its text under `Args:`. The functions of `vit.api` make a record from their arguments, and
what they call takes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from vit.runtime.arguments import shorten

Record = TypeVar("Record")
# a class's index or name, other words of `vit.explanation.targets`, or a function from
# outputs [B, C] to numbers [B]
TargetLike = int | str | Callable[[Any], Any]


class Option(NamedTuple):
    """How a field appears on the command line."""

    # by default the field's name
    flag: str = ""
    min: float | None = None
    max: float | None = None
    # set by --option NAME=VALUE, as all fields of a record within a record
    is_rare: bool = False


@dataclass(frozen=True, kw_only=True)
class MapOptions:
    """Options of the map methods; each method uses those that concern it.

    Args:
        head_fusion: rollout: mean, max or min
        discard_ratio: rollout: fraction of the weakest attention dropped
        residual: rollout: weight of the residual connection
        start_layer: leave out the layers before this one
        layer: raw: a layer; -1 is the last
        head: raw: a head, or mean
    """

    head_fusion: str = "mean"
    discard_ratio: float = 0.0
    residual: float = 0.5
    start_layer: int = 0
    layer: int = -1
    head: int | Literal["mean"] = "mean"


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Which maps `vit explain` makes, and where they go.

    Args:
        methods: names separated by commas; best: the one that vit faithfulness found; auto: rollout
            and, of up to 64 images, best where it is known, else libra-removal
        target: auto (the predicted one), a name, an index, all or top3; also "A - B", the
            difference of two logits, and sigmoid:A, a label that others don't exclude
        formats: png (or jpeg or webp), npz, html; separated by commas
        interpolation: smooth, or patches: each in one colour
        sanity_checks: sanity checks of every map; default: up to 64 images
        count: how many, where no IMAGES are named
        batch_size: images at a time; default: 64 up to 64 pixels a side, else 16
        device: auto, cpu, cuda or cuda:N
        resume: continue: skip what the manifest holds
        overwrite: replace an earlier result
        map_options: of the methods
        scale: of the colours: image, batch or fixed
        max_side: of a photo in the overlays, pixels; 0: no limit
        precision: auto, float32, bfloat16 or float16
        random_weights: true: the same model untrained, a sanity check
    """

    methods: Annotated[tuple[str, ...], Option(flag="--method")] = ("auto",)
    target: Annotated[TargetLike, Option(flag="--class")] = "auto"
    formats: Annotated[tuple[str, ...], Option(flag="--format")] = ("png", "npz")
    interpolation: str = "smooth"
    sanity_checks: Annotated[bool | None, Option(flag="--checks/--no-checks")] = None
    count: Annotated[int, Option(flag="--images", min=1)] = 16
    batch_size: Annotated[int | None, Option(min=1)] = None
    device: str = "auto"
    resume: bool = False
    overwrite: bool = False
    map_options: MapOptions = field(default_factory=MapOptions)
    scale: Annotated[str, Option(is_rare=True)] = "image"
    max_side: Annotated[int, Option(is_rare=True)] = 512
    precision: Annotated[str, Option(is_rare=True)] = "float32"
    random_weights: Annotated[bool, Option(is_rare=True)] = False


def pick(record: type[Record], arguments: Mapping[str, Any]) -> Record:
    """A record of those `arguments` that are its fields.

    Args:
        record: of this module.
        arguments: of a function that has all fields among its parameters: its `locals()`.

    Raises:
        ValueError: an argument of another type, or outside its bounds.
    """
    kinds = get_type_hints(record, include_extras=True)
    return record(**{name: _check_value(name, arguments[name], kinds[name]) for name in kinds})


def _check_value(name: str, value: Any, kind: Any) -> Any:
    # pydantic takes longer to import than `vit --help` may take
    from pydantic import TypeAdapter, ValidationError

    try:
        checked = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        problem = problem[:1].lower() + problem[1:]
        raise ValueError(f"{name} {shorten(repr(value))}: {problem}") from None

    option = next((part for part in get_args(kind) if isinstance(part, Option)), Option())
    if checked is not None and option.min is not None and checked < option.min:
        raise ValueError(f"{name} {value} must be at least {option.min}")
    if checked is not None and option.max is not None and checked > option.max:
        raise ValueError(f"{name} {value} must be at most {option.max}")
    return checked
